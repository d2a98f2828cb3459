"""What share of a run's later steps the hooks of its processes took.

Usage: hook_share.py RUN COMMAND...

COMMAND records into the folder RUN, as `rltrace exec --out RUN -- python train.py`. It runs with RLTRACE_TIME_HOOKS=1.
Meanwhile each process's counts are read twice a second, so that what hooks took in the later two thirds of the steps is
known without the start-up and the first steps, in which caches fill. Of each process the hooks that took most are
printed, with how often a step called them: how often they were called is written down now and then only, so that is
what they took divided by what one call takes on average, over the whole run.
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

MOST = 16
"""So many hooks of a process are printed."""

Looks = dict[str, list[tuple[int, np.ndarray]]]
"""By the key of a process: when its counts were read, and what they were: calls by slot, then nanoseconds by slot."""


def look(run: Path, looks: Looks) -> None:
    """Read the counts of all processes once."""
    for counts in run.glob(f"processes/*/{COUNTS}"):
        now_ns, slots = time.monotonic_ns(), np.fromfile(counts, np.uint64)
        looks[counts.parent.name].append((now_ns, slots.astype(np.float64)))


def looks_at(run: Path, command: list[str]) -> Looks:
    """Run the command, and return what its hooks' counts were meanwhile.

    Raises:
        SystemExit: The command failed; the exit code is its own.
    """
    looks: Looks = defaultdict(list)
    is_over = threading.Event()

    def follow() -> None:
        while not is_over.wait(BETWEEN_SECONDS):
            look(run, looks)

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        code = subprocess.run(command, env={**os.environ, TIME_VARIABLE: "1"}, check=False).returncode
    finally:
        is_over.set()
        follower.join()
    if code:
        sys.exit(code)
    look(run, looks)
    return looks


def later_steps(recording: Recording) -> tuple[int, int, int]:
    """Return how many steps the later two thirds are, and when they began and ended, in nanoseconds."""
    seen, _, summary = analyse(recording)
    numbered = [step for step in summary.steps if step.end_seconds is not None]
    later = numbered[len(numbered) // 3 :]
    first, last = later[0].start_seconds, max(step.end_seconds or 0.0 for step in later)
    return len(later), seen.start_ns + int(first * 1e9), seen.start_ns + int(last * 1e9)


def between(looks: list[tuple[int, np.ndarray]], start_ns: int, end_ns: int) -> np.ndarray:
    """Return by how much each count grew between two times."""
    times_ns = [at_ns for at_ns, _ in looks]
    slots = np.array([counts for _, counts in looks])
    return np.array([np.interp(end_ns, times_ns, slot) - np.interp(start_ns, times_ns, slot) for slot in slots.T])


def shares(recording: Recording, looks: Looks, steps: int, start_ns: int, end_ns: int) -> Iterator[str]:
    """Yield a line for each process whose hooks took something, one for each of the hooks, and one for all of them."""
    total_ns = 0.0

    def said(spent_ns: float) -> str:
        return f"{spent_ns / steps / 1e6:.2f} ms a step, {spent_ns / (end_ns - start_ns):.2%}"

    for process in recording.processes:
        grew = between(looks[process.key], start_ns, end_ns) if looks[process.key] else np.zeros(2 * COUNT_SLOTS)
        spent_ns = grew[COUNT_SLOTS:]
        total_ns += spent_ns.sum()
        if not spent_ns.any():
            continue
        yield f"{process.name}: {said(spent_ns.sum())}"
        _, ended = looks[process.key][-1]
        of_call_ns = ended[COUNT_SLOTS:] / np.maximum(ended[:COUNT_SLOTS], 1)
        for hook in sorted(process.hooks, key=lambda hook: -spent_ns[hook["slot"]])[:MOST]:
            took_ns, call_ns = spent_ns[hook["slot"]], of_call_ns[hook["slot"]]
            if took_ns:
                each = f"{took_ns / call_ns / steps:8.1f} of {call_ns / 1e3:7.1f} µs"
                yield f"  {took_ns / steps / 1e6:7.3f} ms  {each}  {hook['instrumentation']}: {hook['target']}"
    yield f"all: {said(total_ns)}"


def main(run: Path, command: list[str]) -> None:
    """Run, and print."""
    looks = looks_at(run, command)
    recording = Recording.open(run)
    steps, start_ns, end_ns = later_steps(recording)
    print(f"{steps} steps of {(end_ns - start_ns) / steps / 1e9:.3f} s")
    print(*shares(recording, looks, steps, start_ns, end_ns), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
