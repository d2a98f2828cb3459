"""Spans that have begun and not ended: what was running when a process died, or is hanging now."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rltrace.analysis.observations import Observations
from rltrace.analysis.processes import State, state
from rltrace.analysis.seen.process import Seen
from rltrace.events import Args, Span
from rltrace.read.gate import plain

STILL_SECONDS = 60.0
"""A run in which nothing begins or ends for longer needs a look: however long a step is, it has many spans."""


class OpenSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A span without an end."""

    name: str
    """Name of the span."""
    args: Args
    """Its arguments, as they were at its beginning."""
    process: str
    """What the process is called."""
    process_key: str
    """The process's folder in the Recording."""
    process_state: State
    """State of the process, as in `processes`. `alive`: the span is under way. `died`: it was under way when the
    process died."""
    rank: int | None
    """The rank; None if it has none."""
    pid: int
    """Id of the process."""
    thread: str
    """Name of the thread."""
    open_seconds: float
    """How long it has been open: until now if the process is alive, until the process was seen to be gone, or else
    until its last event."""
    is_at_least: bool
    """It may have been open for longer, because nobody saw when the process went."""
    is_stuck: bool
    """Whether the process is alive and no span of the run has begun or ended for 60 s."""


def open_spans(seen: Observations) -> list[OpenSpan]:
    """Return every open span, the longest first."""
    last_ns = max((process.last_span_ns for process in seen.processes), default=0)
    stands_still = (seen.now_ns - last_ns) / 1e9 > STILL_SECONDS
    spans = [
        _open_span(span, process, seen, stands_still and id(span) in innermost)
        for process in seen.processes
        for innermost in [_innermost(process.open_spans)]
        for span in process.open_spans
    ]
    return sorted(spans, key=lambda span: -span.open_seconds)


def _innermost(spans: Sequence[Span]) -> set[int]:
    """Return identities of the spans that contain no other of their thread and task."""
    last: dict[tuple[int, int], Span] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        last[span.thread, span.task] = span
    return {id(span) for span in last.values()}


def _open_span(span: Span, process: Seen, seen: Observations, is_stuck: bool) -> OpenSpan:
    process_state = state(process, seen)
    return OpenSpan(
        name=span.name,
        args=plain(span.args),
        process=process.process.name,
        process_key=process.process.key,
        process_state=process_state,
        rank=process.lane.rank,
        pid=process.process.pid,
        thread=process.process.threads.get(span.thread, str(span.thread)),
        open_seconds=max(0.0, (seen.open_until_ns(process) - span.start_ns) / 1e9),
        is_at_least=not seen.is_end_known(process),
        is_stuck=is_stuck and process_state == "alive",
    )
