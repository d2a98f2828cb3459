"""A process of ours in the command's process group, which reports the signals that were sent to the whole group. Linux
only.

When the supervisor receives a signal, nothing tells it whether the command received the signal too: `kill PID` and
`kill -- -PGID` look the same to the receiver, and so does what a terminal sends to its group or to the session's leader
alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1


class GroupWatcher:
    """A watcher that lives until `let_end` or until we are gone. The caller reaps it with all other children."""

    def __init__(self, numbers: Iterable[int]) -> None:
        """Fork the watcher.

        Args:
            numbers: Of the signals, which this thread blocks.

        Raises:
            OSError: there is no room for another process.
        """
        self._seen: set[int] = set()
        self._told, tells = os.pipe()
        os.set_blocking(self._told, False)
        starter = os.getpid()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(self._told)
            os.close(tells)
            raise
        if self.pid == 0:
            _tell(tells, starter, numbers)
        os.close(tells)

    def had(self, number: int) -> bool:
        """Return whether it has received this signal since the last call; False also if it was killed."""
        with contextlib.suppress(BlockingIOError):
            self._seen |= set(os.read(self._told, 4096))
        is_there = number in self._seen
        self._seen.discard(number)
        return is_there

    def let_end(self) -> None:
        """End the watcher."""
        os.close(self._told)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _tell(tells: int, starter: int, numbers: Iterable[int]) -> None:
    """Run in the watcher: write the number of each signal, until it is killed."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        while os.getppid() == starter:  # it may have been gone before
            os.write(tells, bytes([signal.sigwait(numbers)]))
    finally:
        os._exit(0)
