"""The span that one hook opens and another closes, of a stretch that no function of the framework is."""

from __future__ import annotations

from typing import Any

from rltrace.hooks.patching import end_span
from rltrace.record import spans


class HeldSpan:
    """One hook opens this span and another closes it; at most one is open at a time."""

    def __init__(self) -> None:
        self._opened: Any = None

    def __bool__(self) -> bool:
        return self._opened is not None

    def open(self, name: str, **args: Any) -> None:
        """Begin the span. One that is open still was kept from its end by an error from outside."""
        self.end_interrupted(None)
        self._opened = spans.automatic_span(name, **args).__enter__()

    def set(self, **args: Any) -> None:
        """Add arguments to the open span."""
        self._opened.set(**args)

    def close(self, error: BaseException | None = None) -> None:
        """End the span if one is open; `error` is what ended it."""
        if self._opened is None:
            return
        try:
            end_span(self._opened, None, error)
        except BaseException as interruption:
            self.end_interrupted(interruption)
            raise
        self._opened = None

    def end_interrupted(self, interruption: BaseException | None) -> None:
        """End the span if an error from outside has kept a hook from that."""
        if self._opened is not None:
            self._opened.end_interrupted(interruption)
            self._opened = None
