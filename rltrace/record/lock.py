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

_OWNER = re.compile(r"owner=([1-9]\d*)")
"""The thread that holds a lock; 0 holds none."""


class InterruptibleLock:
    """A re-entrant lock around calls of functions.

    What another thread sets by `PyThreadState_SetAsyncExc`, or what a trace function raises, comes between any two
    bytecodes: also between those that take a lock and those that see to it that it is released. Such an error can leave
    the lock of a `with` statement closed for good, and the next thread that needs a segment, or the end of the program,
    waits for ever. So whatever ends a call releases what it has left, and who has waited for a while looks whether the
    holder is still inside. If not, the lock is left to it, and another one takes its place: a release could hit a
    thread that has got the lock since.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._calls = 0
        """How many calls have had the lock."""
        self._successors: dict[Any, Any] = {}
        """What takes the place of a lock that was left, so that all who find it so go on with the same."""

    def run(self, work: Callable[..., T], *args: Any) -> T:
        """Call a function while no other thread is in one, and return what it returns."""
        if self._lock._is_owned():  # type: ignore[attr-defined]  # inside of a call, as in a signal handler
            return work(*args)
        try:  # no statement inside, for its first bytecode would be outside of both
            while not self._lock.acquire(timeout=PATIENCE_S):
                self._take_from_who_left()
            self._calls += 1
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
            self._calls += 1
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
        """Go on with another lock if the thread that holds this one has ended, or is in no call.

        A thread may leave between a look at who holds the lock and a look at where that thread is. To hold it once more
        it has to begin a call, so a second look finds it inside, or another number of calls.
        """
        lock, calls = self._lock, self._calls
        if self._is_left(lock) and self._is_left(lock) and calls == self._calls:
            self._lock = self._successors.setdefault(lock, threading.RLock())

    def _is_left(self, lock: Any) -> bool:
        """Return whether a thread holds the lock that is in no call."""
        owner = _OWNER.search(repr(lock))
        return owner is not None and not self._has(sys._current_frames().get(int(owner[1])))

    def _has(self, frame: FrameType | None) -> bool:
        """Return whether a frame, or one that called it, is a call with the lock."""
        codes = InterruptibleLock.run.__code__, InterruptibleLock.run_if_free.__code__
        while frame is not None:
            if frame.f_code in codes and frame.f_locals.get("self") is self:
                return True
            frame = frame.f_back
        return False
