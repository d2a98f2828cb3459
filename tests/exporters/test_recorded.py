"""What the recorder wrote, in a process that was killed, comes out of Perfetto's own importer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from test_perfetto import export
from trace_processor import Importer

PROGRAM = """
import asyncio, sys, time
import rltrace

rltrace.start(sys.argv[1], role="driver")

async def child(number):
    with rltrace.span("child", number=number):
        await asyncio.sleep(0.001 * (3 - number))

async def parent():
    async with rltrace.span("parent"):
        await asyncio.gather(*(child(number) for number in range(3)))

def generator(name):
    with rltrace.span(name):
        yield
        yield

with rltrace.phase("reward"):
    asyncio.run(parent())
first, second = generator("first"), generator("second")
for one in (first, second, first, second, first, second):
    next(one, None)
rltrace.counter("allocated_bytes", 4096)
with rltrace.span("send"):
    rltrace.flow("key", "out")
with rltrace.span("receive"):
    rltrace.flow("key", "in")
with rltrace.phase("advantage"), rltrace.span("hangs"):
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_is_imported_whole(importer: Importer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, str(run)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    trace = importer.load(export(run))
    trace.check_clean(slices=11, counters=1, flows=1)
    found = {(s["name"], s["parent"], s["track"].split(" · ")[-1], s["dur"] < 0) for s in trace.slices()}
    assert found == {
        ("reward", None, "driver", False),
        ("parent", None, "tasks", False),
        ("child", None, "tasks", False),
        ("first", None, "MainThread", False),
        ("second", None, "overlapping", False),
        ("send", None, "MainThread", False),
        ("receive", None, "MainThread", False),
        ("advantage", None, "driver", True),
        ("hangs", None, "MainThread", True),
    }
    ends = "join slice a on a.id = slice_out join slice b on b.id = slice_in"
    assert trace.query(f"select a.name as source, b.name as target from flow {ends}") == [("send", "receive")]
