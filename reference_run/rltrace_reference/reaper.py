"""Outlives the driver by a moment: ends what a killed driver leaves, and removes its temporary folder.

Ray's servers and our workers and engines die with the driver by themselves; Ray's agents take a minute longer. Run as
a script, `python -S -E reaper.py FOLDER`, on the standard library only; end of file on stdin says that the driver is
gone. SIGTERM does not end it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_SECONDS = 2.0
"""Time for processes that end by themselves, with their exit handlers."""
PATIENCE_SECONDS = 20.0
"""Time for the kernel to end what was killed."""


class Reaper:
    """The driver's handle; while it is open, the reaper ends nobody."""

    def __init__(self, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is not for it
        )

    def close(self) -> None:
        """End what is left of the run and wait until it is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def processes_of(folder: str) -> list[int]:
    """Return the pids of this machine's processes that have a file below the folder open, as their log.

    These are every process that Ray starts, and every child of those. Name and environment do not tell: Ray's agents
    overwrite both with a title.
    """
    processes = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [int(process.name) for process in processes if _uses(process, folder)]


def _uses(process: Path, folder: str) -> bool:
    try:
        return any(os.readlink(descriptor).startswith(f"{folder}/") for descriptor in (process / "fd").iterdir())
    except OSError:  # not ours, or just ended
        return False


def reap(folder: str, driver: int) -> None:
    """End the processes of the folder, except for the driver, and remove it."""
    start = time.monotonic()
    while left := [pid for pid in processes_of(folder) if pid != driver]:
        waited = time.monotonic() - start
        if waited > PATIENCE_SECONDS:
            break
        if waited > GRACE_SECONDS:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # who ends a run tells all of its processes; the folder is left to us
    driver_pid = os.getppid()
    sys.stdin.read()
    reap(sys.argv[1], driver_pid)
