"""When the steps of a run were, without reading more of it than the process whose steps they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rltrace.analysis.clocks import TimeLine
from rltrace.analysis.lanes import lanes, order
from rltrace.analysis.steps import is_whole, number_of
from rltrace.events import STEP, Span
from rltrace.read.recording import Process, Recording

MARGIN = 0.02
"""Of its length, that is shown before and after a step."""


class StepTime(NamedTuple):
    """One step, on the `TimeLine` of its Recording."""

    number: int
    start_ns: int
    end_ns: int | None
    """None while it is open."""
    is_whole: bool
    """Whether it is over, was not aborted, and was recorded."""
    key: str
    """Of the process whose step it is."""


def step_times(recording: Recording) -> list[StepTime]:
    """The steps that count, in order: the driver's; without a driver the lowest rank's; else each process's own."""
    on_lane, time_line = lanes(recording.processes), TimeLine(recording)
    in_order = sorted(recording.processes, key=lambda process: (order(on_lane[process.key])[:3], process.start_ns))
    found: list[StepTime] = []
    for process in in_order:
        lane = on_lane[process.key]
        steps = _steps_of(process, time_line.shift_ns(process))
        if steps and (lane.is_driver or lane.rank is not None):
            return steps
        found += steps
    return found


def _steps_of(process: Process, shift_ns: int) -> list[StepTime]:
    spans = [event for event in process.events() if isinstance(event, Span) and event.name == STEP]
    return [
        StepTime(
            number_of(span, place),
            span.start_ns + shift_ns,
            None if span.end_ns is None else span.end_ns + shift_ns,
            is_whole(span),
            process.key,
        )
        for place, span in enumerate(sorted(spans, key=lambda span: span.start_ns))
    ]


def first_look(recording: Recording, steps: Sequence[StepTime]) -> tuple[int, int] | None:
    """What to show of a timeline first: a steady step of middle length, from and to when in nanoseconds since 1970.

    Args:
        recording: It may go on.
        steps: From `step_times`.

    Returns:
        None where no step is over.
    """
    steps = [step for step in steps if step.key == steps[0].key]
    whole = [step for step in steps if step.is_whole]
    steady = [step for step in whole if step is not steps[0]] or whole
    if not steady:
        return None
    by_length = sorted(steady, key=_length_ns)
    return around(recording, steps, [by_length[(len(by_length) - 1) // 2]])


def around(recording: Recording, steps: Sequence[StepTime], shown: Sequence[StepTime]) -> tuple[int, int]:
    """From and to when steps are, with a margin that stays inside of what was recorded; nanoseconds since 1970."""
    last_ns = max(step.start_ns if step.end_ns is None else step.end_ns for step in steps)
    begin_ns = min(step.start_ns for step in shown)
    end_ns = max(last_ns if step.end_ns is None else step.end_ns for step in shown)
    margin_ns = round(MARGIN * (end_ns - begin_ns))
    time_line = TimeLine(recording)
    first_ns = min(process.start_ns + time_line.shift_ns(process) for process in recording.processes)
    begin_ns, end_ns = max(begin_ns - margin_ns, first_ns), min(end_ns + margin_ns, last_ns)
    return begin_ns + time_line.unix_offset_ns, end_ns + time_line.unix_offset_ns


def _length_ns(step: StepTime) -> int:
    return (step.end_ns or step.start_ns) - step.start_ns
