"""One rule for "the same moment": samples belong to one moment if the times during which they hold intersect.

Each sample is stamped with how long nothing of its process's memory had changed before it (`unchanged_ns`), and it
holds until somebody last saw that this was still so.

Who sees that? The process itself, whose next sample is stamped with a time that reaches back over this one; and whoever
reads its processor time, because a process that does not run changes nothing. The total that a look has read is a
sample too. On a GPU, less what the process that read it holds, it is what all others hold. It holds for as long as
everybody who reads a total then finds that the others hold the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.looks import CONSISTENT_NS, Looks, Places, Values

NONE = -1
"""The place of a sample that there is none of: before a process's first."""


class Readings(NamedTuple):
    """Looks that have read a total, in order."""

    looks: Looks
    writers: Places
    """The place of the process that looked in `pids`, (M,)."""
    pids: list[str]

    def are_of(self, pid: str) -> NDArray[np.bool_]:
        """Return which are a process's own."""
        return np.asarray(self.writers == (self.pids.index(pid) if pid in self.pids else NONE))


class Taken(NamedTuple):
    """The samples of the device's processes that belong to each reading."""

    samples: dict[str, Places]
    """The place of each process's sample, by pid, (M,); `NONE` where it is not there, or before its first."""
    apart_ns: Values
    """How far apart the times are during which these samples hold, (M,); 0 if they intersect."""


class Held(NamedTuple):
    """The times during which samples hold."""

    starts_ns: Values
    ends_ns: Values


def are_stamped(looks: Looks) -> bool:
    """Return whether each of the looks says since when it holds."""
    return not np.isnan(looks.unchanged_ns).any()


def same_moment(samples: Mapping[str, Looks], readings: Readings, there: Mapping[str, NDArray[np.bool_]]) -> Taken:
    """Return the samples that belong to the moment of each reading.

    Args:
        samples: The looks of each process that holds memory of the device, by pid, in order.
        readings: Looks that have read totals.
        there: At which readings each of these processes holds something.
    """
    of_processes = {pid: _Samples(pid, looks, readings.looks) for pid, looks in samples.items()}
    held = _total_holds(of_processes, readings)
    last_start_ns, first_end_ns = held
    taken = {}
    for pid, own in of_processes.items():
        is_own = readings.are_of(pid)
        nearest = np.where(is_own, own.last(readings.looks.ends_ns), own.nearest(held, readings.looks.ends_ns))
        taken[pid] = np.where(there[pid], nearest, NONE)
        counts = (taken[pid] != NONE) & ~is_own
        times = own.held(taken[pid])
        last_start_ns = np.where(counts, np.maximum(last_start_ns, times.starts_ns), last_start_ns)
        first_end_ns = np.where(counts, np.minimum(first_end_ns, times.ends_ns), first_end_ns)
    return Taken(taken, np.maximum(last_start_ns - first_end_ns, 0.0))


class _Samples:
    """The samples of one process, and when each one holds. Both ends of these times only grow from one to the next."""

    def __init__(self, pid: str, looks: Looks, readings: Looks) -> None:
        self._at_ns = looks.ends_ns.astype(np.float64)
        since_ns = looks.starts_ns - looks.unchanged_ns
        self._starts_ns = np.maximum.accumulate(since_ns)  # looks of several threads may overlap
        next_ns = np.append(self._starts_ns[1:], np.inf)[: len(since_ns)]
        is_last = next_ns > self._at_ns  # of samples between which nothing has changed
        self._ends_ns = np.where(is_last, self._at_ns, np.inf)
        self._ends_ns = np.minimum.accumulate(self._ends_ns[::-1])[::-1]
        self._ends_ns = np.maximum(self._ends_ns, np.minimum(_idle_until_ns(pid, looks, readings), next_ns))
        self._bytes = looks.used_bytes - looks.others_bytes

    def held(self, places: Places) -> Held:
        """Return when samples hold; of `NONE` it says anything."""
        if not len(self._at_ns):
            return Held(np.zeros(len(places)), np.zeros(len(places)))
        return Held(self._starts_ns[places], self._ends_ns[places])

    def last(self, times_ns: NDArray[np.int64]) -> Places:
        """Return the last sample before each instant; `NONE` if there is none."""
        return np.searchsorted(self._at_ns, times_ns.astype(np.float64), side="right") - 1

    def nearest(self, held: Held, times_ns: NDArray[np.int64]) -> Places:
        """Return the sample nearest to each instant, among those that hold during a time or within 5 ms of it.

        If none does, return the last one before the instant, because a process samples before it moves memory.
        """
        last = self.last(times_ns)
        if not len(self._at_ns):  # before its first sample a process is nothing but its interpreter, or its context
            return last
        found = last
        for slack_ns in (CONSISTENT_NS, 0):
            first = np.searchsorted(self._ends_ns, held.starts_ns - slack_ns)
            behind = np.searchsorted(self._starts_ns, held.ends_ns + slack_ns, side="right")
            before, after = (np.minimum(np.maximum(place, first), behind - 1) for place in (last, last + 1))
            is_after = np.abs(self._at_ns[after] - times_ns) < np.abs(self._at_ns[before] - times_ns)
            found = np.where(first < behind, np.where(is_after, after, before), found)
        return np.where(last < 0, NONE, found)

    def bytes_at(self, times_ns: Values) -> Values:
        """Return what the process held of the card at some instants; NaN where nobody knows."""
        if not len(self._starts_ns):
            return np.full(len(times_ns), np.nan)
        index = np.searchsorted(self._starts_ns, times_ns, side="right") - 1
        return np.where((index >= 0) & (times_ns <= self._ends_ns[index]), self._bytes[index], np.nan)


def _idle_until_ns(pid: str, looks: Looks, readings: Looks) -> Values:
    """Return for each look until when its process is seen to have hardly run since; -inf if nobody saw that."""
    cpu_ns = readings.cpu_ns.of(pid)
    is_read = np.isfinite(cpu_ns)
    times_ns = np.concatenate([[-np.inf], readings.ends_ns[is_read]])
    used_ns = looks.cpu_ns.of(pid)
    until = np.searchsorted(cpu_ns[is_read], used_ns + CONSISTENT_NS, side="right")
    return np.where(np.isfinite(used_ns), times_ns[until], -np.inf)


def _total_holds(of_processes: Mapping[str, _Samples], readings: Readings) -> Held:
    """Return how long each reading holds: of a card's total, for as long as the part of all other processes stays the
    same."""
    starts_ns, ends_ns = (times.astype(np.float64) for times in (readings.looks.starts_ns, readings.looks.ends_ns))
    of_gpu = readings.looks.part(np.flatnonzero(readings.looks.is_of_gpu))
    held = Held(starts_ns.copy(), ends_ns.copy())
    for pid in set(readings.pids):
        known_ns, of_known = _others(of_gpu, of_processes.get(pid))
        place = np.searchsorted(known_ns, ends_ns, side="right") - 1
        is_own = readings.are_of(pid) & (place >= 0)
        is_own[is_own] = known_ns[place[is_own]] == ends_ns[is_own]
        held.starts_ns[is_own] = of_known.starts_ns[place[is_own]]
        held.ends_ns[is_own] = of_known.ends_ns[place[is_own]]
    return held


def _others(readings: Looks, own: _Samples | None) -> tuple[Values, Held]:
    """Return for each reading of a card's total how long the part of all other processes stays the same, beside its
    time; without readings of which nobody knows that.

    Args:
        readings: The readings of all processes, in order.
        own: The samples of the process that is not counted; None if it holds nothing.
    """
    times_ns = readings.ends_ns.astype(np.float64)
    others = readings.used_bytes - (own.bytes_at(times_ns) if own is not None else 0.0)
    known = np.flatnonzero(np.isfinite(others))
    is_first = np.append(True, np.diff(others[known]) != 0)[: len(known)]
    firsts = np.flatnonzero(is_first)
    many = np.diff(firsts, append=len(known))
    lasts = firsts + many - 1
    held = Held(readings.starts_ns[known[firsts]].astype(np.float64), times_ns[known[lasts]])
    return times_ns[known], Held(*(np.repeat(column, many) for column in held))
