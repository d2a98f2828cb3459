"""Phases that one hook opens and another closes, each looked at from both sides."""

from __future__ import annotations

from typing import Any

from rltrace.hooks import boundaries
from rltrace.hooks.held_span import HeldSpan


class HeldPhases:
    """What is open in this process, by name; a Trainer runs its steps in one thread."""

    def __init__(self) -> None:
        self._spans: dict[str, HeldSpan] = {}

    def __contains__(self, name: str) -> bool:
        return bool(self._spans.get(name))

    def open(self, name: str, **args: Any) -> None:
        """Begin a span; one that is a phase has a boundary in front of it."""
        if name in boundaries.NAMES:
            boundaries.reached(boundaries.Boundary((name,), is_end=False))
        self._spans.setdefault(name, HeldSpan()).open(name, **args)

    def close(self, *names: str, error: BaseException | None = None) -> None:
        """End those of these spans that are open; `error` is what ended them."""
        for name in names:
            if name in self:
                self._spans[name].close(error)
                if name in boundaries.NAMES:
                    boundaries.reached(boundaries.Boundary((name,), is_end=True, error=error))
