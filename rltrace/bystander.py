"""A process of ours in the command's process group, that shows which signals were sent to the whole group. Linux only.

Of a signal that reached the supervisor nothing says whether the command had it too: `kill PID` and `kill -- -PGID` look
the same to who receives them. In a process that blocks it, and never takes it, it can be seen waiting.
"""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

WAITING = "ShdPnd:"
"""In `/proc/<pid>/status`: a mask of the signals that wait for a process, bit `number - 1` for each; proc(5)."""


class Bystander:
    """One that is there until `let_end`, or until we are gone; the caller reaps it, with all other children."""

    def __init__(self) -> None:
        """Start it from a thread that blocks the signals in question: it inherits that."""
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def had(self, number: signal.Signals | int) -> bool:
        """Whether a signal has reached it since the last time that one had; False where it cannot be known."""
        if self._process is None:
            return False
        try:
            lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        except OSError:
            return False
        mask = next((int(line.split()[1], 16) for line in lines if line.startswith(WAITING)), 0)
        is_there = bool(mask >> (number - 1) & 1)
        if is_there:  # what waits in it is never taken: another one looks from now on
            self.let_end()
            self._start()
        return is_there

    def let_end(self) -> None:
        """Tell it that the command is over."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        except OSError:  # no such program, or no room for it: every signal is forwarded then
            return
        self._process.returncode = 0
