"""Calls the library's arithmetic of intervals; `rltrace/analysis/intervals.py` does the same with numpy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Places = NDArray[np.int64]


def union(library: ctypes.CDLL, rows: Rows) -> Rows:
    """Return what some intervals cover together."""
    rows = np.ascontiguousarray(rows, np.int64)
    joined = np.empty((len(rows), 2), np.int64)
    many = library.rltrace_union(address(rows), len(rows), address(joined))
    if many < 0:  # they are not in the order of their starts
        order = np.argsort(rows[:, 0], kind="stable")
        return union(library, rows.take(order, axis=0))  # `rows[order]` takes four times as long
    return _of_own(joined, many)


def cut(library: ctypes.CDLL, rows: Rows, windows: Rows) -> tuple[Rows, Places, Places]:
    """Return the pieces of intervals inside of windows, with the place of each one's window and row."""
    rows, windows = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(windows, np.int64)
    given = (address(rows), len(rows), address(windows), len(windows))
    room = len(rows) + len(windows)  # enough if the rows are disjoint
    while True:
        found = np.empty(4 * room, np.int64)
        at = address(found)
        many = library.rltrace_cut(*given, at, at + 16 * room, at + 24 * room, room)
        if many <= room:
            pieces, window, row = found[: 2 * room].reshape(room, 2), found[2 * room : 3 * room], found[3 * room :]
            return _of_own(pieces, many), _of_own(window, many), _of_own(row, many)
        room = many


def added_up(
    library: ctypes.CDLL, rows: Rows, group_of: Places, windows: Rows, kind_of: Places, shape: tuple[int, int]
) -> NDArray[np.int64]:
    """Return how long intervals lie inside of windows, by their groups and the windows' kinds."""
    given = [np.ascontiguousarray(one, np.int64) for one in (rows, group_of, windows, kind_of)]
    sums = np.zeros(shape, np.int64)
    rows_at, groups_at, windows_at, kinds_at = map(address, given)
    library.rltrace_add_up(rows_at, groups_at, len(rows), windows_at, kinds_at, len(windows), *shape, address(sums))
    return sums


def address(array: NDArray[Any]) -> int:
    """Return where an array begins; its own `ctypes` takes three times as long."""
    return int(array.__array_interface__["data"][0])


def _of_own(array: NDArray[np.int64], many: int) -> NDArray[np.int64]:
    """Return the beginning of an array; without the memory of the rest, if that is more than the beginning's."""
    beginning: NDArray[np.int64] = array[:many]
    return beginning if 2 * many >= len(array) else beginning.copy()
