"""How values are spread, many groups of them at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.span_tables import Numbers, Places


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """How some values are spread. Percentiles between two values are interpolated between them."""

    count: int
    """So many values; where nobody said a value, it is not among them."""
    mean: float
    """Their mean."""
    p50: float
    """Half of the values are no more than this."""
    p95: float
    """95 % likewise."""
    p99: float
    """99 % likewise."""
    maximum: float
    """The largest."""


class Parts(NamedTuple):
    """The values of each group, the least first, one group's behind the other's; groups without any are left out."""

    values: NDArray[Any]
    groups: Places
    """Which groups have values, (P,)."""
    begins: Places
    """Where the values of each of these begin, (P,), and where they end."""
    ends: Places
    alike: list[tuple[Places, Places]]
    """Those of these that have as many values, and where they are, (groups, values): the steps of a run are alike, so
    that what is done with all groups of one size at once is done a few times."""

    @property
    def counts(self) -> Places:
        """How many values each of these groups has, (P,)."""
        return self.ends - self.begins

    def means(self) -> NDArray[np.float64]:
        """Return the mean of each of these groups, (P,)."""
        found = np.empty(len(self.groups))
        for own, places in self.alike:
            found[own] = np.add.reduce(self.values.take(places), axis=1) / places.shape[1]
        return found

    def percentile(self, share: float) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float64]]:
        """Return the values around a percentile of each of these groups, and how far from the first to the other one
        it lies, from 0 to 1."""
        place = share * (self.counts - 1)
        whole = place.astype(np.intp)
        below = self.begins + whole
        return self.values[below], self.values[np.minimum(below + 1, self.ends - 1)], np.asarray(place - whole)


def in_order(group: Places) -> tuple[Places, Places]:
    """Return the rows that are of a group (not -1), those of the first group first, and the group of each."""
    rows = np.flatnonzero(group >= 0)
    rows = rows[np.argsort(group[rows], kind="stable")]
    return rows, group[rows]


def parts(values: NDArray[Any], group: Places, many: int) -> Parts:
    """Return some values in order, group by group.

    Args:
        values: (N,).
        group: The group of each, those of the first group first, (N,).
        many: How many groups there are.
    """
    found = _parts(np.array(values), group, many)
    for _, places in found.alike:
        found.values[places] = np.sort(found.values.take(places), axis=1)
    return found


def ascending(values: NDArray[Any], group: Places, many: int) -> Places:
    """Return the rows group by group, the least value of each group first. Arguments as of `parts`."""
    found = np.empty(len(values), np.intp)
    for _, places in _parts(values, group, many).alike:
        found[places] = np.take_along_axis(places, np.argsort(values.take(places), axis=1), axis=1)
    return found


def _parts(values: NDArray[Any], group: Places, many: int) -> Parts:
    """Return the same in the given order."""
    edges = np.searchsorted(group, np.arange(many + 1))
    there = np.flatnonzero(edges[1:] > edges[:-1])
    counts = np.diff(edges)[there]
    alike = []
    for count in np.unique(counts).tolist():
        own = np.flatnonzero(counts == count)
        alike.append((own, edges[there[own]][:, None] + np.arange(count)))
    return Parts(values, there, edges[there], edges[there + 1], alike)


def distributions(values: NDArray[np.float64], group: Places, many: int) -> list[Distribution | None]:
    """Return how the values of each group are spread, (many,); None for one without any. Arguments as of `parts`."""
    ordered = parts(values, group, many)
    around = (ordered.percentile(share) for share in (0.5, 0.95, 0.99))
    percentiles = ((low + (high - low) * away).tolist() for low, high, away in around)
    columns = (
        ordered.counts.tolist(),
        ordered.means().tolist(),
        *percentiles,
        ordered.values[ordered.ends - 1].tolist(),
    )
    found: list[Distribution | None] = [None] * many
    for place, count, of_all, p50, p95, p99, maximum in zip(ordered.groups.tolist(), *columns, strict=True):
        found[place] = Distribution(count=count, mean=of_all, p50=p50, p95=p95, p99=p99, maximum=maximum)
    return found


def means(values: NDArray[np.float64], group: Places, many: int) -> NDArray[np.float64]:
    """Return the mean of the values of each group, (many,); NaN for one without any. Arguments as of `parts`."""
    given, found = _parts(values, group, many), np.full(many, np.nan)
    found[given.groups] = given.means()
    return found


def sums(values: Numbers, group: Places, many: int) -> Numbers:
    """Return the sum of the values of each of so many groups, (many,)."""
    found = np.zeros(many, np.int64)
    np.add.at(found, group, values)
    return found


def most(values: Numbers | NDArray[np.float64], group: Places, many: int) -> list[int | float | None]:
    """Return the largest value of each of so many groups, (many,); None for one that has none but negative ones."""
    found = np.full(many, -1, values.dtype)
    np.maximum.at(found, group, values)
    listed: Iterable[int | float] = found.tolist()
    return [None if value < 0 else value for value in listed]
