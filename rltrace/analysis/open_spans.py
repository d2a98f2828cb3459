"""Spans that have begun and not ended: what was running when a process died, or hangs now."""

from __future__ import annotations

import msgspec

from rltrace.analysis.observations import Observations, Seen
from rltrace.analysis.processes import State, state
from rltrace.events import Args, Span

LONG_SECONDS = 60.0
"""A span open for longer is worth a look."""


class OpenSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A span without an end."""

    name: str
    args: Args
    process: str
    """What the process is called."""
    process_key: str
    process_state: State
    """`alive`: the span is under way. `died`: it was, when the process died. `gone`: when it went, somehow."""
    rank: int | None
    pid: int
    thread: str
    open_seconds: float
    """Until now where its process is alive, until it was seen to be gone, else until that process's last event."""
    is_at_least: bool
    """It may have been open for longer: nobody saw when its process was gone."""
    is_long: bool
    """Open for more than 60 s."""


def open_spans(seen: Observations) -> list[OpenSpan]:
    """Every open span, the longest first."""
    spans = [
        _open_span(span, process, state(process, seen), seen)
        for process in seen.processes
        for span in process.open_spans
    ]
    return sorted(spans, key=lambda span: -span.open_seconds)


def _open_span(span: Span, process: Seen, process_state: State, seen: Observations) -> OpenSpan:
    seconds = max(0.0, (seen.open_until_ns(process) - span.start_ns) / 1e9)
    return OpenSpan(
        name=span.name,
        args=span.args,
        process=process.process.name,
        process_key=process.process.key,
        process_state=process_state,
        rank=process.lane.rank,
        pid=process.process.pid,
        thread=process.process.threads.get(span.thread, str(span.thread)),
        open_seconds=seconds,
        is_at_least=not seen.is_end_known(process),
        is_long=seconds > LONG_SECONDS,
    )
