"""What processes read when they looked at their memory: the arguments of their `memory.edge` spans, as columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.observations import once
from rltrace.analysis.seen.process import Seen
from rltrace.events import Span

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


def by_name(values: Sequence[Any]) -> ByName:
    """Return arguments that are dictionaries as columns; what is something else says nothing."""
    said: list[dict[str, Any]] = [value if isinstance(value, dict) else {} for value in values]
    place_of: dict[str, int] = {}
    places = [place_of.setdefault(name, len(place_of)) for of_look in said for name in of_look]
    looks = np.repeat(np.arange(len(said)), [len(of_look) for of_look in said] or 0)
    numbers = np.array([number for of_look in said for number in of_look.values()], np.float64)
    return ByName(len(said), [*place_of], looks, np.array(places, np.intp), numbers)


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
    return columns(sorted((look for look in seen.looks if look.end_ns is not None), key=_end_ns))


def columns(spans: Sequence[Span]) -> Looks:
    """Return looks that are over as columns."""
    args = [look.args for look in spans]
    turns = np.empty(len(spans), np.object_)
    turns[:] = [*_kept_once([of_look.get("turn") for of_look in args])]

    def numbers(name: str) -> Values:
        values = [of_look.get(name) for of_look in args]
        return np.array([value if isinstance(value, (int, float)) else None for value in values], np.float64)

    def numbers_by_name(name: str) -> ByName:
        return by_name([of_look.get(name) for of_look in args])

    return Looks(
        starts_ns=np.array([look.start_ns for look in spans], np.int64),
        ends_ns=np.array([look.end_ns for look in spans], np.int64),
        turns=turns,
        totals=numbers_by_name("totals"),
        held_bytes=numbers_by_name("held_bytes"),
        cpu_ns=numbers_by_name("cpu_ns"),
        free_bytes=numbers("free_bytes"),
        others_bytes=numbers("others_bytes"),
        age_ns=np.nan_to_num(numbers("age_ns")),
        unchanged_ns=numbers(STAMP),
    )


def together(parts: Sequence[Looks]) -> Looks:
    """Return the looks of several processes after one another."""
    of_parts = zip(*parts, strict=True)
    return Looks._make(
        _joined(column) if isinstance(column[0], ByName) else np.concatenate(column) for column in of_parts
    )


def _end_ns(look: Span) -> int:
    assert look.end_ns is not None
    return look.end_ns


def _kept_once(values: Sequence[object]) -> Iterator[str | None]:
    """Yield the texts among some values, each of them kept once."""
    kept: dict[str, str] = {}
    for value in values:
        yield kept.setdefault(value, value) if isinstance(value, str) else None
