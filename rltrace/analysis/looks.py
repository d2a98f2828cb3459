"""What processes read when they looked at their memory: the arguments of their `memory.edge` spans, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.observations import once
from rltrace.analysis.seen.looked import Looked
from rltrace.analysis.seen.process import Seen
from rltrace.read.columns import NUMBER_PLACES, OPEN

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

    @staticmethod
    def without_any(many: int) -> ByName:
        """Return so many looks that say nothing."""
        return ByName(many, [], np.empty(0, np.intp), np.empty(0, np.intp), np.empty(0))

    def of(self, name: str) -> Values:
        """Return the numbers of a name, (many,); NaN where a look says none."""
        found = np.full(self.many, np.nan)
        if name in self.names:
            own = self._rows(name)
            found[self.looks[own]] = self.values[own]
        return found

    def says(self, name: str) -> NDArray[np.bool_]:
        """Return which looks say something of a name, (many,)."""
        found = np.zeros(self.many, np.bool_)
        if name in self.names:
            found[self.looks[self._rows(name)]] = True
        return found

    def _rows(self, name: str) -> Places:
        return np.flatnonzero(self.places == self.names.index(name))  # quicker than a mask, of which two are made

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
    is_of_gpu: NDArray[np.bool_]
    """Whether the totals are a GPU's driver's."""
    used_bytes: Values
    """The bytes in use by a GPU's driver; NaN if nobody asked, or for a host, whose total says little."""
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
    starts_ns, ends_ns, many = looked.starts, looked.ends, np.array(looked.many)
    is_over = np.flatnonzero(ends_ns != OPEN)
    order = is_over[np.argsort(ends_ns[is_over], kind="stable")]
    place_of = np.full(len(many), -1, np.intp)
    place_of[order] = np.arange(len(order))
    look_of, of, names, values = (
        np.repeat(place_of, many),
        *(np.array(kept) for kept in (looked.of, looked.names, looked.values)),
    )
    texts, turn_texts = [*looked.texts], np.array([*looked.turn_texts, None], np.object_)  # the last one is no text

    def rows(key: str) -> Places:
        own = np.flatnonzero((of == NUMBER_PLACES[key]) & (look_of >= 0))
        return own[np.argsort(look_of[own], kind="stable")]

    def named(key: str) -> ByName:
        own = rows(key)
        return ByName(len(order), texts, look_of[own], names[own].astype(np.intp), values[own])

    def number(key: str) -> Values:
        found, own = np.full(len(order), np.nan), rows(key)
        found[look_of[own]] = values[own]
        return found

    totals = named("totals")
    return Looks(
        starts_ns=starts_ns[order],
        ends_ns=ends_ns[order],
        turns=turn_texts[np.array(looked.turns, np.intp)[order]],
        totals=totals,
        is_of_gpu=totals.says(DRIVER_RESERVED),
        used_bytes=totals.of("used"),
        held_bytes=named("held_bytes"),
        cpu_ns=named("cpu_ns"),
        free_bytes=number("free_bytes"),
        others_bytes=number("others_bytes"),
        age_ns=np.nan_to_num(number("age_ns")),
        unchanged_ns=number("unchanged_ns"),
    )


def together(parts: Sequence[Looks]) -> Looks:
    """Return the looks of several processes after one another."""
    of_parts = zip(*parts, strict=True)
    return Looks._make(
        _joined(column) if isinstance(column[0], ByName) else np.concatenate(column) for column in of_parts
    )
