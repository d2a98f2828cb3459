"""Columns in as few bytes as they take, when nothing is added to them any more."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.intervals import Intervals
from rltrace.read.columns import OPEN

MANY = 128
"""Fewer rows stay as they are: to spread them again would take longer than to read them."""

WORTH_BYTES = 1 << 16
"""Fewer bytes do not get pages of their own."""

_BLOCK_NS = 1 << 31
"""A block of time. What begins in one and takes no longer than that ends within 32 bits of its beginning."""
_OPEN = (1 << 32) - 1
"""The offset of an end that there is none of."""


class CompactPairs:
    """Starts and ends in 8 bytes a row instead of 16: each counts from the beginning of a block of time."""

    __slots__ = ("blocks", "has_open", "many", "offsets")

    def __init__(
        self, offsets: NDArray[np.uint32], blocks: NDArray[np.int64], many: NDArray[np.intp], *, has_open: bool
    ) -> None:
        self.offsets = offsets
        """Nanoseconds since the block began, of each start and end."""
        self.blocks = blocks
        """When the block of some rows in succession begins."""
        self.many = many
        """How many these rows are."""
        self.has_open = has_open

    def __len__(self) -> int:
        return len(self.offsets)

    def rows(self) -> Intervals:
        """Return the starts and ends as they were."""
        rows = self.offsets.astype(np.int64)
        blocks = np.repeat(self.blocks, self.many)
        rows[:, 0] += blocks  # one column after the other: numpy takes three times as long for both at once
        rows[:, 1] += blocks
        if self.has_open:
            rows[self.offsets[:, 1] == _OPEN, 1] = OPEN
        return rows


def compact_pairs(pairs: array[int], *, has_open: bool) -> CompactPairs | None:
    """Return the same in half as many bytes; None of a few rows, and of spans that take seconds."""
    if len(pairs) < 2 * MANY:
        return None
    rows = np.frombuffer(pairs, np.int64).reshape(-1, 2)
    starts, ends = rows[:, 0], rows[:, 1]
    blocks = starts & -_BLOCK_NS
    firsts = np.flatnonzero(np.append(True, blocks[1:] != blocks[:-1]))
    if 4 * len(firsts) > len(rows):
        return None
    until = ends - blocks
    if has_open:
        is_open = ends == OPEN
        until[is_open] = 0
    if until.min() < 0 or until.max() >= _OPEN:
        return None
    if has_open:
        until[is_open] = _OPEN
    offsets = np.empty((len(rows), 2), np.uint32)
    offsets[:, 0], offsets[:, 1] = starts - blocks, until
    return CompactPairs(offsets, blocks[firsts], np.diff(firsts, append=len(rows)), has_open=has_open)


def narrowed(column: array[int]) -> NDArray[Any]:
    """Return whole numbers in as few bytes as the largest takes."""
    values = np.array(column)
    least, most = int(values.min(initial=0)), int(values.max(initial=0))
    code = next(code for code in "bhiq" if np.iinfo(code).min <= least and most <= np.iinfo(code).max)
    return values.astype(code)


def together(columns: Iterable[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return columns that lie side by side, apart from memory that is taken and given back all the time.

    What stays for long between what goes at once would keep much more memory taken than it has itself.
    """
    given = [np.ascontiguousarray(column) for column in columns]
    sizes = [(column.nbytes + 7) // 8 * 8 for column in given]
    if sum(sizes) < WORTH_BYTES:
        return given
    try:
        block = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # there are as many already as a process may have
        return given
    kept, at = [], 0
    for column, size in zip(given, sizes, strict=True):
        own = np.frombuffer(block, column.dtype, column.size, at).reshape(column.shape)
        own[...] = column
        own.flags.writeable = False
        kept.append(own)
        at += size
    return kept
