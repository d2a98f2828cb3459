"""Phases that one hook opens and another closes, each looked at from both sides."""

from __future__ import annotations

from typing import Any

from rltrace.hooks import boundaries
from rltrace.hooks.patching import end_span
from rltrace.record import spans


class HeldPhases:
    """What is open in this process, by name; a Trainer runs its steps in one thread."""

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def open(self, name: str, **args: Any) -> None:
        """Begin a span; one that is a phase has a boundary in front of it."""
        if name in boundaries.NAMES:
            boundaries.reached(boundaries.Boundary((name,), is_end=False))
        self._open[name] = spans.automatic_span(name, **args).__enter__()

    def close(self, *names: str, error: BaseException | None = None) -> None:
        """End those of these spans that are open; `error` is what ended them."""
        for name in names:
            opened = self._open.pop(name, None)
            if opened is not None:
                end_span(opened, None, error)
                if name in boundaries.NAMES:
                    boundaries.reached(boundaries.Boundary((name,), is_end=True, error=error))
