"""The most that torch's allocator had handed out at once, in a run and in each step, and whose it was.

Torch counts that by itself, since its process began or its program reset the count, and does not say for whom. Looks at
memory say for whom, at moments. Where the count has risen between two looks, it happened there: the fuller one of the
two says who held what, and what was handed out besides came and went in between, for what the process did then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from rltrace.analysis.observations import Seen, values_at
from rltrace.analysis.steps import StepWindows
from rltrace.events import MAP, OWNERS, UNATTRIBUTED, UNMAP, Span

POOLS = frozenset({"rollout.weights", "rollout.kv_cache"})
"""Rows that are pools where an engine sleeps."""

OUTSIDE = frozenset(
    {"allocator.cached", "cuda.context", "nccl", "rollout.graphs", "driver.reserved", "unaccounted", "free"}
)
"""Rows of a GPU that torch's allocator has not handed out."""

IN_PASS = frozenset({"forward.end", "backward.begin", "backward.end", "beat"})
"""Looks behind which, in a pass, what had come and gone were activations."""
IN_OPTIMIZER = frozenset({"optimizer.end"})


class AllocatedPeak(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a process's torch had handed out at once, between samples too."""

    process: str
    """What the process is called."""
    bytes: int
    """The most that torch's allocator had handed out: by its own count, or where that does not tell of this step, the
    most that any sample saw."""
    at_most_bytes: int
    """An upper bound on it, by torch's count; the same where that tells."""
    at_seconds: float
    """When that was first known: it happened since the sample before."""
    step: int | None
    """Number of the step; None outside of phases, where it may belong to the step before."""
    phase: str | None
    """The rank's phase; None outside of phases."""
    at_peak_bytes: dict[str, int]
    """By owner; they add up to `bytes`. What came and went between two samples is for what the process did then:
    activations in a pass, the optimizer in its step, else unattributed."""


class Peak(NamedTuple):
    """One of a process."""

    bytes: int
    at_most_bytes: int
    look: Span
    """The sample that told it."""
    by_owner: dict[str, int]


class AllocatedPeaks:
    """The peaks of one process."""

    def __init__(self, process: Seen) -> None:
        self._looks = sorted((edge for edge in process.edges if edge.end_ns is not None), key=_end_ns)
        # Of an engine beside a trainer: its pools are in no count, for torch counts them asleep as awake.
        outside = OUTSIDE | POOLS if any(move.name in (MAP, UNMAP) for move in process.moves) else OUTSIDE
        self._owners = [owner for owner in OWNERS if owner in process.owners and owner not in outside]
        ends_ns = np.array([_end_ns(look) for look in self._looks], np.int64)
        self.starts_ns = np.array([look.start_ns for look in self._looks], np.int64)
        rows = [values_at(process.owners[owner], ends_ns) for owner in self._owners]
        self._rows = np.array(rows).reshape(len(self._owners), len(ends_ns)).T
        self._allocated = self._rows.sum(axis=1)
        self._counted = values_at(process.allocated_peak, ends_ns)
        self._has_risen = np.diff(self._counted, prepend=0.0) != 0

    def most(self, start_ns: int | None = None, end_ns: int | None = None) -> Peak | None:
        """Return the peak of a window, or of all time; None where nobody looked, or torch does not count it."""
        inside = np.ones(len(self._looks), bool)
        if start_ns is not None and end_ns is not None:
            inside = (start_ns <= self.starts_ns) & (self.starts_ns < end_ns)
        inside &= self._counted > 0
        if not inside.any():
            return None
        told = np.where(self._has_risen, self._counted, self._allocated)
        look = int(np.argmax(np.where(inside, told, -1.0)))
        return Peak(
            int(told[look]), int(self._counted[inside].max()), self._looks[look], self._by_owner(look, int(told[look]))
        )

    def _by_owner(self, look: int, peak_bytes: int) -> dict[str, int]:
        """Return who held how much of a peak that this look told."""
        fuller = max({max(look - 1, 0), look}, key=lambda index: float(self._allocated[index]))
        rows = zip(self._owners, self._rows[fuller].tolist(), strict=True)
        held = {owner: int(size) for owner, size in rows if size}
        between_bytes = peak_bytes - sum(held.values())
        if between_bytes:
            owner = self._of_between(look, held)
            held[owner] = held.get(owner, 0) + between_bytes
        return held

    def _of_between(self, look: int, held: dict[str, int]) -> str:
        """Return for whom the process worked in front of a look."""
        turn = self._looks[look].args.get("turn")
        what = "activations" if turn in IN_PASS else "optimizer" if turn in IN_OPTIMIZER else None
        of_kind = [owner for owner in self._owners if what is not None and owner.endswith(f".{what}")]
        return max(of_kind, key=lambda owner: held.get(owner, 0), default=UNATTRIBUTED)


def of_steps(peaks: AllocatedPeaks, windows: StepWindows) -> Iterator[Peak]:
    """Return the peak of each step in which the process looked."""
    for number, (start_ns, end_ns) in zip(windows.numbers, windows.windows, strict=True):
        if number is not None and (peak := peaks.most(int(start_ns), int(end_ns))) is not None:
            yield peak


def _end_ns(span: Span) -> int:
    assert span.end_ns is not None
    return span.end_ns
