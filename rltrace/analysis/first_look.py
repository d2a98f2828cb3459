"""Where a timeline opens: at a steady step, or at the chosen part."""

from __future__ import annotations

from collections.abc import Sequence

from rltrace.analysis.clocks import TimeLine
from rltrace.analysis.selected import chosen_steps
from rltrace.analysis.step_times import StepTime, step_times
from rltrace.read.recording import Recording
from rltrace.read.selection import ALL, Selection

MARGIN = 0.02
"""Share of a step's length that is shown before and after it."""


def first_look(recording: Recording, selection: Selection = ALL) -> tuple[int, int] | None:
    """Return what a timeline shows first: a steady step of middle length, or the part that was chosen.

    Args:
        recording: The whole Recording, which may be live.
        selection: The chosen part.

    Returns:
        From and to when, in nanoseconds since 1970, inside of what was recorded; None if no step is over.
    """
    steps = step_times(recording)
    if not steps:
        return None
    time_line = TimeLine(recording)
    first_ns = min(process.start_ns + time_line.shift_ns(process) for process in recording.processes)
    last_ns = max(step.start_ns if step.end_ns is None else step.end_ns for step in steps)
    if selection.time is not None:
        begin_ns, end_ns = (first_ns + side * 1e9 for side in selection.time)
    else:
        steady = _steady(steps)
        chosen = chosen_steps(recording, steps, selection.steps) if selection.steps else steady
        if not chosen:
            return None
        begin_ns = min(step.start_ns for step in chosen)
        end_ns = max(last_ns if step.end_ns is None else step.end_ns for step in chosen)
        margin_ns = MARGIN * (end_ns - begin_ns)
        begin_ns, end_ns = begin_ns - margin_ns, end_ns + margin_ns
    begin, end = round(max(begin_ns, first_ns)), round(min(end_ns, last_ns))
    return (begin + time_line.unix_offset_ns, end + time_line.unix_offset_ns) if begin < end else None


def _steady(steps: Sequence[StepTime]) -> list[StepTime]:
    """Return the steady step of middle length; without a steady step, the first step."""
    whole = [step for step in steps if step.is_whole and step.key == steps[0].key]
    steady = [step for step in whole if step is not steps[0]] or whole
    by_length = sorted(steady, key=lambda step: (step.end_ns or step.start_ns) - step.start_ns)
    return by_length[(len(by_length) - 1) // 2 :][:1]
