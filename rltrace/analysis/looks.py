"""What processes read when they looked at their memory: the arguments of their `memory.edge` spans, as columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.observations import once
from rltrace.analysis.seen.looked import Looked
from rltrace.analysis.seen.process import Seen
from rltrace.read.columns import OPEN

DRIVER_RESERVED = "driver.reserved"

STAMP = "unchanged_ns"

CONSISTENT_NS = 5_000_000
"""Samples of one moment lie at most this far apart."""

GRANULE_BYTES = 2 << 20
"""The driver gives memory out in multiples of this."""

Places = NDArray[np.intp]
Values = NDArray[np.float64]


class ByName(NamedTuple):
    """An argument of looks that has a number for each of some names, such as processes: one row per number."""

    many: int
    """How many looks there are."""
    names: list[str]
    looks: Places
    """The look of each number, (N,)."""
    places: Places
    """The place of its name, (N,)."""
    values: Values

    def of(self, name: str) -> Values:
        """Return the numbers of a name, (many,); NaN where a look says none."""
        found = np.full(self.many, np.nan)
        if name in self.names:
            is_one = self.places == self.names.index(name)
            found[self.looks[is_one]] = self.values[is_one]
        return found

    def says(self, name: str) -> NDArray[np.bool_]:
        """Return which looks say something of a name, (many,)."""
        found = np.zeros(self.many, np.bool_)
        if name in self.names:
            found[self.looks[self.places == self.names.index(name)]] = True
        return found

    def says_any(self) -> NDArray[np.bool_]:
        """Return which looks say something at all, (many,)."""
        return np.bincount(self.looks, minlength=self.many) > 0

    def sums(self) -> Values:
        """Return the sum of all numbers of each look, (many,)."""
        return np.asarray(np.bincount(self.looks, self.values, self.many), np.float64)

    def without(self, names: frozenset[str]) -> ByName:
        """Return the numbers of all other names."""
        is_other = np.array([name not in names for name in self.names], np.bool_)[self.places]
        return self._replace(looks=self.looks[is_other], places=self.places[is_other], values=self.values[is_other])

    def part(self, chosen: Places) -> ByName:
        """Return some of the looks, in this order."""
        place_of = np.full(self.many, -1, np.intp)
        place_of[chosen] = np.arange(len(chosen))
        is_one = place_of[self.looks] >= 0
        return ByName(len(chosen), self.names, place_of[self.looks[is_one]], self.places[is_one], self.values[is_one])


def by_name(said: Sequence[dict[str, float]]) -> ByName:
    """Return what each of some looks says of some names as columns."""
    place_of = defaultdict[str, int](count().__next__)
    looks = np.repeat(np.arange(len(said)), np.fromiter(map(len, said), np.intp, len(said)))
    places = np.fromiter(map(place_of.__getitem__, chain.from_iterable(said)), np.intp, len(looks))
    numbers = np.fromiter(chain.from_iterable(map(dict.values, said)), np.float64, len(looks))
    return ByName(len(said), [*place_of], looks, places, numbers)


def _joined(parts: Sequence[ByName]) -> ByName:
    """Return the looks of some after one another."""
    place_of: dict[str, int] = {}
    looks, places, many = [], [], 0
    for part in parts:
        renamed = [place_of.setdefault(name, len(place_of)) for name in part.names]
        looks.append(part.looks + many)
        places.append(np.array(renamed, np.intp)[part.places])
        many += part.many
    values = np.concatenate([part.values for part in parts])
    return ByName(many, [*place_of], np.concatenate(looks), np.concatenate(places), values)


class Looks(NamedTuple):
    """Looks, one row each; NaN where one does not say a number."""

    starts_ns: NDArray[np.int64]
    ends_ns: NDArray[np.int64]
    turns: NDArray[np.object_]
    """What turned there; None if a phase did."""
    totals: ByName
    """The totals that were read: of a GPU by its driver, else of each process."""
    held_bytes: ByName
    """What the driver says of each process."""
    cpu_ns: ByName
    """The processor time of each process; NaN also where it is not known."""
    free_bytes: Values
    others_bytes: Values
    """What all other processes hold together."""
    age_ns: Values
    """How old is what the process repeats of itself; 0 of what it does not repeat."""
    unchanged_ns: Values
    """How long nothing of the process's memory had changed."""

    @property
    def used_bytes(self) -> Values:
        """The bytes in use by a GPU's driver; NaN if nobody asked, or for a host, whose total says little."""
        return self.totals.of("used")

    @property
    def is_of_gpu(self) -> NDArray[np.bool_]:
        """Whether the totals are a GPU's driver's."""
        return self.totals.says(DRIVER_RESERVED)

    def part(self, chosen: Places) -> Looks:
        """Return some of them, in this order."""
        parts = [column.part(chosen) if isinstance(column, ByName) else column[chosen] for column in self]
        return Looks._make(parts)


@once
def looks(seen: Seen) -> Looks:
    """Return the times when a process measured what it owns, in the order in which they ended."""
    return columns(seen.looks)


def columns(looked: Looked) -> Looks:
    """Return the looks that are over, in the order in which they ended."""
    starts_ns, ends_ns, all_said = looked.starts, looked.ends, looked.said()
    is_over = np.flatnonzero(ends_ns != OPEN)
    order = is_over[np.argsort(ends_ns[is_over], kind="stable")]
    said = [all_said[place] for place in order.tolist()]
    turns = np.empty(len(said), np.object_)
    turns[:] = [*_kept_once([of_look.turn for of_look in said])]
    return Looks(
        starts_ns=starts_ns[order],
        ends_ns=ends_ns[order],
        turns=turns,
        totals=by_name([of_look.totals for of_look in said]),
        held_bytes=by_name([of_look.held_bytes for of_look in said]),
        cpu_ns=by_name([of_look.cpu_ns for of_look in said]),
        free_bytes=_known([of_look.free_bytes for of_look in said]),
        others_bytes=_known([of_look.others_bytes for of_look in said]),
        age_ns=np.nan_to_num(_known([of_look.age_ns for of_look in said])),
        unchanged_ns=_known([of_look.unchanged_ns for of_look in said]),
    )


def _known(numbers: Sequence[float | None]) -> Values:
    return np.array(numbers, np.float64)  # NaN for None


def together(parts: Sequence[Looks]) -> Looks:
    """Return the looks of several processes after one another."""
    of_parts = zip(*parts, strict=True)
    return Looks._make(
        _joined(column) if isinstance(column[0], ByName) else np.concatenate(column) for column in of_parts
    )


def _kept_once(values: Sequence[object]) -> Iterator[str | None]:
    """Yield the texts among some values, each of them kept once."""
    kept: dict[str, str] = {}
    for value in values:
        yield kept.setdefault(value, value) if isinstance(value, str) else None
