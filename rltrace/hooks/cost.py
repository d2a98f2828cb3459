"""What recording one event costs this process on this machine.

The code that records is timed writing into a segment that is thrown away, so that the Recording does not show it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rltrace.host import clock
from rltrace.host.interruption import own_failure
from rltrace.record import spans
from rltrace.record.segment import NEXT_BYTES, Segment

BLOCKS = 40
EVENTS = 50
"""A block of so many events is long enough for the clock, and short enough that most blocks are not interrupted."""

_ARGS = {"bytes": 4096, "tensors": 3}

Event = Callable[[], Any]

OTHER_EVENTS: dict[str, Callable[[], Event]] = {}
"""Events that an instrumentation records in another way, by name. Each function returns what records one."""


def measure_cost() -> dict[str, float]:
    """Measure what an event costs, and leave the figures in this process's part of the Recording.

    Returns:
        Nanoseconds of one event, the median of many blocks: `span` (the hook that opens it and two arguments included),
        `counter`, `flow`, `dormant_hook` (a hook while recording is paused), and those of `OTHER_EVENTS`. Empty where
        nothing is recorded now.
    """
    current = spans.current()
    if current is None or not spans.is_recording():
        return {}
    try:
        costs = _measured(current.recording / f".cost-{current.key}")
    except own_failure():  # a full disk
        return {}
    current.append("cost", **costs)
    return costs


def _measured(scratch: Path) -> dict[str, float]:
    events: dict[str, Event] = {
        "span": hooked(_span),
        "counter": lambda: spans.counter("cost", 1),
        "flow": lambda: spans.flow("cost", "out"),
        "dormant_hook": hooked(_span, live=False),
        **{name: make() for name, make in OTHER_EVENTS.items()},
    }
    bare_ns = _nanoseconds(_nothing, scratch)
    return {name: max(0.0, _nanoseconds(event, scratch) - bare_ns) for name, event in events.items()}


def _nanoseconds(event: Event, scratch: Path) -> float:
    segment = Segment(scratch, NEXT_BYTES)
    try:
        with spans.writing_to(segment):
            blocks_ns = sorted(_block_ns(event) for _ in range(BLOCKS))
            return blocks_ns[BLOCKS // 2] / EVENTS  # `statistics` takes a tenth of what `import rltrace` does
    finally:
        scratch.unlink()
        segment.unmap()


def _block_ns(event: Event) -> int:
    start_ns = clock.now_ns()
    for _ in range(EVENTS):
        event()
    return clock.now_ns() - start_ns


def _nothing() -> None:
    """Do nothing: the program makes this call with or without us."""


def hooked(open_span: Event, *, live: bool = True) -> Event:
    """Return a function with a span around it, hooked as a framework's is; the hook is dormant if it is not live."""
    from rltrace.hooks.hook import Hook
    from rltrace.hooks.wrapping import wrap_function

    hook = Hook("cost", "cost:nothing")
    hook.bind(live)
    return wrap_function(_nothing, hook, lambda _args, _kwargs: open_span().__enter__(), _end)


def _span() -> Any:
    return spans.automatic_span("cost", **_ARGS)


def _end(opened: Any, _result: Any, _error: BaseException | None) -> None:
    opened.__exit__(None)
