"""Runs a command while it and the processes below it are stopped for moments, as on a busy machine.

A test that passes here does not depend on who gets a processor when.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

STOPS_S = (0.003, 0.006, 0.012, 0.03, 0.06)
"""How long a process is stopped: shorter and longer than what the product takes for one moment, which is 5 ms."""
PAUSES_S = (0.005, 0.01, 0.02, 0.05)
"""How long all run between two stops."""
LOOK_EVERY = 10
"""Stops between two looks for the processes that there are."""


def run_stopped(command: list[str], seed: int) -> int:
    """Run a command, stop one of its processes at a time, and return its exit code."""
    chance = random.Random(seed)
    with subprocess.Popen(command) as running:
        main = psutil.Process(running.pid)
        while running.poll() is None:
            processes = [main]
            with suppress(psutil.NoSuchProcess):
                processes += main.children(recursive=True)
            for _ in range(LOOK_EVERY):
                stop(chance.choice(processes), chance.choice(STOPS_S))
                time.sleep(chance.choice(PAUSES_S))
    return running.returncode


def stop(process: psutil.Process, seconds: float) -> None:
    """Stop a process for a while; one that is gone is left alone."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            process.send_signal(signal.SIGCONT)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of who is stopped, and for how long")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    told = parser.parse_args()
    sys.exit(run_stopped(told.command, told.seed))
