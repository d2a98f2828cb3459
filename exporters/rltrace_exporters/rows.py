"""Puts spans that may overlap in any way onto rows on which they only nest or follow each other."""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol

REMEMBERED = 512
"""Intervals that a row remembers; a span that reaches back further gets another row."""


class Row(Protocol):
    """A row that takes spans as long as they fit."""

    def takes(self, start: int, end: int) -> bool:
        """Put the span [start, end) on this row, if it fits."""


class NestedRow:
    """A row of spans, written in any order, children before their parents.

    It remembers the outermost intervals written so far. A span fits if each of them lies before it, after it, or inside
    it; then those inside are forgotten for its sake. The importer sorts what it reads by time and keeps the order of
    the file among equal times, so a span that ends where one written earlier begins does not fit, and neither does one
    that begins where a child begins.
    """

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.horizon = -1
        """Nothing is known any more about the time before this."""

    def takes(self, start: int, end: int) -> bool:
        """Put the span [start, end) on this row, if it fits."""
        if start < self.horizon:
            return False
        first = bisect_right(self.ends, start)
        after = bisect_right(self.starts, end)
        if first < after and (self.starts[first] <= start or self.ends[after - 1] > end):
            return False
        self.starts[first:after] = [start]
        self.ends[first:after] = [end]
        if len(self.ends) > REMEMBERED:
            self._forget(REMEMBERED // 2)
        return True

    def _forget(self, count: int) -> None:
        self.horizon = self.ends[count - 1]
        del self.starts[:count], self.ends[:count]


class FlatRow:
    """A row of spans that follow each other: one live request at a time."""

    def __init__(self) -> None:
        self.end = -1

    def takes(self, start: int, end: int) -> bool:
        """Put the span [start, end) on this row, if everything on it has ended."""
        if start < self.end:
            return False
        self.end = end
        return True


class Rows:
    """As many rows as the spans need."""

    def __init__(self, kind: type[Row]) -> None:
        self.kind = kind
        self.rows: list[Row] = []

    def place(self, start: int, end: int) -> int:
        """Return the index of the first row that takes the span [start, end)."""
        for index, row in enumerate(self.rows):
            if row.takes(start, end):
                return index
        row = self.kind()
        row.takes(start, end)
        self.rows.append(row)
        return len(self.rows) - 1
