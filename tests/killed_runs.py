"""A program of short processes that is killed at a random moment, and what its Recording must say then.

Each process announces in a pipe a span that it has left, after it has left it. Children are forked one after another,
so that some are in their first milliseconds when the kill comes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from rltrace.analysis.summary import summarize
from rltrace.events import Span
from rltrace.host import clock
from rltrace.read.recording import Recording

PROGRAM = """
import os, signal, subprocess, sys, time
import rltrace

folder, pipe, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def say(line):
    os.write(pipe, (line + "\\n").encode())  # shorter than PIPE_BUF: whole or not at all

def work(until_s):
    n = 0
    while time.monotonic() < until_s:
        with rltrace.span("work", n=n): pass
        say(f"{os.getpid()} {n}")
        n += 1

say("begun")
rltrace.start(folder)
while mode == "many":
    pid = os.fork()
    if pid == 0:
        work(time.monotonic() + 0.003)
        os._exit(0)
    with rltrace.span("wait"): os.waitpid(pid, 0)
work(time.monotonic() + 60)
"""


def run_and_kill(folder: Path, mode: str, after_seconds: float) -> tuple[dict[int, set[int]], int, int]:
    """Begin the program and kill its whole group.

    Args:
        folder: Of the Recording.
        mode: "one" process, or "many" of some milliseconds each, forked one after another.
        after_seconds: How long after the program's first line.

    Returns:
        The numbers of the spans that each pid had left, and when the program began and was killed, by the clock.
    """
    read, write = os.pipe()
    begun_ns = clock.now_ns()
    command = [sys.executable, "-c", PROGRAM, str(folder), str(write), mode]
    child = subprocess.Popen(command, pass_fds=(write,), start_new_session=True)
    os.close(write)
    assert os.read(read, 6) == b"begun\n"
    time.sleep(after_seconds)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    chunks = []
    while chunk := os.read(read, 1 << 16):  # until the last of the group is gone
        chunks.append(chunk)
    os.close(read)
    left: defaultdict[int, set[int]] = defaultdict(set)
    for line in b"".join(chunks).decode().splitlines():
        pid, number = line.split()
        left[int(pid)].add(int(number))
    return left, begun_ns, clock.now_ns()


def check(folder: Path, left: dict[int, set[int]], begun_ns: int, killed_ns: int) -> int:
    """Hold what the Recording says against what the processes said; how many spans they had left."""
    if not (folder / "manifest.json").exists():
        assert not left
        return 0
    recording = Recording.open(folder)
    deadline = time.monotonic() + 60
    while any(process.is_alive for process in recording.processes):  # it closes its pipe a moment before it is gone
        assert time.monotonic() < deadline
        time.sleep(0.001)
    found: defaultdict[int, set[int]] = defaultdict(set)
    for process in recording.processes:
        assert begun_ns <= process.start_ns <= killed_ns
        for event in process.events():
            assert isinstance(event, Span)
            assert begun_ns <= event.start_ns <= (event.end_ns or killed_ns) <= killed_ns
            if event.name == "work" and event.end_ns is not None:
                found[process.pid].add(event.args["n"])
        assert process.lost_events == process.orphans == 0 and process.torn <= 1
    for pid, numbers in left.items():
        assert numbers <= found[pid], f"lost of {pid}: {sorted(numbers - found[pid])[:5]}"
    summary = summarize(recording)
    assert 0 <= summary.run.seconds <= (killed_ns - begun_ns) / 1e9 and len(summary.clocks) <= 1
    assert all(0 <= process.start_seconds <= process.last_seconds for process in summary.processes)
    assert summary.lost_events == 0 and summary.complete is not True
    running = {"alive", "died"} & {process.state for process in summary.processes}
    assert not running, "nobody watched, and all are gone"
    # Of those killed while they opened their folders there is the one that ran, and the first one.
    assert len(summary.unidentified) <= 2 and not any(gone.unreadable_events for gone in summary.unidentified)
    assert all(gone.pid not in left for gone in summary.unidentified)
    return sum(map(len, left.values()))


def moments(kills: int, seed: int) -> list[tuple[str, float]]:
    """Modes and seconds to kill at: a third of them in the first 5 ms."""
    chance = random.Random(seed)
    modes = ("one", "many")
    return [
        (modes[kill % 2], chance.uniform(0, 0.005) if kill % 3 == 0 else chance.uniform(0, 0.2))
        for kill in range(kills)
    ]
