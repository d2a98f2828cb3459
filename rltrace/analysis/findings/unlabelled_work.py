"""Ranks compute in no phase: a reward function that nobody marked, for example."""

from __future__ import annotations

import numpy as np

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding
from rltrace.analysis.findings.gaps import longest_gaps
from rltrace.analysis.findings.run import PerStep, Run
from rltrace.analysis.idle import shown_lanes
from rltrace.analysis.phases import UNLABELLED

NAME = "unlabelled_work"

LEAST_SHARE = 0.05
"""The share of a step from which on it is told: what a trainer does around its phases is 1 % of a step and less
(docs/measurements/8b.md, docs/measurements/verl_8b.md), and the first screen says from here on where idle time is."""


def judge(run: Run) -> list[Finding]:
    """Price the time in which ranks compute, and neither they nor the driver are in a phase."""
    lanes = [lane for lane in shown_lanes(run.phases) if not lane.is_driver]
    run.require_phases(lanes)
    names = {lane.name for lane in lanes}
    price = _seconds(run, names)
    gaps = longest_gaps(run, names, lambda gap: gap.unlabelled_seconds)
    if price.mean() < LEAST_SHARE * run.step_seconds.mean() or not gaps:
        return []
    scores = " It may be the reward: samples are scored there" if gaps[0].may_be_reward else ""
    return [
        run.finding(
            NAME,
            f"For {as_text(price.mean())} of a step the ranks compute in no phase: most {gaps[0].words}",
            [f"nobody marked what runs there, so no table names it.{scores}", *(gap.words for gap in gaps[1:])],
            per_step=price,
            less_because="to mark it says what it is, and makes nothing faster",
            about=(),
            settings=list(dict.fromkeys(gap.mark for gap in gaps)),
        )
    ]


def _seconds(run: Run, lanes: set[str]) -> PerStep:
    """Return the seconds of each step that lanes compute in no phase: their mean, of those that were there."""
    place = {number: at for at, number in enumerate(run.numbers)}
    rows = [row for row in run.summary.phases if row.steady and row.lane in lanes and row.step in place]
    steps = [place[row.step] for row in rows if row.step is not None]
    sums = np.bincount(steps, [row.phases[UNLABELLED].seconds for row in rows], len(run.steps))
    return np.asarray(sums / np.maximum(np.bincount(steps, minlength=len(run.steps)), 1))
