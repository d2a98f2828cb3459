"""Gives what a process grows by in certain calls, outside of torch's allocator, to the owner that made it grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Ledger(Protocol):
    """The ledger of the process that grows."""

    outside_moves: int
    """How often something may have changed outside of torch's allocator."""

    def ownerless_bytes(self) -> int | None:
        """Return what the process holds outside of torch's allocator and in no row; None where nobody can tell."""

    def give(self, owner: str, size_bytes: int) -> None:
        """Add to the row of an owner."""


def always(*_call: Any) -> bool:
    """Watch each call."""
    return True


class Growth:
    """Looks before and after a call, and gives the owner what has come, less what others were given meanwhile."""

    def __init__(self, ledger: Ledger, owner: str, is_watched: Callable[..., bool] = always) -> None:
        """Args:
        ledger: The ledger of this process.
        owner: The owner of what comes.
        is_watched: Called before each call, with what `begin` is called with; if it returns false, nobody looks.
        """
        self._ledger, self._owner, self._is_watched = ledger, owner, is_watched

    def begin(self, *call: Any) -> int | None:
        """Look before a call; return what `end` needs."""
        if not self._is_watched(*call):
            return None
        self._ledger.outside_moves += 1
        return self._ledger.ownerless_bytes()

    def end(self, before_bytes: int | None, _result: Any = None, _error: BaseException | None = None) -> None:
        """Look after the call."""
        after_bytes = None if before_bytes is None else self._ledger.ownerless_bytes()
        if before_bytes is not None and after_bytes is not None:
            self._ledger.give(self._owner, max(0, after_bytes - before_bytes))
