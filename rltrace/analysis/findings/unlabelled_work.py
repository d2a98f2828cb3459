"""Ranks compute in no phase: a reward function that nobody marked, for example."""

from __future__ import annotations

import numpy as np

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding, UnjudgeableError
from rltrace.analysis.findings.gaps import longest_gaps
from rltrace.analysis.findings.run import PerStep, Run
from rltrace.analysis.intervals import union
from rltrace.analysis.lanes import Lane

NAME = "unlabelled_work"

LEAST_SHARE = 0.05
"""The share of a step from which on it is told: what a trainer does around its phases is 1 % of a step and less
(docs/measurements/8b.md, docs/measurements/verl_8b.md), and the first screen says from here on where idle time is."""


def judge(run: Run) -> list[Finding]:
    """Price the time in which ranks compute, and neither they nor the driver are in a phase."""
    lanes = run.ranks or [lane for lane in run.phases if not lane.is_driver]
    if not lanes:
        raise UnjudgeableError('no phase is marked; `with rltrace.phase("train")` marks one')
    price = np.mean([_seconds(run, lane) for lane in lanes], axis=0)
    gaps = longest_gaps(run, {lane.name for lane in lanes}, lambda gap: gap.unlabelled_seconds)
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


def _seconds(run: Run, lane: Lane) -> PerStep:
    phases = union(*run.phases[lane].values(), *run.driver_phases.values())
    computing = run.computing.get(lane)
    return run.seconds_in(phases, *([] if computing is None else [computing])) - run.seconds_in(phases)
