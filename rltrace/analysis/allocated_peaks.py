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

from rltrace.analysis.intervals import holding, union
from rltrace.analysis.looks import looks
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.samples import values_at
from rltrace.analysis.steps import StepWindows
from rltrace.events import INFERENCES, MAP, OWNERS, UNATTRIBUTED, UNMAP, Turn
from rltrace.read.columns import OPEN

POOLS = frozenset({"rollout.weights", "rollout.kv_cache"})
"""Rows that are pools where an engine sleeps."""

OUTSIDE = frozenset(
    {"allocator.cached", "cuda.context", "nccl", "rollout.graphs", "driver.reserved", "unaccounted", "free"}
)
"""Rows of a GPU that torch's allocator has not handed out."""

IN_PASS = frozenset({Turn.FORWARD_END, Turn.BACKWARD_BEGIN, Turn.BACKWARD_END, Turn.OPTIMIZER_BEGIN, Turn.BEAT})
"""Looks behind which, in a pass, what had come and gone were activations."""
IN_OPTIMIZER = frozenset({Turn.OPTIMIZER_END})


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
    activations in a pass and where log-probs or values are computed, the optimizer in its step, else unattributed."""


class Peak(NamedTuple):
    """One of a process."""

    bytes: int
    at_most_bytes: int
    began_ns: int
    """When the sample that told it was begun."""
    told_ns: int
    by_owner: dict[str, int]


class AllocatedPeaks:
    """The peaks of one process."""

    def __init__(self, process: Seen) -> None:
        own = looks(process)
        self._starts_ns, self._ends_ns, self._turns = own.starts_ns, own.ends_ns, own.turns
        # Of an engine beside a trainer: its pools are in no count, for torch counts them asleep as awake.
        outside = OUTSIDE | POOLS if any(move.name in (MAP, UNMAP) for move in process.moves) else OUTSIDE
        self._owners = [owner for owner in OWNERS if owner in process.owners and owner not in outside]
        rows = [values_at(process.owners[owner], self._ends_ns) for owner in self._owners]
        self._rows = np.array(rows).reshape(len(self._owners), len(self._ends_ns)).T
        self._allocated = self._rows.sum(axis=1)
        self._by_start = np.argsort(self._starts_ns, kind="stable")
        self._sorted_starts_ns = self._starts_ns[self._by_start]
        of_phases = [process.phases[name].rows(OPEN) for name in sorted(INFERENCES & process.phases.keys())]
        self._inferences = union(*of_phases)
        self._told_ns = np.array(process.allocated_peak.times_ns, np.int64)
        self._counted = np.array(process.allocated_peak.values, np.float64)

    def most(self, start_ns: int | None = None, end_ns: int | None = None) -> Peak | None:
        """Return the peak of a window, or of all time; None where nobody looked, or torch does not count it."""
        first, behind, looked, before_bytes = 0, len(self._counted), np.arange(len(self._ends_ns)), 0.0
        if start_ns is not None and end_ns is not None:
            first, behind = np.searchsorted(self._told_ns, [start_ns, end_ns]).tolist()
            looked = np.sort(self._by_start[slice(*np.searchsorted(self._sorted_starts_ns, [start_ns, end_ns]))])
            before_bytes = float(self._counted[first - 1]) if first else 0.0
        counted = self._counted[first:behind]
        at_most_bytes = max(before_bytes, float(counted.max(initial=0.0)))
        # What torch does not count, as an engine's pools, is in no peak.
        looked = looked[self._allocated[looked] <= at_most_bytes]
        told = first + int(np.argmax(counted)) if len(counted) else None
        look = int(looked[np.argmax(self._allocated[looked])]) if len(looked) else None
        if told is not None and (look is None or self._counted[told] >= self._allocated[look]):
            at_ns, most_bytes = int(self._told_ns[told]), int(self._counted[told])
            began_ns, by_owner = self._by_owner(at_ns, most_bytes)
            return Peak(most_bytes, most_bytes, began_ns, at_ns, by_owner)
        if look is None:
            return None
        held = self._held(look)
        return Peak(sum(held.values()), int(at_most_bytes), int(self._starts_ns[look]), int(self._ends_ns[look]), held)

    def _by_owner(self, told_ns: int, peak_bytes: int) -> tuple[int, dict[str, int]]:
        """Return when the look was begun that told a peak, if one did, and who held how much of it."""
        behind = int(np.searchsorted(self._ends_ns, told_ns))
        is_in_look = behind < len(self._ends_ns) and self._starts_ns[behind] <= told_ns
        near = [index for index in (behind - 1, *([behind] if is_in_look else [])) if index >= 0]
        fitting = [index for index in near if self._allocated[index] <= peak_bytes]
        held = self._held(max(fitting, key=lambda index: float(self._allocated[index]))) if fitting else {}
        between_bytes = peak_bytes - sum(held.values())
        began_ns = int(self._starts_ns[behind]) if is_in_look else told_ns
        if between_bytes:
            # Without a look it was told behind backwards: before an optimizer's step, or before the count was reset.
            turn = self._turns[behind] if is_in_look else Turn.BACKWARD_END
            looked_ns = int(self._ends_ns[behind - 1]) if behind else began_ns
            owner = self._of_between(turn, (looked_ns + began_ns) // 2, held)
            held[owner] = held.get(owner, 0) + between_bytes
        return began_ns, held

    def _held(self, look: int) -> dict[str, int]:
        rows = zip(self._owners, self._rows[look].tolist(), strict=True)
        return {owner: int(size) for owner, size in rows if size}

    def _of_between(self, turn: object, at_ns: int, held: dict[str, int]) -> str:
        """Return for whom the process worked in front of a place, half-way from the look before it."""
        is_inference = not turn and holding(self._inferences, np.array([at_ns]))[0] >= 0
        what = "activations" if turn in IN_PASS or is_inference else "optimizer" if turn in IN_OPTIMIZER else None
        of_kind = [owner for owner in self._owners if what is not None and owner.endswith(f".{what}")]
        # These are places of a pass: an engine in the same process waits there.
        return max(of_kind, key=lambda owner: (not is_of_engine(owner), held.get(owner, 0)), default=UNATTRIBUTED)


def is_of_engine(owner: str) -> bool:
    """Return whether an owner's bytes are those of a rollout engine."""
    return owner.startswith("rollout.")


def of_steps(peaks: AllocatedPeaks, windows: StepWindows) -> Iterator[Peak]:
    """Return the peak of each step in which the process looked."""
    for number, (start_ns, end_ns) in zip(windows.numbers, windows.windows, strict=True):
        if number is not None and (peak := peaks.most(int(start_ns), int(end_ns))) is not None:
            yield peak
