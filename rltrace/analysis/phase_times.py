"""Which phase an instant lies in, or next to: phases of one device in the order of time, asked many times."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate


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
