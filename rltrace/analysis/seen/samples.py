"""Samples of one process, as columns."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.seen.rows import extend


class Samples:
    """Samples of one counter of one process, as columns."""

    __slots__ = ("times_ns", "values")

    def __init__(self) -> None:
        self.times_ns = array("q")
        self.values = array("d")

    def add(self, time_ns: int, value: float) -> None:
        """Append one."""
        self.times_ns.append(time_ns)
        self.values.append(value)

    def extend(self, times_ns: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Append some."""
        extend(self.times_ns, times_ns)
        extend(self.values, values)

    def sort(self) -> None:
        """Put them in the order of their times: each thread of a process writes its own."""
        times_ns = np.frombuffer(self.times_ns, np.int64)
        if (np.diff(times_ns) >= 0).all():
            return
        order = np.argsort(times_ns, kind="stable")
        values = np.frombuffer(self.values, np.float64)[order]
        self.times_ns, self.values = array("q", times_ns[order].tobytes()), array("d", values.tobytes())


class Points(NamedTuple):
    """Samples in the order of their times, when none is added any more. Shape (N,)."""

    times_ns: NDArray[np.int64]
    values: NDArray[np.float64]

    def at(self, times_ns: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the last value of each moment or before it; 0 before the first."""
        return np.append(0.0, self.values)[np.searchsorted(self.times_ns, times_ns, side="right")]


NO_POINTS = Points(np.empty(0, np.int64), np.empty(0))


def points(samples: Samples) -> Points:
    """Return samples as they are now."""
    return Points(np.array(samples.times_ns, np.int64), np.array(samples.values, np.float64))


def values_at(samples: Samples, times_ns: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the last value of each moment or before it; 0 before the first."""
    return points(samples).at(times_ns)


class Balances:
    """What the owners of a process held after each allocation, as columns in the order of the allocator's changes."""

    __slots__ = ("owners", "places", "times_ns", "values")

    def __init__(self) -> None:
        self.times_ns = array("q")
        self.values = array("d")
        self.places = array("B")
        """The place of each one's owner in `owners`."""
        self.owners: list[str] = []

    def extend(self, places: NDArray[np.int64], times_ns: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Append some."""
        extend(self.places, places)
        extend(self.times_ns, times_ns)
        extend(self.values, values)
