"""Arithmetic of sets of intervals: int64 arrays of shape (N, 2), each row `[start_ns, end_ns)`."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.int64]

EMPTY: Intervals = np.empty((0, 2), np.int64)


def union(*sets: Intervals) -> Intervals:
    """The intervals that at least one of the sets covers.

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
    """Nanoseconds that at least one of the sets covers: overlaps count once."""
    return total_ns(union(*sets))


def total_ns(rows: Intervals) -> int:
    """Sum of the lengths: overlaps count as often as they overlap."""
    return int((rows[:, 1] - rows[:, 0]).sum())


def cut(rows: Intervals, windows: Intervals) -> tuple[Intervals, NDArray[np.intp], NDArray[np.intp]]:
    """Cut intervals at the edges of windows; what lies in no window is left out.

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
