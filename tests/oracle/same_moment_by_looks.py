"""Which stamped samples belong to the moment of a look, found look by look."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from unstamped_by_looks import Taken, end_ns_of, of_process, used_bytes

from rltrace.analysis.looks import CONSISTENT_NS, DRIVER_RESERVED, STAMP
from rltrace.events import Span


class Held(NamedTuple):
    """The time during which a sample holds."""

    start_ns: float
    end_ns: float


class SameMoment:
    """Finds the samples that belong to the moment of a look."""

    def __init__(self, samples: Mapping[str, Sequence[Span]], readings: Sequence[tuple[Span, str]]) -> None:
        """Args:
        samples: The looks of each process that holds memory of the device, by pid, in order.
        readings: All looks that have read a total, in order, each with the pid of its process.
        """
        self._samples = {pid: _Samples(pid, looks, [look for look, _ in readings]) for pid, looks in samples.items()}
        of_gpu = [look for look, _ in readings if DRIVER_RESERVED in look.args["totals"]]
        self._others = {pid: _others(of_gpu, self._samples.get(pid)) for pid in {pid for _, pid in readings}}

    def taken(self, look: Span, writer: str, pids: Iterable[str]) -> Taken:
        """Return the samples that belong to a look.

        Args:
            look: A look that has read totals.
            writer: The pid of the process that looked.
            pids: The processes that hold something at that time.
        """
        held = self._others[writer].get(end_ns_of(look), Held(look.start_ns, end_ns_of(look)))
        taken = {pid: self._samples[pid].nearest(held, end_ns_of(look)) for pid in pids if pid != writer}
        times = [held, *(self._samples[pid].held(index) for pid, index in taken.items() if index is not None)]
        if writer in self._samples:
            taken[writer] = self._samples[writer].last(end_ns_of(look))
        apart_ns = max(time.start_ns for time in times) - min(time.end_ns for time in times)
        return Taken(taken, max(0.0, apart_ns))


class _Samples:
    """The samples of one process, and when each one holds. Both ends of these times only grow from one to the next."""

    def __init__(self, pid: str, looks: Sequence[Span], readings: Sequence[Span]) -> None:
        self._at_ns = np.array([end_ns_of(look) for look in looks], np.float64)
        began_ns = np.array([look.start_ns for look in looks], np.float64)
        since_ns = began_ns - np.array([float(look.args[STAMP]) for look in looks])
        self._starts_ns = np.maximum.accumulate(since_ns)  # looks of several threads may overlap
        next_ns = np.append(self._starts_ns[1:], np.inf)
        is_last = next_ns > self._at_ns  # of samples between which nothing has changed
        self._ends_ns = np.where(is_last, self._at_ns, np.inf)
        self._ends_ns = np.minimum.accumulate(self._ends_ns[::-1])[::-1]
        self._ends_ns = np.maximum(self._ends_ns, np.minimum(_idle_until_ns(pid, looks, readings), next_ns))
        self._bytes = np.array([used_bytes(look) - float(look.args.get("others_bytes", "nan")) for look in looks])

    def held(self, index: int) -> Held:
        """Return when a sample holds."""
        return Held(float(self._starts_ns[index]), float(self._ends_ns[index]))

    def last(self, at_ns: int) -> int | None:
        """Return the last sample before an instant; None if there is none."""
        behind = int(np.searchsorted(self._at_ns, at_ns, side="right"))
        return behind - 1 if behind else None

    def nearest(self, held: Held, at_ns: int) -> int | None:
        """Return the sample nearest to an instant, among those that hold during a time or within 5 ms of it.

        If none does, return the last one before the instant, because a process samples before it moves memory.
        """
        last = self.last(at_ns)
        if last is None:  # before its first sample a process is nothing but its interpreter, or its context
            return None
        for slack_ns in (0, CONSISTENT_NS):
            first = int(np.searchsorted(self._ends_ns, held.start_ns - slack_ns))
            behind = int(np.searchsorted(self._starts_ns, held.end_ns + slack_ns, side="right"))
            if first < behind:
                near = (min(max(index, first), behind - 1) for index in (last, last + 1))
                return min(near, key=lambda index: float(abs(self._at_ns[index] - at_ns)))
        return last

    def bytes_at(self, times_ns: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what the process held of the card at some instants; NaN where nobody knows."""
        if not len(self._starts_ns):
            return np.full(len(times_ns), np.nan)
        index = np.searchsorted(self._starts_ns, times_ns, side="right") - 1
        return np.where((index >= 0) & (times_ns <= self._ends_ns[index]), self._bytes[index], np.nan)


def _idle_until_ns(pid: str, looks: Sequence[Span], readings: Sequence[Span]) -> NDArray[np.float64]:
    """Return for each look until when its process is seen to have hardly run since; -inf if nobody saw that."""
    read = [(of_process(reading, "cpu_ns", pid), end_ns_of(reading)) for reading in readings]
    cpu_ns, times_ns = np.array([one for one in read if np.isfinite(one[0])], np.float64).reshape(-1, 2).T
    used_ns = np.array([of_process(look, "cpu_ns", pid) for look in looks])
    until = np.searchsorted(cpu_ns, used_ns + CONSISTENT_NS, side="right")
    return np.where(np.isfinite(used_ns), np.concatenate([[-np.inf], times_ns])[until], -np.inf)


def _others(readings: Sequence[Span], own: _Samples | None) -> dict[int, Held]:
    """Return for each reading of a card's total how long the part of all other processes stays the same.

    Args:
        readings: The readings of all processes, in order.
        own: The samples of the process that is not counted; None if it holds nothing.
    """
    times_ns = np.array([end_ns_of(look) for look in readings], np.float64)
    used = np.array([used_bytes(look) for look in readings])
    others = used - own.bytes_at(times_ns) if own is not None else used
    known = np.flatnonzero(np.isfinite(others))
    found: dict[int, Held] = {}
    for run in np.split(known, np.flatnonzero(np.diff(others[known])) + 1):
        if len(run):
            held = Held(readings[run[0]].start_ns, float(times_ns[run[-1]]))
            found |= {end_ns_of(readings[index]): held for index in run}
    return found
