"""Assigns lanes to spans of one row that cross: one began before the other and ended inside it.

On a lane, spans nest. When a span ends, it takes the first lane that has no span that began before it and ended inside
it. Thousands of spans may be in flight and end in the order in which they began, each crossing all the others. So the
lane of a span that ends is barred for all younger spans at once, in a tree over the open spans whose nodes hold sets of
lanes as the bits of integers.
"""

from __future__ import annotations

import itertools
import sys

from rltrace.events import Span


class Crossing:
    """What bars the open spans of a row from lanes, as long as it bars any."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        """Leaves of open spans by their ids, in the order in which the spans began; those that began since have none
        yet."""
        self._next = 0
        self._barred = [0, 0]
        """Sets of lanes, one per node: node n has 2n and 2n + 1 below it, and what bars it bars all leaves below it."""
        self._free = sys.maxsize
        """How many of the oldest open spans are barred from no lane."""

    def lane(self, span: Span) -> int:
        """Return the first lane that a span is not barred from."""
        barred = self._lanes(span)
        return (~barred & (barred + 1)).bit_length() - 1

    def leave(self, row: list[Span], at: int, lane: int) -> bool:
        """Take a span out of its row, and bar the younger ones, which go on, from its lane.

        Args:
            row: The open spans of the row, the oldest first.
            at: Index of the span.
            lane: Its lane.

        Returns:
            Whether any span is barred now.
        """
        if at < len(row) - 1:
            self._place(row)
            self._bar(self._places[id(row[at])] + 1, 1 << lane)
            self._free = min(self._free, at)
        self._places.pop(id(row[at]), None)
        del row[at]
        return len(row) > self._free

    def _lanes(self, span: Span) -> int:
        place = self._places.get(id(span))
        if place is None:
            return 0
        node, lanes = place + len(self._barred) // 2, 0
        while node:
            lanes |= self._barred[node]
            node //= 2
        return lanes

    def _place(self, row: list[Span]) -> None:
        """Give a leaf to the youngest spans, which have none yet."""
        new = list(itertools.takewhile(lambda span: id(span) not in self._places, reversed(row)))
        if self._next + len(new) > len(self._barred) // 2:
            self._grow(row)
            return
        for span in reversed(new):
            self._places[id(span)] = self._next
            self._next += 1

    def _grow(self, row: list[Span]) -> None:
        """Start again with the spans that are open, and room for as many."""
        lanes = [self._lanes(span) for span in row]
        leaves = 2 << len(row).bit_length()
        self._barred = [0] * leaves + lanes + [0] * (leaves - len(row))
        self._places = {id(span): place for place, span in enumerate(row)}
        self._next = len(row)

    def _bar(self, first: int, lane: int) -> None:
        """Bar all taken leaves from one on, by the fewest nodes that have these and no others below them."""
        leaves = len(self._barred) // 2
        low, high = first + leaves, self._next + leaves
        while low < high:
            if low & 1:
                self._barred[low] |= lane
                low += 1
            if high & 1:
                high -= 1
                self._barred[high] |= lane
            low //= 2
            high //= 2
