"""Arithmetic of sets of intervals: int64 arrays of shape (N, 2), each row `[start_ns, end_ns)`."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rltrace.read import native
from rltrace.read.native import intervals as by_library

Intervals = NDArray[np.int64]

EMPTY: Intervals = np.empty((0, 2), np.int64)
EARLIEST_NS, LATEST_NS = np.iinfo(np.int64).min, np.iinfo(np.int64).max
"""Before and behind all times."""
_NOWHERE = np.empty(0, np.intp)


def union(*sets: Intervals) -> Intervals:
    """Return the intervals that at least one of the sets covers.

    Returns:
        Disjoint, in order, none empty; touching ones are joined.
    """
    rows = sets[0] if len(sets) == 1 else np.concatenate(sets) if sets else EMPTY
    library = native.library()
    if library is not None:
        return by_library.union(library, rows)
    if (rows[1:, 0] < rows[:-1, 0]).any():
        rows = rows.take(np.argsort(rows[:, 0], kind="stable"), axis=0)
    is_empty = rows[:, 1] <= rows[:, 0]
    if is_empty.any():
        rows = rows[~is_empty]
    if len(rows) < 2:  # most phases happen once a step
        return np.array(rows)
    reach_ns = np.maximum.accumulate(rows[:, 1])
    is_first = np.append(True, rows[1:, 0] > reach_ns[:-1])
    is_last = np.append(is_first[1:], True)
    return paired(rows[is_first, 0], reach_ns[is_last])


def paired(starts_ns: NDArray[np.int64], ends_ns: NDArray[np.int64]) -> Intervals:
    """Return the intervals from these starts to these ends."""
    rows = np.empty((len(starts_ns), 2), np.int64)
    rows[:, 0], rows[:, 1] = starts_ns, ends_ns
    return rows


def sorted_by(column: NDArray[np.int64], *others: NDArray[Any]) -> NDArray[np.intp]:
    """Return the places of rows in the order of a column; those that are alike there in the order of the others.

    Where none are alike, as times hardly ever are, nothing but that column is sorted.
    """
    order = np.argsort(column, kind="stable")
    in_order = column[order]
    return order if (in_order[1:] != in_order[:-1]).all() else np.lexsort((*others[::-1], column))


def covered_ns(*sets: Intervals) -> int:
    """Return the nanoseconds that at least one of the sets covers; overlaps count once."""
    return total_ns(union(*sets))


def total_ns(rows: Intervals) -> int:
    """Return the sum of the lengths; overlaps count as often as they overlap."""
    return int((rows[:, 1] - rows[:, 0]).sum())


def covered_in(rows: Intervals, windows: Intervals) -> NDArray[np.int64]:
    """Return the nanoseconds of each window that at least one of the rows covers; windows are disjoint and in order."""
    pieces, window, _ = cut(union(rows), windows)
    return added_up(pieces[:, 1] - pieces[:, 0], window, len(windows))


def added_up(numbers: NDArray[np.int64], group: NDArray[np.intp], many: int) -> NDArray[np.int64]:
    """Return the sum of each of so many groups."""
    sums = np.zeros(many, np.int64)
    np.add.at(sums, group, numbers)
    return sums


def added_up_by(
    rows: Intervals, group_of: NDArray[np.intp], windows: Intervals, kind_of: NDArray[np.intp], shape: tuple[int, int]
) -> NDArray[np.int64]:
    """Return how long intervals lie inside of windows, which are disjoint and in order.

    Args:
        rows: In any order.
        group_of: The group of each; -1 for one that does not count.
        windows: Disjoint and in order.
        kind_of: The kind of each.
        shape: How many groups and kinds there are.
    """
    library = native.library()
    if library is not None:
        return by_library.added_up(library, rows, group_of, windows, kind_of, shape)
    pieces, window, row = cut(rows, windows)
    counted = np.flatnonzero(group_of[row] >= 0)
    cell = group_of[row[counted]] * shape[1] + kind_of[window[counted]]
    return added_up(pieces[counted, 1] - pieces[counted, 0], cell, shape[0] * shape[1]).reshape(shape)


def holding(windows: Intervals, at_ns: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return the place of the window that each instant is in; -1 if it is in none.

    Args:
        windows: Shape (W, 2), disjoint and in order.
        at_ns: In any order.
    """
    if not len(windows):
        return np.full(len(at_ns), -1, np.intp)
    at = np.searchsorted(windows[:, 0], at_ns, side="right") - 1
    return np.where((at >= 0) & (at_ns < windows[at, 1]), at, -1)


def cut(rows: Intervals, windows: Intervals) -> tuple[Intervals, NDArray[np.intp], NDArray[np.intp]]:
    """Cut intervals at the edges of windows; what lies in no window is dropped.

    Args:
        rows: Shape (N, 2), in any order.
        windows: Shape (W, 2), disjoint and in order.

    Returns:
        The pieces, shape (P, 2); for each piece the index of its window; and the index of the row it was cut from.
    """
    library = native.library()
    if library is not None:
        return by_library.cut(library, rows, windows)
    first, behind = _windows_of(rows, windows)
    pieces = np.maximum(behind - first, 0)
    if not pieces.any():
        return EMPTY, _NOWHERE, _NOWHERE
    row = np.repeat(np.arange(len(rows)), pieces)
    window = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.maximum(rows[row, 0], windows[window, 0])
    ends = np.minimum(rows[row, 1], windows[window, 1])
    return paired(starts, ends), cast(NDArray[np.intp], window), row


def _windows_of(rows: Intervals, windows: Intervals) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return for each row its first window, and the one behind its last."""
    if len(rows) > 4 * len(windows) and (rows[1:] >= rows[:-1]).all():
        # As nearly always, rows begin and end in order: then it is quicker to look for the few windows in the rows.
        begun = np.searchsorted(rows[:, 0], windows[:, 1], side="left")
        ended = np.searchsorted(rows[:, 1], windows[:, 0], side="right")
        counts = (np.bincount(places, minlength=len(rows) + 1)[: len(rows)] for places in (begun, ended))
        first, behind = (np.cumsum(count) for count in counts)
        return first, behind
    first = np.searchsorted(windows[:, 1], rows[:, 0], side="right")
    return first, np.searchsorted(windows[:, 0], rows[:, 1], side="left")


def outside(rows: Intervals, windows: Intervals) -> tuple[Intervals, NDArray[np.intp]]:
    """Return the parts of the windows that no interval covers.

    Args:
        rows: Shape (N, 2), disjoint and in order.
        windows: Shape (W, 2), likewise.

    Returns:
        The gaps, shape (G, 2), in order and none empty; and for each the index of its window.
    """
    pieces, _, _ = cut(rows, windows)
    # Both are in order already, which a stable sort makes use of.
    starts = np.sort(np.concatenate([windows[:, 0], pieces[:, 1]]), kind="stable")
    ends = np.sort(np.concatenate([windows[:, 1], pieces[:, 0]]), kind="stable")
    is_gap = ends > starts
    gaps = paired(starts[is_gap], ends[is_gap])
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
    begun = np.flatnonzero((pieces[:, 0] == rows[:, 0][row]) & (pieces[:, 1] > pieces[:, 0]))
    begun = begun[np.argsort(window[begun], kind="stable")]
    found = [(EMPTY, np.empty(0, np.intp))]
    for some in np.split(begun, _cuts(window[begun])):
        of = row[some]
        # The later ones come last; of those that begin together the shorter one, then the first of the rows.
        order = sorted_by(rows[:, 0][of], -rows[:, 1][of], -of)
        segments, last = _last_over(pieces.take(some[order], axis=0))
        found.append((segments, of[order[last]]))
    return np.concatenate([segments for segments, _ in found]), np.concatenate([of for _, of in found])


_AT_A_TIME = 1 << 16
"""Pieces that are divided together: what belongs to them stays in a processor's cache."""


def _cuts(window: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return where to cut pieces, in order of their windows, into some that have whole windows each."""
    firsts = np.flatnonzero(np.diff(window)) + 1
    return firsts[np.flatnonzero(np.diff(firsts // _AT_A_TIME)) + 1] if len(firsts) else firsts


def _last_over(rows: Intervals) -> tuple[Intervals, NDArray[np.intp]]:
    """Return segments, disjoint and in order, and of each the last row that covers it.

    The ends of the rows cut time into cells. A row covers two blocks of cells that are as long as a power of two. From
    the longest blocks down, each hands its row on to its two halves.
    """
    if not len(rows):
        return EMPTY, np.empty(0, np.intp)
    edges = np.sort(rows.T, axis=None, kind="stable")  # starts are in order, and ends nearly; np.unique takes longer
    edges = edges[np.append(True, edges[1:] != edges[:-1])]
    first, behind = np.searchsorted(edges, rows[:, 0]), np.searchsorted(edges, rows[:, 1])
    power = np.frexp(behind - first)[1] - 1
    by_power = np.argsort(power.astype(np.uint8), kind="stable")
    ends = np.searchsorted(power[by_power], np.arange(int(power.max()) + 2))
    number_of = np.zeros(len(edges), np.int32)  # of the last row over the block that begins with a cell; from 1
    for level in range(int(power.max()), -1, -1):
        half = 1 << level
        upper = number_of[:-half].copy()
        np.maximum(number_of[half:], upper, out=number_of[half:])
        own = by_power[ends[level] : ends[level + 1]]
        np.maximum.at(number_of, np.concatenate([first[own], behind[own] - half]), np.tile(own + 1, 2).astype(np.int32))
    is_first = np.append(True, np.diff(number_of) != 0)
    begins = np.flatnonzero(is_first[:-1] & (number_of[:-1] > 0))
    changes = np.append(np.flatnonzero(is_first), len(edges) - 1)
    ends_at = np.minimum(changes[np.searchsorted(changes, begins, side="right")], len(edges) - 1)
    return paired(edges[begins], edges[ends_at]), number_of[begins].astype(np.intp) - 1
