"""Which phase each instant lies in, or next to: phases of one device in the order of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.intervals import Intervals, sorted_by
from rltrace.analysis.seen.process import Seen

Times = NDArray[np.int64]
Places = NDArray[np.intp]

NONE = -1
"""The place of a phase that there is none of."""


class PhaseSpans(NamedTuple):
    """Phases of a device, by their beginnings, ends and names."""

    names: list[str]
    """The names that there are, in order."""
    starts_ns: Times
    ends_ns: Times
    places: Places
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


def phase_spans(processes: Iterable[Seen], until_ns: int) -> PhaseSpans:
    """Return every phase of some processes; an open phase lasts until now."""
    return spans_of([(name, kept.rows(until_ns)) for process in processes for name, kept in process.phases.items()])


def spans_of(phases: Sequence[tuple[str, Intervals]]) -> PhaseSpans:
    """Return phases in the order of time; a name may have rows in several places."""
    names = sorted({name for name, _ in phases})
    starts_ns, ends_ns = np.concatenate([np.empty((0, 2), np.int64), *(rows for _, rows in phases)]).T
    places = np.repeat(
        np.array([names.index(name) for name, _ in phases], np.intp), [len(rows) for _, rows in phases] or 0
    )
    order = sorted_by(starts_ns, ends_ns, places)
    return PhaseSpans(names, starts_ns[order], ends_ns[order], places[order])


class PhaseTimes:
    """Phases that may overlap; of several, the one that began last counts, and of these the last name.

    All that is asked returns the places of names, one for each instant; `NONE` without a phase.
    """

    def __init__(self, spans: PhaseSpans) -> None:
        order = sorted_by(spans.starts_ns, spans.places)
        self._starts_ns, self._ends_ns, self._places = (
            column[order] for column in (spans.starts_ns, spans.ends_ns, spans.places)
        )
        self._reach_ns = np.maximum.accumulate(self._ends_ns)
        """The last end of a phase and of all before it."""
        by_end = sorted_by(spans.ends_ns, spans.places)
        self._sorted_ends_ns, self._places_by_end = spans.ends_ns[by_end], spans.places[by_end]

    def around(self, at_ns: Times) -> Places:
        """Return the phase that holds each instant, its two ends included."""
        found = np.full(len(at_ns), NONE, np.intp)
        last = np.searchsorted(self._starts_ns, at_ns, side="right") - 1
        asked = np.flatnonzero(last >= 0)
        last = last[asked]
        while len(asked := asked[is_held := self._reach_ns[last] >= at_ns[asked]]):
            last = last[is_held]
            is_in = self._ends_ns[last] >= at_ns[asked]
            found[asked[is_in]] = self._places[last[is_in]]
            asked, last = asked[~is_in], last[~is_in] - 1
        return found

    def ended(self, at_ns: Times, since_ns: Times) -> Places:
        """Return the phase that ended last before each instant; none if that was before `since_ns`."""
        last = np.searchsorted(self._sorted_ends_ns, at_ns) - 1
        is_there = last >= 0
        is_there[is_there] = self._sorted_ends_ns[last[is_there]] >= since_ns[is_there]
        return _where(is_there, self._places_by_end, last)

    def begins(self, at_ns: Times, until_ns: Times) -> Places:
        """Return the phase that begins first after each instant; none if that is after `until_ns`."""
        first = np.searchsorted(self._starts_ns, at_ns, side="right")
        is_there = first < len(self._starts_ns)
        is_there[is_there] = self._starts_ns[first[is_there]] <= until_ns[is_there]
        begins_ns = _where(is_there, self._starts_ns, first)
        return _where(is_there, self._places, np.searchsorted(self._starts_ns, begins_ns, side="right") - 1)


def _where(is_there: NDArray[np.bool_], values: NDArray[np.int64], places: Places) -> NDArray[np.int64]:
    """Return the values at some places; `NONE` where there is nothing."""
    found = np.full(len(places), NONE, values.dtype)
    found[is_there] = values[places[is_there]]
    return found
