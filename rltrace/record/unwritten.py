"""Spans that are written only if an exception leaves them, for steps of which not everything is recorded.

They are written when they are over, as one record: where they began lies behind what was recorded since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rltrace.host import clock
from rltrace.record.error_message import error_args

WriteFailed = Callable[[str, bool, int, dict[str, Any]], None]
"""Writes a span that an exception has left: its name, whether a hook made it, when it began, and its arguments."""


class Unwritten:
    """What `span` makes of a span that is not recorded unless it fails."""

    __slots__ = ("_is_automatic", "_name", "_write_failed", "args", "start_ns", "task")

    def __init__(self, name: str, is_automatic: bool, args: dict[str, Any], write_failed: WriteFailed) -> None:
        self._name, self._is_automatic, self._write_failed = name, is_automatic, write_failed
        self.args = args
        self.start_ns = self.task = 0

    def __enter__(self) -> Unwritten:
        self.start_ns = clock.now_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any = None, traceback: object = None, /) -> None:
        if kind is not None and kind is not GeneratorExit:
            self.args = {**self.args, **(error_args(error) if error is not None else {"error": kind.__name__})}
            self._write_failed(self._name, self._is_automatic, self.start_ns, self.args)

    async def __aenter__(self) -> Unwritten:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: Any, traceback: object, /) -> None:
        self.__exit__(kind, error, traceback)

    def end_interrupted(self, interruption: BaseException | None) -> None:
        """Write the span if it has begun, because an error from outside has ended it."""
        if self.start_ns and interruption is not None:
            self.__exit__(type(interruption), interruption)

    def set(self, /, **late_args: Any) -> None:
        """Add arguments that are known only inside the span."""
        self.args = {**self.args, **late_args}


class Unsaid(dict[str, Any]):
    """The late arguments of a typed span that was not written when it began."""
