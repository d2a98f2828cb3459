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

from collections.abc import Iterable, Mapping, Sequence
from math import nan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.looks import CONSISTENT_NS, GRANULE_BYTES, by_name, end_ns_of, used_bytes
from rltrace.analysis.same_moment import Taken
from rltrace.events import Span


class Unstamped:
    """Finds what belongs to the moment of a look; asked once about each look, in order."""

    def __init__(self, samples: Mapping[str, Sequence[Span]], readings: Sequence[Span]) -> None:
        """Args:
        samples: The looks of each process that holds memory of the device, by pid, in order.
        readings: All looks that have read a total, in order.
        """
        columns = _Readings(readings)
        self._nearest = {pid: _Samples(pid, looks).nearest(columns) for pid, looks in samples.items()}
        self._next = 0
        self._last: dict[tuple[str, str], _Said] = {}
        """What each process's last look took of each process."""

    def taken(self, look: Span, writer: str, pids: Iterable[str]) -> Taken:
        """Return what a look takes of processes that are there, and how old the oldest of it is."""
        place, self._next = self._next, self._next + 1
        samples: dict[str, int | None] = {}
        apart_ns = 0.0
        for pid in pids:
            index, age_ns, held_bytes = self._nearest[pid][place]
            if index is not None:
                now = _Said(index, age_ns, look.args.get("others_bytes"), held_bytes)
                said = self._last[writer, pid] = _still_said(now, self._last.get((writer, pid)))
                index, age_ns = said.sample, said.age_ns
            samples[pid] = index
            apart_ns = max(apart_ns, age_ns)
        return Taken(samples, apart_ns)


class _Readings:
    """Looks that have read a total, as columns."""

    def __init__(self, looks: Sequence[Span]) -> None:
        self.ends_ns = np.array([end_ns_of(look) for look in looks], np.int64)
        self.used_bytes = np.array([used_bytes(look) for look in looks], np.float64)
        self._cpu_ns = [by_name(look, "cpu_ns") for look in looks]
        self._held_bytes = [by_name(look, "held_bytes") for look in looks]

    def cpu_ns(self, pid: str) -> NDArray[np.float64]:
        """Return the processor time of a process by each; NaN where nobody read it."""
        return np.array([of_all.get(pid, nan) for of_all in self._cpu_ns], np.float64)

    def held_bytes(self, pid: str) -> NDArray[np.float64]:
        """Return what a process held by each; NaN where the driver did not say."""
        return np.array([of_all.get(pid, nan) for of_all in self._held_bytes], np.float64)


class _Samples:
    """What one process said of itself, look by look."""

    def __init__(self, pid: str, looks: Sequence[Span]) -> None:
        self._pid = pid
        own = _Readings(looks)
        self._ends_ns, self._used_bytes = own.ends_ns, own.used_bytes
        self._cpu_ns, self._held_bytes = own.cpu_ns(pid), own.held_bytes(pid)
        self._said_age_ns = np.array([float(look.args.get("age_ns") or 0) for look in looks], np.float64)

    def nearest(self, readings: _Readings) -> list[tuple[int | None, float, float]]:
        """Return which of its own samples tells most about each reading, how old that is in nanoseconds, and what
        the reading says that the process holds.

        One before or behind it if that is new. Else the next one, if the card held as much by then; else its last word,
        for a process samples before it moves memory. Before its first sample a process is nothing but its interpreter,
        or its context.
        """
        ends_ns, cpu_ns, held_bytes = readings.ends_ns, readings.cpu_ns(self._pid), readings.held_bytes(self._pid)
        behind = np.searchsorted(self._ends_ns, ends_ns, side="right")
        has_next = behind < len(self._ends_ns)
        last, following = np.maximum(behind - 1, 0), np.where(has_next, behind, 0)
        if not len(self._ends_ns):
            return [(None, 0.0, held) for held in held_bytes.tolist()]
        last_age_ns, next_age_ns = (self._age_ns(index, ends_ns, cpu_ns, held_bytes) for index in (last, following))
        last_ns, next_ns = (np.abs(self._ends_ns[index] - ends_ns) for index in (last, following))
        is_nearer = (next_age_ns < last_age_ns) | ((next_age_ns == last_age_ns) & (next_ns < last_ns))
        takes_next = has_next & is_nearer
        is_new = np.where(takes_next, next_age_ns, last_age_ns) <= CONSISTENT_NS
        is_as_full = has_next & ~is_new & (self._used_bytes[following] == readings.used_bytes)
        index = np.where(is_new & takes_next | is_as_full, following, last)
        age_ns = np.where(is_as_full, 0.0, np.where(is_new & takes_next, next_age_ns, last_age_ns))
        found = zip(behind.tolist(), index.tolist(), age_ns.tolist(), held_bytes.tolist(), strict=True)
        return [(at, age, held) if many else (None, 0.0, held) for many, at, age, held in found]

    def _age_ns(
        self,
        index: NDArray[np.intp],
        ends_ns: NDArray[np.int64],
        cpu_ns: NDArray[np.float64],
        held_bytes: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return how old some of its samples are at some readings."""
        passed_ns = np.abs(self._ends_ns[index] - ends_ns).astype(np.float64)
        used_ns = np.abs(self._cpu_ns[index] - cpu_ns)
        # The first thing that it did after a reading may have been to move memory.
        is_later = self._ends_ns[index] > ends_ns
        passed_ns = np.where(~is_later & np.isfinite(used_ns), np.fmin(passed_ns, used_ns), passed_ns)
        return np.where(self._held_bytes[index] == held_bytes, 0.0, self._said_age_ns[index] + passed_ns)


class _Said(NamedTuple):
    """A sample of a process, as a look of another process takes it."""

    sample: int
    age_ns: float
    others_bytes: object
    """What all others held together at that look."""
    held_bytes: float
    """What it held itself; NaN where nobody asked."""


def _still_said(now: _Said, before: _Said | None) -> _Said:
    """Return what a look takes of a process: the nearest sample, or the one of the look before if that still holds."""
    if before is None or before.age_ns >= now.age_ns:
        return now
    holds = before.held_bytes == now.held_bytes or before.others_bytes == now.others_bytes is not None
    return now._replace(sample=before.sample, age_ns=before.age_ns) if holds else now


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
    before_bytes = np.nan
    for moment, size_bytes in enumerate(unaccounted_bytes):
        found[moment] |= abs(size_bytes - before_bytes) <= GRANULE_BYTES
        if found[moment]:
            before_bytes = size_bytes
    return found


def _distance(values: NDArray[np.float64], levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each value to the nearest of some that are sorted; infinite where there is none."""
    around = np.concatenate([[-np.inf], levels, [np.inf]])
    above = np.searchsorted(levels, values) + 1
    return np.asarray(np.minimum(around[above] - values, values - around[above - 1]))
