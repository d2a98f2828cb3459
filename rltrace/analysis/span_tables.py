"""Spans of all processes as one table, and what joins the rows of two tables: a key, a task, a trajectory's id."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.intervals import LATEST_NS
from rltrace.analysis.observations import Observations
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.spans import Intervalled
from rltrace.read.columns import OPEN

Numbers = NDArray[np.int64]
Places = NDArray[np.intp]
"""Rows of a table, in the order of another one's; -1 where there is none."""


class Timed(Protocol):
    """Spans, as columns."""

    @property
    def starts(self) -> Numbers: ...
    @property
    def until(self) -> Numbers:
        """When each ended; a large number while it is open."""

    @property
    def places(self) -> Numbers:
        """Which thread and task of which process each was in."""


class SpanTable:
    """Spans of one kind of all processes."""

    def __init__(self, seen: Observations, kept_of: Callable[[Seen], Intervalled | None]) -> None:
        """Put the spans together that each process has of the kind, if it has any."""
        found = [(number, kept_of(process)) for number, process in enumerate(seen.processes)]
        having = [(number, kept) for number, kept in found if kept]
        self._kept = [kept for _, kept in having]
        self.starts, self.ends = self.column("starts"), self.column("ends")
        self.until = np.where(self.ends == OPEN, LATEST_NS, self.ends)
        self.process = np.repeat(
            np.array([number for number, _ in having], np.int64), [len(kept) for kept in self._kept]
        )
        """The place of each one's process."""

    @cached_property
    def places(self) -> Numbers:
        """Which thread and task of which process each was in."""
        return self.column("places")

    @cached_property
    def ids(self) -> Numbers:
        """The trajectory that each says it belongs to; 0 if it does not say."""
        return self.column("trajectories")

    def column(self, name: str) -> Numbers:
        """Return a column of numbers."""
        return np.concatenate([np.empty(0, np.int64), *(np.array(getattr(k, name), np.int64) for k in self._kept)])

    def __len__(self) -> int:
        return len(self.starts)


def passed(seen: Observations, name: str) -> SpanTable:
    """Return the spans of a name that requests pass."""
    return SpanTable(seen, lambda process: process.passed.get(name))


def around(inner: Timed, outer: Timed) -> Places:
    """Return the span of the same thread and task that is around each one."""
    found = last_begun(inner.places, inner.starts, outer.places, outer.starts)
    return np.where(at(outer.until, found) >= inner.until, found, -1)


def at(column: NDArray[np.generic], places: Places) -> Numbers:
    """Return the values at these places; -1 where there is none."""
    return np.append(column.astype(np.int64, copy=False), -1).take(places)


def last_begun(keys: Numbers, at_ns: Numbers, of_keys: Numbers, of_starts: Numbers) -> Places:
    """Return for each key and instant the last span of that key that had begun by then; -1 if there is none."""
    spans = len(of_keys)
    if not spans or not len(keys):
        return np.full(len(keys), -1)
    both, times_ns = np.concatenate([of_keys, keys]), np.concatenate([of_starts, at_ns])
    order = np.lexsort((np.arange(len(both)) >= spans, times_ns, both))
    is_span = order < spans
    before = np.maximum.accumulate(np.where(is_span, np.arange(len(order)), -1))
    last = np.where(before >= 0, order[before], -1)
    found = np.full(len(keys), -1)
    asked = order[~is_span]
    found[asked - spans] = np.where((last[~is_span] >= 0) & (both[last[~is_span]] == both[asked]), last[~is_span], -1)
    return found
