"""Exceptions that left a span, whether or not the program caught them further out.

A span has the name of the exception type that left it, and nothing says which exception of that type it was. So one
that leaves an outer span cannot be told from another of its type that had left an inner span and was caught: it is not
counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np

from rltrace.analysis.intervals import Intervals, union
from rltrace.analysis.observations import Observations
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.steps import StepWindows

NO_ERRORS = frozenset({"StopIteration", "StopAsyncIteration", "CancelledError", "SystemExit"})
"""How Python says that something is over, or was cancelled; for an exit no span says whether its code was 0."""


class SpanErrors(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of exception that left spans of one name, in the processes of one name."""

    error: str
    """Name of the exception."""
    message: str | None
    """The first line of what it said, with secrets redacted; of several the first one's. None where it said nothing,
    and in Recordings of a time when that was not recorded."""
    name: str
    """Name of the innermost span that the exception left."""
    phase: str | None
    """The phase of the same process in which that happened, or the span itself if it is a phase; None outside of
    phases."""
    process: str
    """What the process is called."""
    processes: int
    """How many processes of that name had the error."""
    count: int
    """How many spans ended with it."""
    first_seconds: float
    """When the first one left its span, counted from the beginning of the Recording."""
    steps: list[int]
    """Numbers of the steps in which it happened; empty if it happened in none."""


def span_errors(seen: Observations, windows: StepWindows) -> list[SpanErrors]:
    """Return each exception once, the first one first, without those of steps and sleeps, whose own figures have
    them."""
    alike: dict[tuple[str, str, str | None, str], list[tuple[Seen, int]]] = {}
    for process in seen.processes:
        phases = (
            {name: union(kept.rows(seen.end_ns)) for name, kept in process.phases.items()} if process.errors else {}
        )
        for error, name, end_ns in _innermost(process):
            phase = name if name in phases else _phase_at(phases, end_ns)
            alike.setdefault((error, name, phase, process.process.name), []).append((process, end_ns))
    found = []
    for (error, name, phase, called), left in alike.items():
        # Just before its end, which may be the step's too.
        numbers = {windows.of(process.lane).step_at(end_ns - 1) for process, end_ns in left}
        found.append(
            SpanErrors(
                error=error,
                message=_first_message([process for process, _ in left], error, name),
                name=name,
                phase=phase,
                process=called,
                processes=len({process.process.key for process, _ in left}),
                count=len(left),
                first_seconds=(min(end_ns for _, end_ns in left) - seen.start_ns) / 1e9,
                steps=sorted(number for number in numbers if number is not None),
            )
        )
    return sorted(found, key=lambda errors: errors.first_seconds)


def _first_message(processes: list[Seen], error: str, name: str) -> str | None:
    """What the first of these exceptions said, over all processes."""
    said = [process.messages[error, name] for process in processes if (error, name) in process.messages]
    return min(said)[1] if said else None


def _innermost(process: Seen) -> Iterator[tuple[str, str, int]]:
    """Return exception, span and end of each span that an exception left, unless it left a span inside of that too."""
    rows = sorted(
        (thread, task, error, start_ns, -end_ns, name)
        for (thread, task, error, name), kept in process.errors.items()
        if error not in NO_ERRORS
        for start_ns, end_ns in kept.ended().tolist()
    )
    for row, following in pairwise([*rows, None]):
        assert row is not None
        *where, _, negative_end_ns, name = row
        # One inside of it is the next row, and ends no later.
        if following is None or list(following[:3]) != where or following[4] < negative_end_ns:
            yield row[2], name, -negative_end_ns


def _phase_at(phases: dict[str, Intervals], end_ns: int) -> str | None:
    """Return the phase that an exception ended, or in which it left a span."""
    return next((name for name, rows in phases.items() if _is_in(rows, end_ns)), None)


def _is_in(rows: Intervals, at_ns: int) -> bool:
    """Return whether an instant is in one of disjoint intervals, or at the end of one."""
    place = int(np.searchsorted(rows[:, 0], at_ns)) - 1
    return place >= 0 and bool(at_ns <= rows[place, 1])
