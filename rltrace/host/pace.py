"""How often something costly is done."""

from __future__ import annotations

import time


class Pace:
    """Says when something is due again, so that it takes a share of the time at most."""

    def __init__(self, share: float, *, least_seconds: float = 0.0, is_due: bool = True) -> None:
        """Begin.

        Args:
            share: Of the time, that it may take.
            least_seconds: Between two of them, however short they are.
            is_due: Whether it may be done at once, and not only after `least_seconds`.
        """
        self._share, self._least_seconds = share, least_seconds
        self._due = time.monotonic() + (0.0 if is_due else least_seconds)

    @property
    def is_due(self) -> bool:
        """Whether it may be done now."""
        return time.monotonic() >= self._due

    def took(self, seconds: float) -> None:
        """Count one that has just ended."""
        self._due = time.monotonic() + max(self._least_seconds, seconds / self._share)
