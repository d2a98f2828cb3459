"""What belongs to the moment of a look, found look by look."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import nan
from typing import NamedTuple

import numpy as np

from rltrace.analysis.looks import CONSISTENT_NS
from rltrace.events import Span


class Taken(NamedTuple):
    """The samples of the device's processes that belong to a look."""

    samples: dict[str, int | None]
    """The place of each process's sample, by pid; None before the process's first."""
    apart_ns: float
    """How far apart the times are during which these samples hold."""


def end_ns_of(look: Span) -> int:
    """Return when a look ended; it must have ended."""
    assert look.end_ns is not None
    return look.end_ns


def used_bytes(look: Span) -> float:
    """Return the bytes in use; NaN if nobody asked."""
    return float(look.args.get("totals", {}).get("used", nan))


def of_process(look: Span, name: str, pid: str) -> float:
    """Return what an argument says about a process; NaN if it says nothing."""
    return float(look.args.get(name, {}).get(pid, nan))


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

    def nearest(self, edge: Span) -> tuple[int | None, float]:
        """Which of its own samples tells most about an edge, and how old that is in nanoseconds.

        One before or behind it if that is new. Else the next one, if the card held as much by then; else its last word,
        for a process samples before it moves memory.
        """
        behind = int(np.searchsorted(self._ends_ns, end_ns_of(edge), side="right"))
        near = [index for index in (behind - 1, behind) if 0 <= index < len(self._ends_ns)]
        if behind == 0:  # before its first sample a process is nothing but its interpreter, or its context
            return None, 0.0
        age_ns, _, index = min(
            (self._age_ns(index, edge), abs(self._ends_ns[index] - end_ns_of(edge)), index) for index in near
        )
        if age_ns <= CONSISTENT_NS:
            return index, age_ns
        if self._used_bytes[near[-1]] == used_bytes(edge) and near[-1] == behind:
            return behind, 0.0
        return near[0], self._age_ns(near[0], edge)

    def _age_ns(self, index: int, edge: Span) -> float:
        if self._held_bytes[index] == of_process(edge, "held_bytes", self._pid):
            return 0.0
        passed_ns = abs(int(self._ends_ns[index]) - end_ns_of(edge))
        if self._ends_ns[index] > end_ns_of(edge):  # the first thing that it did then may have been to move memory
            return float(self._said_age_ns[index]) + passed_ns
        used_ns = abs(float(self._cpu_ns[index]) - of_process(edge, "cpu_ns", self._pid))
        return float(self._said_age_ns[index]) + (min(passed_ns, used_ns) if np.isfinite(used_ns) else passed_ns)


class _Said(NamedTuple):
    """What a process said last, as an edge of another one takes it."""

    sample: int
    age_ns: float
    others_bytes: object
    """What all others held together at that edge."""
    held_bytes: float
    """What it held itself; NaN where nobody asked."""


def _still_said(now: _Said, before: _Said | None) -> _Said:
    """What an edge takes of a process: its nearest sample, or what the edge before took if that holds and is newer."""
    if before is None or before.age_ns >= now.age_ns:
        return now
    holds = before.held_bytes == now.held_bytes or before.others_bytes == now.others_bytes is not None
    return now._replace(sample=before.sample, age_ns=before.age_ns) if holds else now
