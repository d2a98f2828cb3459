"""A process's folder is whole or not there: whatever stops the process while it opens it, no reader is misled."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import recordings
from click.testing import CliRunner

import rltrace
from rltrace.analysis.summary import Summary, summarize
from rltrace.cli import main
from rltrace.read.recording import Recording
from rltrace.record import lifecycle, manifest, process, writer
from rltrace.record.process import OPENING

OURS = {process.__file__, writer.__file__}


class TimeIsOverError(Exception):
    """What a signal handler of the program raises."""


def _at(number: int, act: Callable[[], None], frames: set[str], *, opcodes: bool) -> Callable[..., Any]:
    """A trace function that acts once, at the n-th line or bytecode of some of our functions."""
    passed = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal passed
        if frame.f_code.co_filename not in OURS or frame.f_code.co_name not in frames:
            return None
        frame.f_trace_opcodes = opcodes
        if event == ("opcode" if opcodes else "line"):
            passed += 1
            if passed == number:
                act()
        return trace

    return trace


def _fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _check_sane(summary: Summary, children: int, began_s: float) -> None:
    """No process is a stranger, none died at a time at which the run was not."""
    assert summary.run.seconds < time.monotonic() - began_s and summary.run.clock_domains == 1
    assert len(summary.processes) + len(summary.unidentified) == 1 + children
    for found in summary.processes:
        assert found.pid and 0 <= found.start_seconds <= found.last_seconds <= summary.run.seconds
    assert all(found.pid and not found.unreadable_events for found in summary.unidentified)


OPENING_FRAMES = {"_open", "_show", "_attempt", "_lines", "__init__", "show", "append", "_write", "discard_attempts"}


@pytest.mark.own_process
def test_killed_opening_is_whole_or_counted(folder: Path) -> None:
    """A process that is killed at any line of its opening is read or counted.

    By SIGKILL at each line: it has said who it is, or is said to have died; it is never a process of time zero.
    """
    began_s = time.monotonic()
    rltrace.start(folder)
    with rltrace.span("parent"):
        pass

    def child(number: int) -> None:
        sys.settrace(_at(number, lambda: os.kill(os.getpid(), signal.SIGKILL), OPENING_FRAMES, opcodes=False))
        rltrace.counter("first", 1)
        sys.settrace(None)
        os._exit(0)

    codes = []
    while not codes or codes[-1] == -signal.SIGKILL:
        codes.append(_fork(lambda: child(len(codes) + 1)))
    assert codes[-1] == 0 and len(codes) > 20
    rltrace.stop()
    summary = summarize(Recording.open(folder))
    _check_sane(summary, len(summary.processes) + len(summary.unidentified) - 1, began_s)
    assert summary.unidentified and summary.complete is False
    assert len(summary.unidentified) <= len(codes) - 2
    screen = " ".join(CliRunner().invoke(main, ["summary", str(folder)]).output.split())
    assert f"{len(summary.unidentified)} process" in screen and "died as they began to record" in screen
    assert "not aligned" not in screen
    CliRunner().invoke(main, ["export", str(folder), "-o", str(folder.parent / "run.zip")])
    archived = summarize(Recording.open(folder.parent / "run.zip"))
    assert archived.unidentified == summary.unidentified


@pytest.mark.own_process
def test_interrupted_opening_is_resumed(folder: Path) -> None:
    """If an exception interrupts the opening at any bytecode, the next record completes it.

    Whichever it is: the next record makes the folder, and it says who the process is and what was lost.
    """
    began_s = time.monotonic()
    rltrace.start(folder)
    typed = rltrace.typed_span("typed", n=int)
    rltrace.record.spans.current().hook("i", "m:f", "installed")
    chance = random.Random(0)
    frames = OPENING_FRAMES | {"_settle_hooks"}

    def on_alarm(*_: object) -> None:
        raise TimeIsOverError

    def child(number: int) -> None:
        signal.signal(signal.SIGALRM, on_alarm)
        sys.settrace(_at(number, lambda: signal.raise_signal(signal.SIGALRM), frames, opcodes=True))
        try:
            rltrace.counter("first", number)
        except TimeIsOverError:
            pass
        sys.settrace(None)
        with typed(number):
            pass
        rltrace.identify(name="whole")
        os._exit(0)

    numbers = list(_some(chance, 1, 900))
    for number in numbers:
        assert _fork(lambda number=number: child(number)) == 0, number
    rltrace.stop()
    recording = Recording.open(folder)
    _check_sane(summarize(recording), len(numbers), began_s)
    assert not recording.unidentified
    interrupted = 0
    for found in recording.processes:
        if found.key == recording.manifest["owner"]:
            continue
        events = {event.name: event for event in found.events()}
        assert "typed" in events and found.name == "whole" and found.hooks, found.key
        interrupted += "first" not in events
    assert interrupted > len(numbers) / 2, "most came while the folder was not there yet"
    assert not list((folder / OPENING).iterdir())


def _some(chance: random.Random, first: int, last: int) -> Iterator[int]:
    """Numbers from one to another, a few apart."""
    while first <= last:
        yield first
        first += chance.randint(1, 8)


FULL = """
import os, resource, sys, time
from rltrace.record import lifecycle, spans, writer
writer.RETRY_NS = 30_000_000
import rltrace

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

limit(int(sys.argv[2]))
assert rltrace.join(sys.argv[1], role="worker", rank=3) is not None
rltrace.identify(name="late")
lifecycle.unavailable("what", "why")
spans.current().hook("i", "m:f", "installed")
typed = rltrace.typed_span("typed", n=int)
for n in range(50):
    with typed(n): pass
time.sleep(0.05)
for n in range(50):
    with typed(n): pass
limit(resource.RLIM_INFINITY)
if sys.argv[3] == "later":
    time.sleep(0.05)
    for n in range(100):
        with typed(n): pass
rltrace.stop()
"""


@pytest.mark.parametrize("size_bytes", [0, 100, 6000])
@pytest.mark.parametrize("when", ["later", "at the end"])
def test_full_disk_keeps_identity(folder: Path, size_bytes: int, when: str) -> None:
    """A process that begins on a full disk has its identity and its count of losses once there is space."""
    manifest.create(folder, owner=None, command=[], config=None)
    command = [sys.executable, "-c", FULL, str(folder), str(size_bytes), when]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (found,) = Recording.open(folder).processes
    spans = list(found.events())
    assert "rltrace tries again every second" in done.stderr and len(done.stderr.splitlines()) == 1
    assert (found.role, found.rank, found.unavailable) == ("worker", 3, {"what": "why"})
    assert [hook["target"] for hook in found.hooks] == ["m:f"] and found.end_ns is not None
    assert [span.args["n"] for span in spans if span.end_ns] == (list(range(100)) if when == "later" else [])
    assert found.lost_events == 200 and not found.orphans
    assert Recording.open(folder).unidentified == []


def test_no_identity_is_in_no_figure(tmp_path: Path) -> None:
    """A process without an identity is in no figure, and its spans count as lost.

    As those have that an earlier release left: an empty `process.jsonl`, with segments or without.
    """
    step = recordings.span("step", 5, 8, step=1) + recordings.sample("c", 6, 1)
    written = recordings.Written(tmp_path / "run")
    written.process("driver", step, role="driver", start_ns=10**9, ended_s=9)
    for key in ("host-5-7", "host-6-7", "odd"):
        written.process(key, step if key != "host-5-7" else [])
        (written.folder / "processes" / key / "process.jsonl").write_text("")
    (written.folder / OPENING / "host-8-7+1").mkdir(parents=True)
    (written.folder / OPENING / "driver+1").mkdir()  # of an attempt that was interrupted: the next one came through
    summary = summarize(written.read())
    assert [found.key for found in summary.processes] == ["driver"] and summary.run.seconds == 8
    assert [(found.process_key, found.pid, found.unreadable_events) for found in summary.unidentified] == [
        ("host-5-7", 5, 0), ("host-6-7", 6, 2), ("host-8-7", 8, 0), ("odd", None, 2)
    ]  # fmt: skip
    assert (summary.lost_events, summary.complete) == (4, False)
    screen = CliRunner().invoke(main, ["summary", str(written.folder)]).output
    assert "nothing lost" not in screen and "incomplete" in screen
    assert "(pid 5, 8) died as they began to record" in screen
    assert "2 events of host-6-7, whose identity is missing" in screen


def test_opening_process_has_not_died(folder: Path) -> None:
    """A process that is opening its folder is not said to have died.

    It is alive, and a moment later it is there.
    """
    rltrace.start(folder)
    key = process.process_key(1)
    (folder / OPENING / f"{key}+1").mkdir()
    assert Recording.open(folder).unidentified == []
    os.utime(folder / OPENING / f"{key}+1", (0, 0))  # another one has its pid by now
    assert [found.key for found in Recording.open(folder).unidentified] == [key]
    rltrace.stop()
    json.dumps(Recording.open(folder).manifest)


def test_empty_spool_gets_a_folder(tmp_path: Path) -> None:
    """A spool without a folder gets one.

    On another host than the run's, nobody has made the folder of the processes before the first one.
    """
    lifecycle.join(tmp_path / "spool")
    rltrace.counter("value", 1)
    rltrace.stop()
    assert len(list((tmp_path / "spool" / "processes").glob("*/process.jsonl"))) == 1
