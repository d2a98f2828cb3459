"""The span that one hook opens and another closes, of a stretch that no function of the framework is."""

from __future__ import annotations

from typing import Any

from rltrace.hooks.patching import end_span
from rltrace.record import spans


class OpenSpan:
    """At most one at a time."""

    def __init__(self) -> None:
        self._opened: Any = None

    def __bool__(self) -> bool:
        return self._opened is not None

    def open(self, name: str, **args: Any) -> None:
        """Begin it."""
        self._opened = spans.span(name, **args).__enter__()

    def set(self, **args: Any) -> None:
        """Say more of the open one."""
        self._opened.set(**args)

    def close(self, error: BaseException | None = None) -> None:
        """End it if there is one; `error` is what ended it."""
        opened, self._opened = self._opened, None
        end_span(opened, None, error)
