"""Calls the library's arithmetic of intervals; `rltrace/analysis/intervals.py` does the same with numpy."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Places = NDArray[np.int64]


def union(library: ctypes.CDLL, rows: Rows) -> Rows:
    """Return what some intervals cover together."""
    rows = np.ascontiguousarray(rows, np.int64)
    joined = np.empty((len(rows), 2), np.int64)
    many = library.rltrace_union(rows.ctypes.data, len(rows), joined.ctypes.data)
    if many < 0:  # they are not in the order of their starts
        return union(library, rows[np.argsort(rows[:, 0], kind="stable")])
    return _of_own(joined, many)


def cut(library: ctypes.CDLL, rows: Rows, windows: Rows) -> tuple[Rows, Places, Places]:
    """Return the pieces of intervals inside of windows, with the place of each one's window and row."""
    rows, windows = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(windows, np.int64)
    room = len(rows) + len(windows)  # enough if the rows are disjoint
    while True:
        pieces, window, row = np.empty((room, 2), np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
        many = library.rltrace_cut(
            rows.ctypes.data, len(rows), windows.ctypes.data, len(windows),
            pieces.ctypes.data, window.ctypes.data, row.ctypes.data, room,
        )  # fmt: skip
        if many <= room:
            return _of_own(pieces, many), _of_own(window, many), _of_own(row, many)
        room = many


def _of_own(array: NDArray[np.int64], many: int) -> NDArray[np.int64]:
    """Return the beginning of an array, without the memory of the rest if that is much."""
    return array[:many].copy() if many < len(array) // 2 else array[:many]
