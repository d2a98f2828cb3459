"""When the steps of a run were, found by reading only the process whose steps they are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rltrace.analysis.clocks import TimeLine
from rltrace.analysis.lanes import lanes, order
from rltrace.analysis.steps import is_whole, number_of
from rltrace.events import STEP, Span
from rltrace.read import columns
from rltrace.read.columns import Columns
from rltrace.read.recording import Process, Recording


class StepTime(NamedTuple):
    """One step, on the `TimeLine` of its Recording."""

    number: int
    start_ns: int
    end_ns: int | None
    """When it ended; None while it is open."""
    is_whole: bool
    """Whether it is over, was not aborted, and was recorded."""
    key: str
    """Key of the process whose step it is."""


def step_times(recording: Recording) -> list[StepTime]:
    """Return the steps that count, in order: the driver's; without a driver the lowest rank's; else each process's
    own."""
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
    spans: list[Span] = columns.fold(process, list, _add_steps)
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


def _add_steps(spans: list[Span], rows: Columns) -> None:
    if STEP in rows.texts:
        spans += rows.spans(np.flatnonzero(rows.name == rows.texts.index(STEP)))
