"""Which phase an instant lies in, or next to: phases of one device in the order of time, asked many times."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.seen.process import Seen


class PhaseSpans(NamedTuple):
    """Phases of a device, by their beginnings, ends and names."""

    names: list[str]
    """The names that there are, in order."""
    starts_ns: NDArray[np.int64]
    ends_ns: NDArray[np.int64]
    places: NDArray[np.intp]
    """The place of each one's name."""

    def part(self, chosen: NDArray[np.bool_]) -> PhaseSpans:
        """Return some of them."""
        return PhaseSpans(self.names, self.starts_ns[chosen], self.ends_ns[chosen], self.places[chosen])

    def told_apart(self, least_ns: int) -> PhaseSpans:
        """Return phases without the slivers of a phase that is longer elsewhere.

        Samples within 5 ms (`least_ns`) are one moment of the ledger: a shorter phase cannot be told from those around
        it. verl's `weight_sync` has such a remainder after `rollout.wake_kv_cache`, when the KV cache is back already.
        """
        is_long = self.ends_ns - self.starts_ns >= least_ns
        has_longer = np.zeros(len(self.names), np.bool_)
        has_longer[self.places[is_long]] = True
        return self.part(is_long | ~has_longer[self.places])

    def rows(self) -> list[tuple[int, int, str]]:
        """Return start, end and name of each."""
        named = map(self.names.__getitem__, self.places.tolist())
        return [*zip(self.starts_ns.tolist(), self.ends_ns.tolist(), named, strict=True)]


def phase_spans(processes: Iterable[Seen], until_ns: int) -> PhaseSpans:
    """Return every phase of some processes; an open phase lasts until now."""
    found = [(name, kept.rows(until_ns)) for process in processes for name, kept in process.phases.items()]
    names = sorted({name for name, _ in found})
    starts_ns, ends_ns = np.concatenate([np.empty((0, 2), np.int64), *(rows for _, rows in found)]).T
    places = np.repeat(
        np.array([names.index(name) for name, _ in found], np.intp), [len(rows) for _, rows in found] or 0
    )
    order = np.lexsort((places, ends_ns, starts_ns))
    return PhaseSpans(names, starts_ns[order], ends_ns[order], places[order])


class PhaseTimes:
    """Phases that may overlap; of several, the one that began last counts, and of these the last name."""

    def __init__(self, spans: list[tuple[int, int, str]]) -> None:
        """Args:
        spans: Start, end and name of each, sorted.
        """
        self._spans = spans
        self._starts_ns = [start_ns for start_ns, _, _ in spans]
        self._reach_ns = [*accumulate((end_ns for _, end_ns, _ in spans), max)]
        """The last end of a phase and of all before it."""
        self._by_end = sorted((end_ns, name) for _, end_ns, name in spans)
        self._ends_ns = [end_ns for end_ns, _ in self._by_end]

    def around(self, at_ns: int) -> str | None:
        """Return the phase that holds an instant, its two ends included."""
        found: tuple[int, str] | None = None
        place = bisect_right(self._starts_ns, at_ns) - 1
        while place >= 0 and self._reach_ns[place] >= at_ns:
            start_ns, end_ns, name = self._spans[place]
            if found is not None and start_ns < found[0]:
                break
            if end_ns >= at_ns:
                found = max(found or (start_ns, name), (start_ns, name))
            place -= 1
        return None if found is None else found[1]

    def ended(self, at_ns: int, since_ns: int) -> str | None:
        """Return the phase that ended last before an instant; None if that was before `since_ns`."""
        place = bisect_left(self._ends_ns, at_ns) - 1
        return self._by_end[place][1] if place >= 0 and self._ends_ns[place] >= since_ns else None

    def begins(self, at_ns: int, until_ns: int) -> str | None:
        """Return the phase that begins first after an instant; None if that is after `until_ns`."""
        first = bisect_right(self._starts_ns, at_ns)
        if first == len(self._spans) or self._starts_ns[first] > until_ns:
            return None
        behind = bisect_right(self._starts_ns, self._starts_ns[first])
        return max(name for _, _, name in self._spans[first:behind])
