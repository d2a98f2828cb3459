"""Who held how many bytes after every allocation and every free: an allocator's history, replayed.

What is allocated when a history ends is known. What was freed in it and not allocated in it was there before it, and so
was what is there at its end and was not allocated in it: a history needs no beginning, and one whose oldest entries are
gone is still exact from the oldest that is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rltrace.events import UNATTRIBUTED


class Change(NamedTuple):
    """One allocation or free."""

    ts_ns: int
    address: int
    size_bytes: int
    owner: str | None
    """The owner of an allocation; None if what is at this address is freed."""


class Reservation(NamedTuple):
    """A segment that an allocator got from the driver, or gave back."""

    ts_ns: int
    address: int
    change_bytes: int


class Naming(NamedTuple):
    """Whose bytes are at some addresses: known at a moment, and true of what is there then for as long as it is."""

    ts_ns: int
    owners: Mapping[int, str]
    """By address."""


class Balance(NamedTuple):
    """How much an owner holds from a moment on."""

    ts_ns: int
    owner: str
    bytes: int


class Reserved(NamedTuple):
    """How much allocators have from the driver from a moment on."""

    ts_ns: int
    bytes: int


@dataclass(frozen=True)
class Timeline:
    """A replayed history."""

    start_bytes: dict[str, int]
    """By owner, before its first entry."""
    balances: list[Balance]
    """One for each entry, in order."""
    peak_bytes: int
    """The most that all owners held together."""
    peak_ns: int | None
    """When the peak was; None if there was never more than at the beginning."""
    at_peak_bytes: dict[str, int]
    """By owner."""
    end_bytes: dict[str, int]
    mismatches: int
    """Entries that contradict each other: an address given out twice, or not there at the end and never freed."""


@dataclass
class _Holding:
    """Bytes at an address, from their allocation to their free."""

    size_bytes: int
    owner: str


class _Holdings:
    """The holdings that there were, as far as the entries so far have shown."""

    def __init__(self, namings: Iterable[Naming]) -> None:
        self.namings = sorted(namings, key=lambda naming: naming.ts_ns, reverse=True)
        self.held: dict[int, _Holding] = {}
        """Allocated in the history and not freed yet, by address."""
        self.earlier: list[_Holding] = []
        """Of before the history."""
        self.owner_of_earlier: dict[int, str] = {}
        self.met: set[int] = set()
        """Addresses that an entry was about."""
        self.mismatches = 0

    def take(self, change: Change) -> tuple[int, _Holding, int]:
        """Return when a holding came or went, which one, and by how many bytes its owner's change."""
        while self.namings and self.namings[-1].ts_ns <= change.ts_ns:
            self.name(self.namings.pop().owners)
        holding = self.held.pop(change.address, None)
        is_first = change.address not in self.met
        self.met.add(change.address)
        if change.owner is not None:
            self.mismatches += holding is not None
            self.held[change.address] = holding = _Holding(change.size_bytes, change.owner)
            return change.ts_ns, holding, holding.size_bytes
        if holding is None:
            self.mismatches += not is_first
            holding = self.found_earlier(change.address, change.size_bytes)
        return change.ts_ns, holding, -holding.size_bytes

    def name(self, owners: Mapping[int, str]) -> None:
        """Say whose the holdings at some addresses are."""
        for address, owner in owners.items():
            if address in self.held:
                self.held[address].owner = owner
            else:
                self.owner_of_earlier[address] = owner

    def end(self, alive: Mapping[int, int]) -> None:
        """Compare with what is allocated at the end: sizes by address."""
        while self.namings:
            self.name(self.namings.pop().owners)
        for address, size_bytes in alive.items():
            if address not in self.held:
                self.mismatches += address in self.met
                self.found_earlier(address, size_bytes)
        self.mismatches += sum(address not in alive for address in self.held)

    def found_earlier(self, address: int, size_bytes: int) -> _Holding:
        """Return a holding that an entry, or the end, shows to have been there before the history."""
        holding = _Holding(size_bytes, self.owner_of_earlier.get(address, UNATTRIBUTED))
        self.earlier.append(holding)
        return holding


def reserved(reservations: Iterable[Reservation], start_ns: int, end_bytes: int) -> list[Reserved]:
    """Return what allocators have from the driver at first, and after every change.

    Args:
        reservations: In order.
        start_ns: When the history begins.
        end_bytes: What they have at its end.
    """
    changes = list(reservations)
    held = end_bytes - sum(change.change_bytes for change in changes)
    found = [Reserved(start_ns, held)]
    for change in changes:
        held += change.change_bytes
        found.append(Reserved(change.ts_ns, held))
    return found


def replay(changes: Iterable[Change], alive: Mapping[int, int], namings: Iterable[Naming] = ()) -> Timeline:
    """Return who held how much after every change.

    Args:
        changes: In the order in which the allocator made them.
        alive: What is allocated at the end: sizes in bytes by address.
        namings: Owners that were known by address; they replace what an allocation said itself.
    """
    holdings = _Holdings(namings)
    moves = [holdings.take(change) for change in changes]
    holdings.end(alive)
    # Only now is it known whose everything is, and what was there before.
    start: Counter[str] = Counter()
    for holding in holdings.earlier:
        start[holding.owner] += holding.size_bytes
    held = start.copy()
    peak_bytes = total = sum(held.values())
    peak_ns, at_peak = None, dict(held)
    balances = []
    for ts_ns, holding, change_bytes in moves:
        held[holding.owner] += change_bytes
        total += change_bytes
        balances.append(Balance(ts_ns, holding.owner, held[holding.owner]))
        if total > peak_bytes:
            peak_bytes, peak_ns, at_peak = total, ts_ns, dict(held)
    return Timeline(dict(start), balances, peak_bytes, peak_ns, at_peak, dict(held), holdings.mismatches)
