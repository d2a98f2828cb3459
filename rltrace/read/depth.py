"""How deep spans are nested: how many others of their row were open when each began."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from rltrace.events import COLLECTION, MEMORY_EDGE, PHASES, REQUEST, STEP, Counter, Span

ALWAYS = frozenset({STEP, REQUEST, MEMORY_EDGE, COLLECTION, *PHASES})
"""Spans that are shown however deep they are: they have rows of their own, or are what the memory of devices is made
of."""

_NEVER = (1 << 63) - 1


def depths(
    rows: Sequence[NDArray[np.int64]], starts_ns: NDArray[np.int64], ends_ns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the depth of each span; 1 is that of the outermost ones.

    Args:
        rows: Columns that say on which row a span is, such as its thread, task and lane.
        starts_ns: When it began.
        ends_ns: When it ended; negative while it is open.
    """
    ends = np.where(ends_ns < 0, _NEVER, ends_ns)
    order = np.lexsort((-ends, starts_ns, *rows))
    found = np.empty(len(order), np.int64)
    if not len(order):
        return found
    is_new = np.zeros(len(order), np.bool_)
    for column in rows:
        is_new[1:] |= np.diff(column[order]) != 0
    for own in np.split(order, np.flatnonzero(is_new)):
        starts = starts_ns[own]
        over = np.searchsorted(np.sort(ends[own]), starts, side="right")
        found[own] = np.arange(1, len(own) + 1) - over + (ends[own] == starts)
    return found


def shallow(events: Iterable[Span | Counter], depth: int) -> Iterator[bool]:
    """Yield for each span of a process whether it is not too deep.

    Args:
        events: All events of the process.
        depth: How deep it may be.
    """
    columns = [array("q") for _ in range(5)]
    always = []
    for span in events:
        if isinstance(span, Span):
            lane = -1 if span.lane is None else span.lane
            end_ns = -1 if span.end_ns is None else span.end_ns
            values = (_signed(span.thread), _signed(span.task), lane, span.start_ns, end_ns)
            for column, value in zip(columns, values, strict=True):
                column.append(value)
            always.append(span.name in ALWAYS or span.is_phase)
    thread, task, lanes, starts_ns, ends_ns = (np.array(column, np.int64) for column in columns)
    yield from (np.array(always, np.bool_) | (depths((thread, task, lanes), starts_ns, ends_ns) <= depth)).tolist()


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
