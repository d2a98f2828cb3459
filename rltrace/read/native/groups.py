"""Calls the library's grouping of keys; `rltrace/analysis/seen/rows.py` does the same with numpy."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrace.read.native.intervals import address

MOST = 1 << 16
"""There is a count for each key that there may be, so larger ones are sorted instead."""


def groups(library: ctypes.CDLL, keys: NDArray[Any], most: int) -> list[NDArray[np.intp]]:
    """Return the places of equal keys from 0 to `most`, by where each key is first."""
    keys = np.ascontiguousarray(keys, np.int32)
    counts, order, ends = np.zeros(most + 1, np.int64), np.empty(len(keys), np.int64), np.empty(most + 1, np.int64)
    many = library.rltrace_group(address(keys), len(keys), most, address(counts), address(order), address(ends))
    if many < 0:
        raise ValueError(f"a key of {len(keys)} is not from 0 to {most}")
    edges = [0, *ends[:many].tolist()]
    return [order[begin:end] for begin, end in pairwise(edges)]
