"""The engine's part of the bytes without an owner, in a process that trains too.

An engine that is alone in its process has all of them. Beside a trainer it has what they grew by while it acted: in its
own phases and calls, in which the trainer waits. What the trainer allocates before that, or in between, is not the
engine's.
"""

from __future__ import annotations

from rltrace.events import SLEEP, WAKE_UPS
from rltrace.hooks.boundaries import Boundary

ITS_OWN = frozenset(
    {"rollout.load", "rollout.profile", "rollout.reserve_kv", "rollout.capture", "rollout.generate", SLEEP, *WAKE_UPS}
)
"""In these phases the engine alone allocates; in a weight sync the trainer does."""


class EngineShare:
    """The engine's part of the bytes without an owner, updated at each look and when a phase of the engine ends."""

    def __init__(self) -> None:
        self._size_bytes = 0
        """The engine's bytes when it last stopped acting."""
        self._acts = False
        self._before_bytes: int | None = None
        """The bytes without an owner when the engine began to act; None if nobody had looked."""
        self._last_bytes: int | None = None

    def of(self, nameless_bytes: int) -> int:
        """Return the engine's part of the bytes without an owner, which is never more than all of them."""
        self._last_bytes = nameless_bytes
        if self._acts and self._before_bytes is None:
            self._before_bytes = nameless_bytes
        grown_bytes = nameless_bytes - self._before_bytes if self._acts and self._before_bytes is not None else 0
        size_bytes = max(0, min(self._size_bytes + grown_bytes, nameless_bytes))
        if not self._acts:  # what it had and is gone does not come back with what others allocate
            self._size_bytes = size_bytes
        return size_bytes

    def reached(self, boundary: Boundary) -> None:
        """Note that the engine begins or stops acting, after the look at a boundary."""
        if ITS_OWN.isdisjoint(boundary.names):
            return
        if not boundary.is_end:
            self._acts, self._before_bytes = True, self._last_bytes
        elif self._acts:
            self._size_bytes = 0 if self._last_bytes is None else self.of(self._last_bytes)
            self._acts = False
