"""Processes that record without an end under a disk budget, and are killed at random moments and replaced.

Each one numbers its spans, and says in a shared mapping how many it has left. Before the size of the Recording is
measured, all of them are stopped, so that it is that of one moment.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rltrace.events import Span
from rltrace.read.recording import Recording
from rltrace.record import manifest
from rltrace.record.disk_account import DiskAccount

PROGRAM = """
import mmap, os, sys
import rltrace
from rltrace.record import lifecycle

folder, said, slot, most = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with open(said, "r+b") as file:
    left = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
assert lifecycle.join(folder, rank=slot)
n = 0
while n < most:
    for n in range(n, n + 100):
        with rltrace.span("work", n=n): pass
    n += 1
    left[slot] = n
rltrace.stop()
"""


@dataclass
class Budgeted:
    """What was seen of a run under a budget."""

    budget_bytes: int
    sizes: list[int] = field(default_factory=list)
    """Bytes on the disk, each at a moment at which nobody wrote."""
    spans: dict[int, int] = field(default_factory=dict)
    """How many spans each process had left for certain, by its rank; no two have one."""
    killed: int = 0


def disk_bytes(folder: Path) -> int:
    """Return what a folder takes of the disk, with all that is in it; files may go meanwhile."""
    blocks = 0
    for path in [folder, *folder.rglob("*")]:
        with contextlib.suppress(FileNotFoundError):
            blocks += path.lstat().st_blocks
    return blocks * 512


def record(
    folder: Path, *, budget_bytes: int, workers: int, kills: int, between: int, spans: int = 1 << 62, seed: int = 1
) -> Budgeted:
    """Record until so many processes were killed, and the others have left their spans.

    Args:
        folder: Folder of the Recording, which is made.
        budget_bytes: Of the disk.
        workers: How many processes record at a time.
        kills: How many of them are killed, each at a random moment; then the others are.
        between: How many spans there are at most between one kill and the next.
        spans: After how many a process ends by itself.
        seed: Of the moments.
    """
    chance, run = random.Random(seed), Budgeted(budget_bytes)
    manifest.create(folder, owner=None, command=["workers"], config={})
    said = folder.with_name("said")
    said.write_bytes(bytes(8 * (workers + kills + 1)))
    with open(said, "r+b") as file:
        left = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
    environment = {**os.environ, "RLTRACE_MAX_DISK": str(budget_bytes)}
    running: dict[int, subprocess.Popen[bytes]] = {}

    def begin() -> None:
        rank = run.killed + len(running)
        command = [sys.executable, "-c", PROGRAM, str(folder), str(said), str(rank), str(spans)]
        running[rank] = subprocess.Popen(command, env=environment)

    while run.killed < kills:
        while len(running) < workers:
            begin()
        goal = sum(left) + chance.randrange(between)
        _until(lambda goal=goal: sum(left) >= goal)  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.01))
        with stopped(running.values()):
            run.sizes.append(disk_bytes(folder))
        rank = chance.choice(list(running))
        running[rank].kill()
        running.pop(rank).wait()
        run.killed += 1
    for process in running.values():
        if spans == 1 << 62:
            process.kill()
        process.wait()
    run.sizes.append(disk_bytes(folder))
    run.spans = {rank: left[rank] for rank in range(workers + kills)}
    return run


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not is_so():
        assert time.monotonic() < deadline, "nobody records any more"
        time.sleep(0.001)


@contextlib.contextmanager
def stopped(processes: Iterable[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Stop processes meanwhile."""
    found = list(processes)
    for process in found:
        process.send_signal(signal.SIGSTOP)
    for process in found:
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZ":
            time.sleep(0.001)
    yield
    for process in found:
        process.send_signal(signal.SIGCONT)


def check(folder: Path, run: Budgeted) -> int:
    """Hold what the Recording says against what its processes said; return how many spans were dropped in all."""
    assert max(run.sizes) <= run.budget_bytes, f"{max(run.sizes):,} of {run.budget_bytes:,} bytes"
    with DiskAccount(folder, "check-1-1")._locked():  # ends what a kill left half done
        dropped = 0
    for process in Recording.open(folder).processes:
        found = sorted(event.args["n"] for event in process.events() if isinstance(event, Span))
        losses = process.torn, process.damaged_segments, process.orphans
        assert losses[0] <= 1 and losses[1] == 0 and losses[2] <= 1, losses
        assert len(found) == len(set(found)), "each comes once"
        missing = found[-1] + 1 - found[0] - len(found) if found else 0
        assert 0 <= missing <= process.lost_events, f"{missing} are missing, {process.lost_events} were counted as lost"
        assert process.rank is not None
        # One that was killed before it had left anything may have an empty segment, and nothing that was dropped.
        assert found or process.dropped_segments or not run.spans[process.rank], "what it left was dropped"
        if process.dropped_segments == 0 and process.lost_events == 0:
            assert not found or found[0] == 0, "what is not there was dropped"
            assert not found or found[-1] + 1 >= run.spans[process.rank], "a kill costs nothing"
        dropped += found[0] if found else run.spans[process.rank]
    return dropped
