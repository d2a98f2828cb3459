"""`kill -9` at any moment: what was completed is in the Recording, what was running is reported as open.

The witness is a pipe: the child announces a span before it enters it and reports it after it has left it.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import killed_runs

from rltrace.events import Span
from rltrace.read.recording import Recording
from rltrace.record.process import pid_of, running_processes

KILLS = 10
WORKERS = 7
"""Threads and asyncio tasks of the child that is killed."""

CHILD = """
import asyncio, os, sys, threading
import rltrace

pipe = int(sys.argv[2])
rltrace.start(sys.argv[1])
typed = rltrace.typed_span("typed", key=str)

def say(line):
    os.write(pipe, (line + "\\n").encode())  # shorter than PIPE_BUF: whole or not at all

def one(worker, n):
    key = f"{worker}.{n}"
    say(f"enter {key}")
    if n % 3:
        with rltrace.span("work", key=key, filler="x" * (n % 200)) as span:
            span.set(left=key)
    else:
        with typed(key) as span:
            span.set(left=key)
    say(f"left {key}")

def work(worker):
    with rltrace.span("whole", key=worker):
        say(f"open {worker}")
        n = 0
        while True:
            one(worker, n)
            n += 1

async def work_async(worker):
    async with rltrace.span("whole", key=worker):
        say(f"open {worker}")
        n = 0
        while True:
            one(worker, n)
            await asyncio.sleep(0)
            n += 1

async def main():
    await asyncio.gather(*(work_async(f"task{n}") for n in range(4)))

for n in range(3):
    threading.Thread(target=work, args=(f"thread{n}",), daemon=True).start()
asyncio.run(main())
"""


def test_spans_left_before_a_kill(tmp_path: Path) -> None:
    """Every span that ended before a kill is in the Recording.

    Over some kills at random moments, with threads and asyncio tasks at work; over many in `tests/hostile`.
    """
    kill_often(tmp_path, KILLS, seed=0)


def kill_often(folder: Path, kills: int, seed: int) -> None:
    """Begin the child and kill it so often, and hold each Recording against what it said."""
    chance = random.Random(seed)
    reported = 0
    for kill in range(kills):
        lines = _run_and_kill(folder / str(kill), after_seconds=chance.uniform(0.0, 0.15))
        reported += _compare(folder / str(kill), lines)
    assert reported > 50 * kills, "the children did too little to prove anything"


def _run_and_kill(folder: Path, after_seconds: float) -> list[str]:
    """What the child said until it was killed, some time after each of its workers had begun."""
    read, write = os.pipe()
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(folder), str(write)], pass_fds=(write,))
    os.close(write)
    chunks: list[bytes] = []
    ready = threading.Event()

    def drain() -> None:
        while chunk := os.read(read, 1 << 16):
            chunks.append(chunk)
            if not ready.is_set() and len(re.findall(rb"^open ", b"".join(chunks), re.M)) == WORKERS:
                ready.set()

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        assert ready.wait(60), "the child did not begin"
        time.sleep(after_seconds)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        reader.join()
        os.close(read)
    assert child.returncode == -signal.SIGKILL
    return b"".join(chunks).decode().splitlines()


def _compare(folder: Path, lines: list[str]) -> int:
    """Hold the Recording against what the child said; how many spans it said it had left."""
    said = {verb: {line.split()[1] for line in lines if line.startswith(verb)} for verb in ("enter", "left", "open")}
    (process,) = Recording.open(folder).processes
    spans = [event for event in process.events() if isinstance(event, Span)]
    inner = [span for span in spans if span.name != "whole"]
    done = {span.args["key"] for span in inner if span.end_ns is not None}
    running = {span.args["key"] for span in inner if span.end_ns is None}

    assert said["left"] <= done, f"lost: {sorted(said['left'] - done)[:5]}"
    assert done | running <= said["enter"], f"invented: {sorted((done | running) - said['enter'])[:5]}"
    assert len(done - said["left"]) + len(running) <= WORKERS, "more spans are under way than there are workers"
    assert not running & said["left"]
    assert max(Counter(span.args["key"] for span in inner).values()) == 1, "a span is there twice"
    assert all(span.args["left"] == span.args["key"] for span in inner if span.end_ns is not None)
    assert {span.args["key"] for span in spans if span.name == "whole" and span.end_ns is None} == said["open"]

    assert process.end_ns is None and not process.is_alive
    assert process.lost_events == process.orphans == 0
    assert process.torn <= 1
    return len(said["left"])


def test_early_kills_leave_no_nonsense(tmp_path: Path) -> None:
    """Kills in the first milliseconds leave nothing that makes no sense.

    Of a process, and of children that it forks: what they opened is whole, what they did not is not there.
    """
    for kill in range(10):
        folder = tmp_path / str(kill)
        mode = ("one", "many")[kill % 2]
        killed_runs.check(folder, *killed_runs.run_and_kill(folder, mode, after_seconds=kill * 0.0005))


def test_child_that_nobody_waited_for_is_not_running(tmp_path: Path) -> None:
    """A process that has ended does not run, though its parent has not asked for its end yet."""
    source = f"import rltrace; rltrace.start({str(tmp_path / 'run')!r}); print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    (key,) = running_processes(tmp_path / "run")
    assert pid_of(key) == child.pid
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert running_processes(tmp_path / "run") == []
    child.communicate()
