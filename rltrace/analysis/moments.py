"""Who held a device's bytes at one moment, and at both boundaries of each phase.

A long run has a hundred thousand boundaries. They are kept as columns, and become values when they are asked for.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import starmap
from typing import Any, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.coded import Coded
from rltrace.analysis.granules import from_granules, in_granules


class Moment(msgspec.Struct, frozen=True):
    """Who held a device's bytes at one moment."""

    step: int | None
    """Number of the step; None outside of steps."""
    phase: str | None
    """The rank's phase; None outside of phases."""
    at_seconds: float
    """When, counted from the beginning of the Recording."""
    used_bytes: int
    """The device's total if it was read, else the sum of the owners."""
    bytes: dict[str, int]
    """By owner; without `free` they add up to `used_bytes`."""
    apart_seconds: float | None
    """How far apart the times lie during which the samples of its processes hold; 0 if they intersect. In a Recording
    without stamps the age of the oldest sample. None if nobody read the device's total."""
    is_consistent: bool | None
    """Whether the moment is consistent: these times intersect, or are at most 5 ms apart. In a Recording without stamps
    an older sample may hold too, if nothing has moved since. None if nobody read the device's total."""


class Boundary(Moment, frozen=True):
    """A phase boundary: a phase's beginning or end, and the moment nearest to it."""

    side: str
    """`begin` or `end` of the phase."""
    away_seconds: float
    """From the boundary to the moment nearest to it; if more than 5 ms, the boundary is not consistent."""


AT_A_TIME = 1024
"""So many boundaries are made together."""

_NUMBERS: dict[str, type[np.generic]] = {
    "is_end": np.bool_,
    "at_seconds": np.float64,
    "used_bytes": np.int64,
    "moment": np.int32,
    "apart_seconds": np.float64,
    "is_consistent": np.bool_,
    "away_seconds": np.float64,
}
"""Columns of numbers, with their types."""


class Boundaries(Sequence[Boundary]):
    """Both boundaries of every phase of a device, each phase's beginning before its end."""

    def __init__(self, *, step: Coded, phase: Coded, owners: list[str], owned_bytes: NDArray[np.int64], **numbers: Any):
        """Args:
        step: Their steps.
        phase: Their phases.
        owners: Who holds memory of the device.
        owned_bytes: What each owner held at the moments next to boundaries, (moments, owners).
        **numbers: `is_end`; `moment`, a row of `owned_bytes`; and those of `Boundary`, each (boundaries,). Where nobody
            read the device's total, `apart_seconds` is not finite.
        """
        self.step, self.phase, self.owners, self.owned_bytes = step, phase, owners, owned_bytes
        self.numbers = {name: np.asarray(numbers[name], kind) for name, kind in _NUMBERS.items()}

    def __len__(self) -> int:
        return len(self.numbers["moment"])

    @overload
    def __getitem__(self, at: int) -> Boundary: ...
    @overload
    def __getitem__(self, at: slice) -> list[Boundary]: ...
    def __getitem__(self, at: int | slice) -> Boundary | list[Boundary]:
        if isinstance(at, slice):
            return self._made(at)
        place = range(len(self))[at]
        return self._made(slice(place, place + 1))[0]

    def __iter__(self) -> Iterator[Boundary]:
        for first in range(0, len(self), AT_A_TIME):
            yield from self._made(slice(first, first + AT_A_TIME))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def part(self, chosen: NDArray[Any]) -> Boundaries:
        """Return some of them, by their places or by a mask."""
        step, phase = (Coded(one.values, one.places[chosen]) for one in (self.step, self.phase))
        numbers = {name: values[chosen] for name, values in self.numbers.items()}
        return Boundaries(step=step, phase=phase, owners=self.owners, owned_bytes=self.owned_bytes, **numbers)

    def held(self, owner: str) -> NDArray[np.int64]:
        """Return what an owner held at each of them; zeros for one that is not here."""
        if owner not in self.owners:
            return np.zeros(len(self), np.int64)
        held: NDArray[np.int64] = self.owned_bytes[self.numbers["moment"], self.owners.index(owner)]
        return held

    def column(self, name: str, chosen: slice = slice(None)) -> list[Any]:
        """Return a field of `Boundary`, of all boundaries or of some."""
        if name == "bytes":
            return by_owner(self.owners, self.owned_bytes[self.numbers["moment"][chosen]])
        if name == "side":
            return ["end" if is_end else "begin" for is_end in self.numbers["is_end"][chosen].tolist()]
        if name in ("step", "phase"):
            return (self.step if name == "step" else self.phase).rows(chosen)
        found: list[Any] = self.numbers[name][chosen].tolist()
        if name in ("apart_seconds", "is_consistent"):
            is_known = np.isfinite(self.numbers["apart_seconds"][chosen])
            return where_known(found, is_known)
        return found

    def _made(self, chosen: slice) -> list[Boundary]:
        return [*starmap(Boundary, zip(*(self.column(name, chosen) for name in _FIELDS), strict=True))]

    def kept(self) -> tuple[Any, ...]:
        """Return them as what msgpack takes."""
        coded = [(one.values, one.places.astype(np.int32).tobytes()) for one in (self.step, self.phase)]
        numbers = {name: values.tobytes() for name, values in self.numbers.items()}
        owned = [*map(in_granules, np.ascontiguousarray(self.owned_bytes.T))]
        return (*coded, self.owners, len(self.owned_bytes), owned, numbers)

    @classmethod
    def of_kept(cls, kept: Sequence[Any]) -> Boundaries:
        """Return the same from that.

        Raises:
            ValueError: it is of another form.
        """
        step, phase = (Coded(values, np.frombuffer(places, np.int32)) for values, places in kept[:2])
        owners, moments, owned, numbers = kept[2:]
        of_owners = [from_granules(one, moments) for one in owned]
        return cls(
            step=step,
            phase=phase,
            owners=owners,
            owned_bytes=np.array(of_owners, np.int64).reshape(len(owners), moments).T,
            **{name: np.frombuffer(numbers[name], kind) for name, kind in _NUMBERS.items()},
        )


_FIELDS = Boundary.__struct_fields__


def by_owner(owners: Sequence[str], held: NDArray[np.int64]) -> list[dict[str, int]]:
    """Return what each owner held at some moments, of (moments, owners)."""
    return [dict(zip(owners, row, strict=True)) for row in held.tolist()]


def where_known(values: list[Any], is_known: NDArray[np.bool_]) -> list[Any]:
    """Return values, and None where they are not known."""
    if is_known.all():
        return values
    return [value if known else None for value, known in zip(values, is_known.tolist(), strict=True)]
