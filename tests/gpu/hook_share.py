"""What share of a run's later steps the hooks of its processes took.

Usage: hook_share.py RUN COMMAND...

COMMAND records into the folder RUN, as `rltrace exec --out RUN -- python train.py`. It runs with RLTRACE_TIME_HOOKS=1.
Meanwhile each process's counts are read twice a second, so that what hooks took in the later two thirds of the steps is
known without the start-up and the first steps, in which caches fill.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rltrace.analysis.summary import analyse
from rltrace.hooks.hook import TIME_VARIABLE
from rltrace.read.recording import Recording
from rltrace.record.process import COUNT_SLOTS, COUNTS

BETWEEN_SECONDS = 0.5

Spent = dict[str, list[tuple[int, int]]]
"""By the key of a process: when its counts were read, and the nanoseconds that its hooks had taken by then."""


def read_spent(run: Path, spent: Spent) -> None:
    """Read the counts of all processes once."""
    for counts in run.glob(f"processes/*/{COUNTS}"):
        now_ns, slots = time.monotonic_ns(), np.fromfile(counts, np.uint64)
        spent[counts.parent.name].append((now_ns, int(slots[COUNT_SLOTS:].sum())))


def spent_in(run: Path, command: list[str]) -> Spent:
    """Run the command, and return what its hooks took meanwhile.

    Raises:
        SystemExit: The command failed; the exit code is its own.
    """
    spent: Spent = defaultdict(list)
    is_over = threading.Event()

    def follow() -> None:
        while not is_over.wait(BETWEEN_SECONDS):
            read_spent(run, spent)

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        code = subprocess.run(command, env={**os.environ, TIME_VARIABLE: "1"}, check=False).returncode
    finally:
        is_over.set()
        follower.join()
    if code:
        sys.exit(code)
    return spent


def later_steps(recording: Recording) -> tuple[int, int, int]:
    """Return how many steps the later two thirds are, and when they began and ended, in nanoseconds."""
    seen, _, summary = analyse(recording)
    numbered = [step for step in summary.steps if step.end_seconds is not None]
    later = numbered[len(numbered) // 3 :]
    first, last = later[0].start_seconds, max(step.end_seconds or 0.0 for step in later)
    return len(later), seen.start_ns + int(first * 1e9), seen.start_ns + int(last * 1e9)


def shares(recording: Recording, spent: Spent, steps: int, start_ns: int, end_ns: int) -> Iterator[str]:
    """Yield a line for each process whose hooks took something, and one for all of them."""
    names = {process.key: process.name for process in recording.processes}
    total_ns = 0.0
    for key, looks in spent.items():
        times_ns, took_ns = np.array(looks, np.float64).T
        own_ns = float(np.interp(end_ns, times_ns, took_ns) - np.interp(start_ns, times_ns, took_ns))
        total_ns += own_ns
        if own_ns:
            yield f"{names.get(key, key)}: {own_ns / steps / 1e6:.2f} ms a step, {own_ns / (end_ns - start_ns):.2%}"
    yield f"all: {total_ns / steps / 1e6:.2f} ms a step, {total_ns / (end_ns - start_ns):.2%}"


def main(run: Path, command: list[str]) -> None:
    """Run, and print."""
    spent = spent_in(run, command)
    recording = Recording.open(run)
    steps, start_ns, end_ns = later_steps(recording)
    print(f"{steps} steps of {(end_ns - start_ns) / steps / 1e9:.3f} s")
    print(*shares(recording, spent, steps, start_ns, end_ns), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
