"""What belongs to the same moment in Recordings whose samples do not say how long they hold: by age and agreement.

What another process says at the time of a look is its last sample or its next one. A sample is as old as the time that
has passed, or as the CPU time that its process has used since, whichever is less, because a process that did not run
did not change. A process that repeats what it knows of itself says how old that is, in the same measure.

On a GPU, a process that says what it holds itself also sees what the others hold together. While that stays the same,
their samples are no older than they were. If the driver says what each process holds, its sample does not age at all
while that stays the same. If the last sample is old, the next one is not, provided that the card's total is by then
what it was at the look: nothing has come to the card or gone from it, whatever has moved within an allocator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.looks import CONSISTENT_NS, GRANULE_BYTES, Looks, Places, Values
from rltrace.analysis.same_moment import NONE, Readings, Taken


def unstamped(samples: Mapping[str, Looks], readings: Readings, there: Mapping[str, NDArray[np.bool_]]) -> Taken:
    """Return what each reading takes of processes that are there, and how old the oldest of it is.

    Args:
        samples: The looks of each process that holds memory of the device, by pid, in order.
        readings: Looks that have read totals.
        there: At which readings each of these processes holds something.
    """
    taken: dict[str, Places] = {}
    apart_ns = np.zeros(len(readings.writers))
    for pid, looks in samples.items():
        sample, age_ns = _Samples(pid, looks).nearest(readings.looks)
        sample = np.where(there[pid], sample, NONE)
        said = _Said(sample, age_ns, readings.looks.others_bytes, readings.looks.held_bytes.of(pid))
        for writer in set(readings.pids):
            own = np.flatnonzero((sample != NONE) & readings.are_of(writer))
            still = _still_said(_Said._make(column[own] for column in said))
            sample[own], age_ns[own] = still.sample, still.age_ns
        taken[pid] = sample
        apart_ns = np.maximum(apart_ns, np.where(sample != NONE, age_ns, 0.0))
    return Taken(taken, apart_ns)


class _Samples:
    """What one process said of itself, look by look."""

    def __init__(self, pid: str, looks: Looks) -> None:
        self._pid = pid
        self._ends_ns, self._used_bytes = looks.ends_ns, looks.used_bytes
        self._cpu_ns, self._held_bytes = looks.cpu_ns.of(pid), looks.held_bytes.of(pid)
        self._said_age_ns = looks.age_ns

    def nearest(self, readings: Looks) -> tuple[Places, Values]:
        """Return which of its own samples tells most about each reading, and how old that is in nanoseconds.

        One before or behind it if that is new. Else the next one, if the card held as much by then; else its last word,
        for a process samples before it moves memory. Before its first sample a process is nothing but its interpreter,
        or its context.
        """
        ends_ns, cpu_ns, held_bytes = readings.ends_ns, readings.cpu_ns.of(self._pid), readings.held_bytes.of(self._pid)
        if not len(self._ends_ns):
            return np.full(len(ends_ns), NONE, np.intp), np.zeros(len(ends_ns))
        behind = np.searchsorted(self._ends_ns, ends_ns, side="right")
        has_next = behind < len(self._ends_ns)
        last, following = np.maximum(behind - 1, 0), np.where(has_next, behind, 0)
        last_age_ns, next_age_ns = (self._age_ns(index, ends_ns, cpu_ns, held_bytes) for index in (last, following))
        last_ns, next_ns = (np.abs(self._ends_ns[index] - ends_ns) for index in (last, following))
        is_nearer = (next_age_ns < last_age_ns) | ((next_age_ns == last_age_ns) & (next_ns < last_ns))
        takes_next = has_next & is_nearer
        is_new = np.where(takes_next, next_age_ns, last_age_ns) <= CONSISTENT_NS
        is_as_full = has_next & ~is_new & (self._used_bytes[following] == readings.used_bytes)
        index = np.where(is_new & takes_next | is_as_full, following, last)
        age_ns = np.where(is_as_full, 0.0, np.where(is_new & takes_next, next_age_ns, last_age_ns))
        has_said = behind > 0
        return np.where(has_said, index, NONE), np.where(has_said, age_ns, 0.0)

    def _age_ns(self, index: Places, ends_ns: NDArray[np.int64], cpu_ns: Values, held_bytes: Values) -> Values:
        """Return how old some of its samples are at some readings."""
        passed_ns = np.abs(self._ends_ns[index] - ends_ns).astype(np.float64)
        used_ns = np.abs(self._cpu_ns[index] - cpu_ns)
        # The first thing that it did after a reading may have been to move memory.
        is_later = self._ends_ns[index] > ends_ns
        passed_ns = np.where(~is_later & np.isfinite(used_ns), np.fmin(passed_ns, used_ns), passed_ns)
        return np.where(self._held_bytes[index] == held_bytes, 0.0, self._said_age_ns[index] + passed_ns)


class _Said(NamedTuple):
    """Samples of a process, as the looks of another process take them, in order."""

    sample: Places
    age_ns: Values
    others_bytes: Values
    """What all others held together at each look; NaN where nobody asked."""
    held_bytes: Values
    """What it held itself; NaN likewise."""


def _still_said(now: _Said) -> _Said:
    """Return what the looks take of a process: the nearest sample, or the one of the look before if that still
    holds."""
    if not len(now.sample):
        return now
    others, held = now.others_bytes, now.held_bytes
    holds = np.append(False, (held[1:] == held[:-1]) | (others[1:] == others[:-1]))
    # While each holds the one before, the youngest so far counts, of those alike the last.
    _, rank = np.unique(now.age_ns, return_inverse=True)
    of_run = rank - np.cumsum(~holds) * (len(rank) + 1)  # lower from run to run: what was before does not count
    youngest = np.where(of_run == np.minimum.accumulate(of_run), np.arange(len(rank)), 0)
    place = np.maximum.accumulate(youngest)
    return now._replace(sample=now.sample[place], age_ns=now.age_ns[place])


def consistent(apart_ns: NDArray[np.float64], unaccounted_bytes: NDArray[np.float64]) -> NDArray[np.bool_]:
    """At which moments of a GPU all samples hold: they are new, or what nobody explains is what it was at such a one.

    A process that has done something since its sample, as an idle engine does that looks for requests, may have moved
    memory meanwhile. If it had, without saying so, the total less all rows would hardly be, to a granule, what it is at
    any moment of which all is known, of which a run has a few levels; or what it was at the last that holds, for it may
    grow by a granule now and then. That is so of a GPU, whose driver counts whole granules; a host's figures are never
    the same twice. What is taken for consistent is judged: a coincidence can accuse the ledger and not acquit it.

    Args:
        apart_ns: Age of the oldest sample, (M,) moments of one device in their order.
        unaccounted_bytes: The total less all rows, (M,).
    """
    is_new = apart_ns <= CONSISTENT_NS
    found = is_new | (_distance(unaccounted_bytes, np.sort(unaccounted_bytes[is_new])) <= GRANULE_BYTES)
    known_before = np.maximum.accumulate(np.where(found, np.arange(len(found)), NONE))
    last = NONE  # the last moment that holds although it is not known
    for moment in np.flatnonzero(~found).tolist():
        before = max(last, int(known_before[moment]))
        if before != NONE and abs(unaccounted_bytes[moment] - unaccounted_bytes[before]) <= GRANULE_BYTES:
            found[moment], last = True, moment
    return found


def _distance(values: NDArray[np.float64], levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each value to the nearest of some that are sorted; infinite where there is none."""
    around = np.concatenate([[-np.inf], levels, [np.inf]])
    above = np.searchsorted(levels, values) + 1
    return np.asarray(np.minimum(around[above] - values, values - around[above - 1]))
