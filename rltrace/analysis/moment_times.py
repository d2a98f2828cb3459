"""When the moments of a device's ledger are, and which of them says most about an instant."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.looks import CONSISTENT_NS, Looks, Places

Times = NDArray[np.int64]


class MomentTimes:
    """Moments in the order of time, each with the sampling in which it lies, which takes a while on a busy machine."""

    def __init__(self, times_ns: Times, samplings: Sequence[Looks]) -> None:
        """Args:
        times_ns: When the moments are, (M,).
        samplings: The looks of each process of the device.
        """
        self.times_ns = times_ns
        starts_ns = np.concatenate([np.empty(0, np.int64), *(looks.starts_ns for looks in samplings)])
        ends_ns = np.concatenate([np.empty(0, np.int64), *(looks.ends_ns for looks in samplings)])
        order = np.lexsort((starts_ns, ends_ns))
        self._starts_ns, self._ends_ns = starts_ns[order], ends_ns[order]
        self._began_ns = self.began_ns(times_ns)
        is_later = np.append(True, times_ns[1:] != times_ns[:-1])[: len(times_ns)]
        self._firsts = np.maximum.accumulate(np.where(is_later, np.arange(len(times_ns)), 0))
        """The first moment of each one's time."""

    def began_ns(self, at_ns: Times) -> Times:
        """Return when the sampling that each instant lies in was begun; on a busy machine one takes longer than 5
        ms."""
        if not len(self._ends_ns):
            return at_ns
        place = np.searchsorted(self._ends_ns, at_ns)
        is_in = place < len(self._ends_ns)
        return np.where(is_in, np.minimum(at_ns, self._starts_ns[np.where(is_in, place, 0)]), at_ns)

    def away_ns(self, moments: Places, at_ns: Times) -> Times:
        """Return how far instants are from the samplings of moments; 0 inside of these."""
        before_ns, after_ns = self._began_ns[moments] - at_ns, at_ns - self.times_ns[moments]
        return np.asarray(np.maximum(np.maximum(before_ns, after_ns), 0))

    def nearest(self, at_ns: Times) -> Places:
        """Return the moment that says most about each instant: the one whose sampling is nearest, or if that is not
        near, the last one before.

        A sampling at the end of a phase begins at once and may take long, so its beginning counts. If nobody looked at
        that time, what was there is what was there last; the next sample may be after memory has moved.
        """
        times_ns = self.times_ns
        behind = np.searchsorted(times_ns, at_ns)
        before = np.maximum(behind - 1, 0)
        before_ns = times_ns[before]
        behind_ns = self._began_ns[np.minimum(behind, len(times_ns) - 1)]
        is_before = (behind == len(times_ns)) | ((behind > 0) & (at_ns - before_ns <= behind_ns - at_ns))
        index = np.where(is_before, self._firsts[before], behind)
        return np.where(self.away_ns(index, at_ns) > CONSISTENT_NS, before, index)

    def firsts(self, starts_ns: Times) -> Places:
        """Return the first moment at each instant or after it."""
        return np.searchsorted(self.times_ns, starts_ns)

    def behind(self, ends_ns: Times) -> Places:
        """Return the first moment after each instant."""
        return np.searchsorted(self.times_ns, ends_ns, side="right")
