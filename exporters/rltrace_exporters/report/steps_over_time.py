"""All steps one after another: how long each took, and which phase made it longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.phases import RankStep, in_order
from rltrace.analysis.steady import lanes, together
from rltrace.analysis.steps import Step
from rltrace_exporters.report.amounts import as_text
from rltrace_exporters.report.blocks import Command, Legend, Note
from rltrace_exporters.report.chart import Bar, Chart, Plot
from rltrace_exporters.report.sections import Block, color_of, view
from rltrace_exporters.report.ticks import end_of_axis, ticks
from rltrace_exporters.report.values import Missing, RunValues

HEIGHT = 200
MOST_BARS = 100
"""So many steps have a bar each; of more, neighbours share one."""
ABOVE_STEADY = 1.5
"""How many times the longest steady step the axis shows: a first step that takes longer is cut."""
SLOW = 1.1
"""How many times the median a step takes that is named."""
NAMED = 3
"""So many steps that failed are named."""
PLAIN = "#94a3b8"
"""Colour of a step in which nobody knows the phases."""


class _Column(NamedTuple):
    """Some steps that follow each other."""

    steps: list[Step]
    seconds: float
    """Their mean length."""
    phases: dict[str, float]
    """Mean seconds by phase."""


def steps_over_time(values: RunValues) -> list[Block]:
    """Return the steps' chart, and the slowest ones by name."""
    owner = values.windows.owner
    steps = [step for step in values.summary.steps if owner is None or step.lane == owner.lane.name]
    if not steps:
        raise Missing(
            "No step was recorded, so there is nothing to compare over time: "
            '`with rltrace.span("step", step=n)` marks one.'
        )
    by_step = _phases(values)
    many = -(-len(steps) // MOST_BARS)
    columns = [_column(steps[place : place + many], by_step) for place in range(0, len(steps), many)]
    names = in_order(name for column in columns for name in column.phases)
    to = _top(columns)
    bars = [bar for place, column in enumerate(columns) for bar in _stacked(column, place, names, to)]
    plot = Plot("seconds", HEIGHT, "Mean of the ranks" if len(values.ranks) > 1 else "", to, "s", bars=bars)
    title = "Seconds of each step" if many == 1 else f"Seconds of a step, mean of each {many}"
    marks = [(place + 0.5, str(columns[place].steps[0].step)) for place in _marked(len(columns))]
    legend = [Legend(name, color_of(name)) for name in names if any(column.phases.get(name) for column in columns)]
    chart = Chart(title, len(columns), "step", [plot], legend, x_marks=marks, is_alike=False)
    return [chart, *_said(values, steps, to)]


def _phases(values: RunValues) -> dict[int | None, dict[str, float]]:
    """Return the seconds of each phase by step: the mean of the ranks."""
    rows = [row for row in values.summary.phases if row.step is not None]
    shown = {lane.lane for lane in together(lanes(rows))} if rows else set()
    of_step: dict[int | None, list[RankStep]] = {}
    for row in rows:
        if row.lane in shown:
            of_step.setdefault(row.step, []).append(row)
    found = {}
    for step, of_ranks in of_step.items():
        sums: dict[str, float] = {}
        for row in of_ranks:
            for name, share in row.phases.items():
                sums[name] = sums.get(name, 0.0) + share.seconds
        found[step] = {name: seconds / len(of_ranks) for name, seconds in sums.items()}
    return found


def _column(steps: list[Step], by_step: dict[int | None, dict[str, float]]) -> _Column:
    known = [by_step.get(step.step, {}) for step in steps]
    names = dict.fromkeys(name for of in known for name in of)
    phases = {name: sum(of.get(name, 0.0) for of in known) / len(steps) for name in names}
    return _Column(steps, sum(step.seconds for step in steps) / len(steps), phases)


def _top(columns: Sequence[_Column]) -> float:
    steady = [column.seconds for column in columns if any(step.steady for step in column.steps)]
    longest = max(column.seconds for column in columns)
    return end_of_axis(min(longest, ABOVE_STEADY * max(steady)) if steady else longest)


def _stacked(column: _Column, place: int, names: Sequence[str], to: float) -> list[Bar]:
    """Return the parts of one column from the bottom; they add up to a step's length."""
    start, end = place + 0.06, place + 0.94
    is_faint = not any(step.steady for step in column.steps)
    first, last = column.steps[0], column.steps[-1]
    which = f"step {first.step}" if first is last else f"steps {first.step} to {last.step}"
    state = "" if not is_faint else ", not counted" if first.error is None else f", aborted by {first.error}"
    whole = f"{which}{state}: {as_text(column.seconds)}"
    if not column.phases:
        return [Bar(start, end, PLAIN, whole, high=min(column.seconds, to), is_faint=is_faint)]
    bars, low = [], 0.0
    for name in names:
        seconds = column.phases.get(name, 0.0)
        if seconds <= 0 or low >= to:
            continue
        tip = f"{whole}; {name} {as_text(seconds)}"
        bars.append(Bar(start, end, color_of(name), tip, "", low, min(low + seconds, to), is_faint))
        low += seconds
    return bars


def _marked(columns: int) -> list[int]:
    if columns <= 12:
        return list(range(columns))
    return [int(at) for at in ticks(columns - 1, 10) if at == int(at)]


def _said(values: RunValues, steps: Sequence[Step], to: float) -> list[Block]:
    blocks: list[Block] = []
    cut = [step for step in steps if step.seconds > to and not step.steady]
    if cut:
        named = ", ".join(f"step {step.step} took {as_text(step.seconds)}" for step in cut[:3])
        blocks.append(Note(f"Cut at the top, and paler because it is in no mean: {named}."))
    for step in [step for step in steps if step.error is not None][:NAMED]:
        message = f": {step.error_message}" if step.error_message else ""
        blocks.append(Note(f"Step {step.step} was aborted by {step.error}{message}."))
    steady = [step for step in steps if step.steady]
    if len(steady) < 2:
        blocks.append(Note("Only one step can be counted, so nothing is known of how much steps vary."))
        return blocks
    lengths: NDArray[np.float64] = np.array([step.seconds for step in steady])
    middle = float(np.median(lengths))
    slow = sorted((step for step in steady if step.seconds > SLOW * middle), key=lambda step: -step.seconds)[:3]
    if slow:
        named = ", ".join(f"step {step.step} ({as_text(step.seconds)})" for step in slow)
        blocks.append(Note(f"The median step takes {as_text(middle)}. Slowest: {named}."))
        blocks.append(Command("The slowest in the timeline", view(values, step=slow[0].step)))
    else:
        least, most = float(lengths.min()), float(lengths.max())
        blocks.append(
            Note(f"The median step takes {as_text(middle)}; all are between {as_text(least)} and {as_text(most)}.")
        )
    return blocks
