"""Arithmetic of sets of intervals: int64 arrays of shape (N, 2), each row `[start_ns, end_ns)`."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import pairwise
from typing import cast

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.int64]

EMPTY: Intervals = np.empty((0, 2), np.int64)


def union(*sets: Intervals) -> Intervals:
    """Return the intervals that at least one of the sets covers.

    Returns:
        Disjoint, in order, none empty; touching ones are joined.
    """
    rows = sets[0] if len(sets) == 1 else np.concatenate(sets) if sets else EMPTY
    rows = rows[rows[:, 1] > rows[:, 0]]
    if len(rows) < 2:  # most phases happen once a step
        return rows
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    reach_ns = np.maximum.accumulate(rows[:, 1])
    is_first = np.append(True, rows[1:, 0] > reach_ns[:-1])
    is_last = np.append(is_first[1:], True)
    return np.column_stack([rows[is_first, 0], reach_ns[is_last]])


def covered_ns(*sets: Intervals) -> int:
    """Return the nanoseconds that at least one of the sets covers; overlaps count once."""
    return total_ns(union(*sets))


def total_ns(rows: Intervals) -> int:
    """Return the sum of the lengths; overlaps count as often as they overlap."""
    return int((rows[:, 1] - rows[:, 0]).sum())


def cut(rows: Intervals, windows: Intervals) -> tuple[Intervals, NDArray[np.intp], NDArray[np.intp]]:
    """Cut intervals at the edges of windows; what lies in no window is dropped.

    Args:
        rows: Shape (N, 2), in any order.
        windows: Shape (W, 2), disjoint and in order.

    Returns:
        The pieces, shape (P, 2); for each piece the index of its window; and the index of the row it was cut from.
    """
    first = np.searchsorted(windows[:, 1], rows[:, 0], side="right")
    behind = np.searchsorted(windows[:, 0], rows[:, 1], side="left")
    pieces = np.maximum(behind - first, 0)
    row = np.repeat(np.arange(len(rows)), pieces)
    window = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.maximum(rows[row, 0], windows[window, 0])
    ends = np.minimum(rows[row, 1], windows[window, 1])
    return np.column_stack([starts, ends]).astype(np.int64), cast(NDArray[np.intp], window), row


def outside(rows: Intervals, windows: Intervals) -> tuple[Intervals, NDArray[np.intp]]:
    """Return the parts of the windows that no interval covers.

    Args:
        rows: Shape (N, 2), disjoint and in order.
        windows: Shape (W, 2), likewise.

    Returns:
        The gaps, shape (G, 2), in order and none empty; and for each the index of its window.
    """
    pieces, _, _ = cut(rows, windows)
    starts = np.sort(np.concatenate([windows[:, 0], pieces[:, 1]]))
    ends = np.sort(np.concatenate([windows[:, 1], pieces[:, 0]]))
    gaps = np.column_stack([starts, ends])[ends > starts]
    return gaps, np.searchsorted(windows[:, 0], gaps[:, 0], side="right") - 1


def opened_last(rows: Intervals, windows: Intervals) -> tuple[Intervals, NDArray[np.intp]]:
    """Divide windows among intervals: each instant belongs to the interval that began last among those that cover it.

    Args:
        rows: Shape (N, 2), in any order; only those that begin in a window count in it.
        windows: Shape (W, 2), disjoint and in order.

    Returns:
        Segments, shape (S, 2), disjoint and in order, and the index of each one's row; what nothing covers has no
        segment.
    """
    pieces, window, row = cut(rows, windows)
    begun = np.flatnonzero(pieces[:, 0] == rows[row, 0])
    in_time = begun[np.lexsort((pieces[begun, 0], window[begun]))]
    edges = np.searchsorted(window[in_time], np.arange(len(windows) + 1)).tolist()
    found: list[tuple[int, int, int]] = []
    for at, (first, behind) in enumerate(pairwise(edges)):
        chosen = row[in_time[first:behind]]
        found += _divide(rows[chosen].tolist(), chosen.tolist(), int(windows[at, 1]))
    segments = np.array(found, np.int64).reshape(-1, 3)
    return segments[:, :2], segments[:, 2].astype(np.intp)


def _divide(rows: list[list[int]], names: list[int], end_ns: int) -> Iterator[tuple[int, int, int]]:
    """Sweep over the rows of one window, sorted by their starts; of two that begin together the shorter one counts."""
    covering: list[tuple[int, int, int]] = []
    now_ns = 0
    for (start_ns, until_ns), name in zip(rows, names, strict=True):
        yield from _sweep(covering, now_ns, start_ns)
        now_ns = start_ns
        heapq.heappush(covering, (-start_ns, until_ns, name))
    yield from _sweep(covering, now_ns, end_ns)


def _sweep(covering: list[tuple[int, int, int]], now_ns: int, until_ns: int) -> Iterator[tuple[int, int, int]]:
    """Continue from now with the rows that cover it; finished rows are removed where they are in the way."""
    while covering and now_ns < until_ns:
        _, end_ns, name = covering[0]
        if end_ns <= now_ns:
            heapq.heappop(covering)
            continue
        reach_ns = min(end_ns, until_ns)
        yield now_ns, reach_ns, name
        now_ns = reach_ns
