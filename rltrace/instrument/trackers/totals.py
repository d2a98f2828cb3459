"""What one process did in a step: seconds of phases and peaks of owners' bytes, added up in memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from rltrace.events import owner_of_counter
from rltrace.record.trackers import GIB, STEP_SECONDS, of_peak, of_phase

_owner = functools.lru_cache(1024)(owner_of_counter)


class OfStep(NamedTuple):
    """A step that has ended."""

    step_ns: int
    phase_ns: Mapping[str, int]
    peak_bytes: Mapping[str, float]

    def scalars(self) -> dict[str, float]:
        """Return it as trackers call it."""
        seconds = {of_phase(name): spent_ns / 1e9 for name, spent_ns in self.phase_ns.items()}
        peaks = {of_peak(owner): size / GIB for owner, size in self.peak_bytes.items()}
        return {STEP_SECONDS: self.step_ns / 1e9, **seconds, **peaks}


class Totals:
    """The step that runs."""

    def __init__(self) -> None:
        self._phase_ns: dict[str, int] = {}
        self._held_bytes: dict[str, float] = {}
        """What each owner said last; it holds that until it says otherwise."""
        self._peak_bytes: dict[str, float] = {}

    def begin(self) -> None:
        """Begin a step: nothing was done in it, and owners hold what they held."""
        self._phase_ns = {}
        self._peak_bytes = {**self._held_bytes}

    def add_phase(self, name: str, start_ns: int, end_ns: int) -> None:
        """Add a phase that has ended."""
        self._phase_ns[name] = self._phase_ns.get(name, 0) + end_ns - start_ns

    def add_sample(self, name: str, value: float) -> None:
        """Add a sample; it counts if it is of an owner's bytes."""
        owner = _owner(name)
        if owner is not None:
            self._held_bytes[owner] = value
            self._peak_bytes[owner] = max(self._peak_bytes.get(owner, 0.0), value)

    def so_far(self, step_ns: int) -> OfStep:
        """Return what was done in the step until now."""
        return OfStep(step_ns, {**self._phase_ns}, {**self._peak_bytes})

    def end(self, step_ns: int) -> OfStep:
        """Return what was done in the step, which nobody changes from here on."""
        ended = OfStep(step_ns, self._phase_ns, self._peak_bytes)
        self.begin()
        return ended
