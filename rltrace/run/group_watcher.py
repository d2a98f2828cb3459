"""A process of ours in the command's process group. Signals to the whole group stay pending there until we have seen
them. Linux only.

When the supervisor receives a signal, nothing tells it whether the command received the signal too: `kill PID` and
`kill -- -PGID` look the same to the receiver, and so does what a terminal sends to its group or to the session's leader
alone. What is pending at the watcher is in /proc at once, though the machine is busy and the watcher does not run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
from pathlib import Path

from rltrace.host.awaited_signals import take_signal
from rltrace.host.parents import running_parent_of

_PR_SET_PDEATHSIG = 1

TAKE_SECONDS = 5.0
"""How long the watcher may take to do away with a signal that was reported; only then is it asked for the next."""

_PENDING = re.compile(r"^ShdPnd:\s*([0-9a-f]+)$", re.MULTILINE)
"""The signals that wait for a process, as bits."""


class GroupWatcher:
    """A watcher that lives until `let_end` or until we are gone. The caller reaps it with all other children."""

    def __init__(self) -> None:
        """Fork the watcher, which never receives what this thread blocks.

        Raises:
            OSError: there is no room for another process.
        """
        self._reported = 0
        """How many signals it has still to do away with."""
        ours, its = socket.socketpair()
        starter = os.getpid()
        try:
            self.pid = os.fork()
        except OSError:
            ours.close()
            its.close()
            raise
        if self.pid == 0:
            ours.close()
            _take(its, starter)
        its.close()
        ours.settimeout(TAKE_SECONDS)
        self._end = ours

    def had(self, number: int) -> bool:
        """Return whether this signal was sent to it since the last call; False also if it was killed."""
        with contextlib.suppress(OSError):  # it takes its time, or is gone
            while self._reported and (taken := self._end.recv(self._reported)):
                self._reported -= len(taken)
        self._reported = 0
        if not _is_pending(self.pid, number):
            return False
        with contextlib.suppress(OSError):
            self._reported += self._end.send(bytes([number]))
        return True

    def let_end(self) -> None:
        """End the watcher."""
        self._end.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _is_pending(child: int, number: int) -> bool:
    """Return whether a signal waits for a child of ours; false if the child is gone."""
    if running_parent_of(child) != os.getpid():  # another process may have its number
        return False
    try:
        found = _PENDING.search(Path(f"/proc/{child}/status").read_text())
    except OSError:
        return False
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


def _take(end: socket.socket, starter: int) -> None:
    """Run in the watcher: do away with each pending signal that was reported, until it is killed."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        while os.getppid() == starter and (number := end.recv(1)):  # it may have been gone before
            take_signal(number, 0)
            end.send(number)
    finally:
        os._exit(0)
