"""Selects the events of a process that lie in time windows: whole spans that overlap, and samples that still hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from rltrace.events import MEMORY_EDGE, Counter, Span

Windows = tuple[tuple[int, int], ...]
"""From and to when, in nanoseconds, in order and disjoint."""


ALWAYS: Windows = ((-(1 << 62), 1 << 62),)
"""The window that everything is in."""


class Cut(NamedTuple):
    """What a part of a Recording has of a process, in the process's times."""

    windows: Windows | None = None
    """None is all of it."""
    step_numbers: Mapping[int, int] = {}
    """Number of each of its steps by when it began, because a part lacks the positions by which unnumbered steps are
    counted."""
    depth: int | None = None
    """How deep spans may be nested; None is as deep as they are."""


def inside(events: Iterable[Span | Counter], windows: Windows) -> Iterator[Span | Counter]:
    """Yield the events that say something about the windows.

    Args:
        events: Events of one process, in the order in which each thread wrote them.
        windows: The end of a window is not part of it.

    Yields:
        Spans that overlap a window, samples in it, and of each counter the last sample before, which still holds when
        the window begins. Measurements of memory hold as samples do.
    """
    held: dict[tuple[int, str], Span | Counter] = {}
    for event in events:
        is_sample = isinstance(event, Counter)
        if not is_sample and event.name != MEMORY_EDGE:
            if _overlaps(_begin_ns(event), _end_ns(event), windows):
                yield event
            continue
        key = (event.thread, event.name)
        at_ns = _begin_ns(event)
        before = held.pop(key, None)
        if before is not None and _overlaps(_begin_ns(before), at_ns, windows):
            yield before
        if _overlaps(at_ns, _end_ns(event), windows):
            yield event
        else:
            held[key] = event
    yield from (event for event in held.values() if _begin_ns(event) < windows[-1][1])


def _overlaps(begin_ns: int, end_ns: float, windows: Windows) -> bool:
    """Return whether an event overlaps a window; an instant overlaps the window that it is in."""
    return any(begin_ns < end and (begin < end_ns or begin <= begin_ns) for begin, end in windows)


def _begin_ns(event: Span | Counter) -> int:
    return event.ts_ns if isinstance(event, Counter) else event.start_ns


def _end_ns(event: Span | Counter) -> float:
    """Return the end of an event: a sample's is the moment itself, and an open span has none."""
    if isinstance(event, Counter):
        return event.ts_ns
    return float("inf") if event.end_ns is None else event.end_ns
