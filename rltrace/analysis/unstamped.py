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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.looks import CONSISTENT_NS, GRANULE_BYTES, end_ns_of, of_process, used_bytes
from rltrace.analysis.same_moment import Taken
from rltrace.events import Span


class Unstamped:
    """Finds what belongs to the moment of a look; asked in the order of looks."""

    def __init__(self, samples: Mapping[str, Sequence[Span]]) -> None:
        """Args:
        samples: The looks of each process that holds memory of the device, by pid, in order.
        """
        self._samples = {pid: _Samples(pid, looks) for pid, looks in samples.items()}
        self._last: dict[tuple[str, str], _Said] = {}
        """What each process's last look took of each process."""

    def taken(self, look: Span, writer: str, pids: Iterable[str]) -> Taken:
        """Return what a look takes of processes that are there, and how old the oldest of it is."""
        samples: dict[str, int | None] = {}
        apart_ns = 0.0
        for pid in pids:
            samples[pid], age_ns = self._samples[pid].nearest(look)
            if (sample := samples[pid]) is not None:
                now = _Said(sample, age_ns, look.args.get("others_bytes"), of_process(look, "held_bytes", pid))
                said = self._last[writer, pid] = _still_said(now, self._last.get((writer, pid)))
                samples[pid], age_ns = said.sample, said.age_ns
            apart_ns = max(apart_ns, age_ns)
        return Taken(samples, apart_ns)


class _Samples:
    """What one process said of itself, look by look."""

    def __init__(self, pid: str, looks: Sequence[Span]) -> None:
        self._pid = pid
        self._ends_ns = np.array([end_ns_of(look) for look in looks], np.int64)
        self._cpu_ns = np.array([of_process(look, "cpu_ns", pid) for look in looks])
        self._said_age_ns = np.array([float(look.args.get("age_ns") or 0) for look in looks])
        self._held_bytes = np.array([of_process(look, "held_bytes", pid) for look in looks])
        self._used_bytes = np.array([used_bytes(look) for look in looks])

    def nearest(self, look: Span) -> tuple[int | None, float]:
        """Return which of the process's samples tells most about a look, and how old that is in nanoseconds.

        It is the one before or after the look if that is new. Else it is the next one, if the card held as much by
        then; else it is the last one, because a process samples before it moves memory.
        """
        behind = int(np.searchsorted(self._ends_ns, end_ns_of(look), side="right"))
        near = [index for index in (behind - 1, behind) if 0 <= index < len(self._ends_ns)]
        if behind == 0:  # before its first sample a process is nothing but its interpreter, or its context
            return None, 0.0
        age_ns, _, index = min(
            (self._age_ns(index, look), abs(self._ends_ns[index] - end_ns_of(look)), index) for index in near
        )
        if age_ns <= CONSISTENT_NS:
            return index, age_ns
        if self._used_bytes[near[-1]] == used_bytes(look) and near[-1] == behind:
            return behind, 0.0
        return near[0], self._age_ns(near[0], look)

    def _age_ns(self, index: int, look: Span) -> float:
        if self._held_bytes[index] == of_process(look, "held_bytes", self._pid):
            return 0.0
        passed_ns = abs(int(self._ends_ns[index]) - end_ns_of(look))
        if self._ends_ns[index] > end_ns_of(look):  # the first thing that it did then may have been to move memory
            return float(self._said_age_ns[index]) + passed_ns
        used_ns = abs(float(self._cpu_ns[index]) - of_process(look, "cpu_ns", self._pid))
        return float(self._said_age_ns[index]) + (min(passed_ns, used_ns) if np.isfinite(used_ns) else passed_ns)


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
