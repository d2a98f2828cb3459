"""Rows of a process by what they have in common, and the columns that take them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.intervals import paired
from rltrace.analysis.seen.compact import CompactPairs
from rltrace.analysis.seen.spans import Intervalled
from rltrace.read import native
from rltrace.read.columns import MISSING, NO_TEXT, OPEN, Columns
from rltrace.read.native import groups as by_library

Rows = NDArray[np.intp]


class Times:
    """When spans began and ended, on the time line."""

    def __init__(self, rows: Columns, shift_ns: int) -> None:
        self.starts_ns = rows.start_ns + shift_ns if shift_ns else rows.start_ns
        self.ends_ns = np.where(rows.end_ns == OPEN, OPEN, rows.end_ns + shift_ns) if shift_ns else rows.end_ns
        self.has_open = bool((self.ends_ns == OPEN).any())

    def put(self, kept: Intervalled, chosen: Rows) -> None:
        """Keep those of some rows."""
        ends_ns = self.ends_ns.take(chosen)
        kept.has_open |= self.has_open and bool((ends_ns == OPEN).any())
        extend(kept.pairs, paired(self.starts_ns.take(chosen), ends_ns))


def extend(kept: array[Any] | NDArray[Any] | CompactPairs, values: NDArray[Any]) -> None:
    """Append numbers to a column that may still grow."""
    assert isinstance(kept, array)
    kept.frombytes(np.ascontiguousarray(values, kept.typecode).view(np.uint8).data)


def groups(keys: NDArray[Any]) -> list[Rows]:
    """Return the places of equal keys, none of which is negative, by where each key is first."""
    if not len(keys):
        return []
    most, library = int(keys.max()), native.library()
    if library is not None and most < by_library.MOST:
        return by_library.groups(library, keys, most)
    # A radix sort orders what fits into 16 bits, ten times as fast.
    order = np.argsort(keys.astype(np.uint16) if most < 1 << 16 else keys, kind="stable")
    in_order = keys.take(order)
    cuts = np.flatnonzero(in_order[1:] != in_order[:-1]) + 1
    return sorted(np.split(order, cuts), key=lambda places: int(places[0]))


def distinct(numbers: NDArray[np.integer[Any]]) -> tuple[NDArray[np.integer[Any]], NDArray[np.intp]]:
    """Return the numbers that there are, in order, and of each one its place among them.

    `np.unique` does the same by sorting. Small numbers are marked instead, a fifth of the work.
    """
    least, most = int(numbers.min(initial=0)), int(numbers.max(initial=0))
    if least < 0 or most > len(numbers):
        found, places = np.unique(numbers, return_inverse=True)
        return found, places
    is_there = np.zeros(most + 1, np.bool_)
    is_there[numbers] = True
    return np.flatnonzero(is_there), (np.cumsum(is_there) - 1).take(numbers)


def by_name(rows: Columns, is_one: NDArray[np.bool_]) -> Iterator[tuple[str, Rows]]:
    """Yield the names of some spans, in the order in which they were first, with the rows of each."""
    chosen = np.flatnonzero(is_one)
    names = rows.name.take(chosen)
    for places in groups(names):
        yield rows.texts[names[places[0]]], chosen[places]


def by_method(
    rows: Columns, is_one: NDArray[np.bool_], is_call: NDArray[np.bool_]
) -> list[tuple[str, str | None, Rows]]:
    """Return the same, those of calls for each method."""
    found: list[tuple[str, str | None, Rows]] = []
    for name, chosen in by_name(rows, is_one):
        if is_call[chosen[0]]:
            methods = rows.arguments["method"][chosen]
            for places in groups(methods + 1):
                method = methods[places[0]]
                found.append((name, None if method == NO_TEXT else rows.texts[method], chosen[places]))
        else:
            found.append((name, None, chosen))
    return sorted(found, key=lambda one: int(one[2][0]))


def whole_numbers(rows: Columns, key: str, chosen: Rows, otherwise: int = 0) -> NDArray[np.int64]:
    """Return an argument of some rows, and something else where it is missing."""
    column: NDArray[np.int64] = rows.arguments[key]
    if not column.strides[0]:  # no row has it, and `take` would spread the one value first
        column, chosen = column[:1], np.zeros(len(chosen), np.intp)
    values = column.take(chosen)
    values[values == MISSING] = otherwise
    return values
