"""A lock that nobody waits for in vain: what interrupts its holder cannot leave it closed."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE_S = 1.0
"""How long a thread waits before it asks whether the holder is still at work."""

_OWNER = re.compile(r"owner=(\d+)")


class InterruptibleLock:
    """A re-entrant lock around calls of functions.

    What another thread sets by `PyThreadState_SetAsyncExc`, or what a trace function raises, comes between any two
    bytecodes: also between those that take a lock and those that see to it that it is released. Such an error can leave
    the lock of a `with` statement closed for good, and the next thread that needs a segment, or the end of the program,
    waits for ever. So whatever ends a call releases what it has left, and who has waited for a while looks whether the
    holder is still inside.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def run(self, work: Callable[..., T], *args: Any) -> T:
        """Call a function while no other thread is in one, and return what it returns."""
        if self._lock._is_owned():  # type: ignore[attr-defined]  # inside of a call, as in a signal handler
            return work(*args)
        try:  # no statement inside, for its first bytecode would be outside of both
            while not self._lock.acquire(timeout=PATIENCE_S):
                self._take_from_who_left()
            result = work(*args)
            self._lock.release()
            return result
        except BaseException:
            if self._lock._is_owned():  # type: ignore[attr-defined]
                self._lock.release()
            raise

    def run_if_free(self, work: Callable[..., T], *args: Any) -> T | None:
        """Call a function unless another thread is in one, and return what it returns; else None."""
        if self.is_held_here:
            return work(*args)
        try:
            if not self._lock.acquire(blocking=False):
                self._take_from_who_left()
                if not self._lock.acquire(blocking=False):
                    return None
            result = work(*args)
            self._lock.release()
            return result
        except BaseException:
            if self._lock._is_owned():  # type: ignore[attr-defined]
                self._lock.release()
            raise

    @property
    def is_held_here(self) -> bool:
        """Whether this thread is in a call, of which a signal handler is a part."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def _take_from_who_left(self) -> None:
        """Open the lock if the thread that holds it has ended, or is in no call."""
        owner = _OWNER.search(repr(self._lock))
        if owner is not None and not self._has(sys._current_frames().get(int(owner[1]))):
            self._lock._release_save()  # type: ignore[attr-defined]

    def _has(self, frame: FrameType | None) -> bool:
        """Return whether a frame, or one that called it, is a call with the lock."""
        codes = InterruptibleLock.run.__code__, InterruptibleLock.run_if_free.__code__
        while frame is not None:
            if frame.f_code in codes and frame.f_locals.get("self") is self:
                return True
            frame = frame.f_back
        return False
