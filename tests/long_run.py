"""A run of many hours at several times its speed, under `rltrace exec` and a disk budget.

A step of 30 s has 4,000 spans, samples and boundaries. Threads come and go in it, as those of a program do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import budgeted_runs

from rltrace.analysis.summary import summarize
from rltrace.read.recording import Recording

STEP_SECONDS = 30.0
SPANS = 4000

PROGRAM = """
import json, os, sys, threading, time
import rltrace

steps, seconds, spans, said = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

def thread():
    with rltrace.span("thread"): pass

def look():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    maps = [line for line in open("/proc/self/maps") if ".seg" in line]
    return {
        "anonymous_kib": int(status["RssAnon"].split()[0]),
        "files": len(os.listdir("/proc/self/fd")),
        "mapped_segments": len(maps),
    }

looks = []
due = time.monotonic()
for step in range(steps):
    with rltrace.span("step", step=step):
        for name in ("rollout.generate", "actor.update"):
            with rltrace.phase(name):
                for n in range(spans // 2):
                    with rltrace.span("own", n=n, text="x" * 40): pass
                rltrace.counter("actor.params_bytes", step)
        each = [threading.Thread(target=thread) for _ in range(4)]
        [one.start() for one in each]
        [one.join() for one in each]
    due += seconds
    time.sleep(max(0.0, due - time.monotonic()))
    if step % max(1, steps // 50) == 0:
        looks.append(look())
json.dump(looks, open(said, "w"))
"""


class Simulated(NamedTuple):
    """What was seen of a run."""

    folder: Path
    budget_bytes: int
    steps: int
    looks: list[dict[str, Any]]
    """What the traced process had, at fifty moments."""
    threads: int


def simulate(folder: Path, *, hours: float, speed: float, budget_bytes: int) -> Simulated:
    """Record a run.

    Args:
        folder: Folder of the Recording.
        hours: Of the run.
        speed: How much faster than that it goes.
        budget_bytes: Of the disk.
    """
    steps = int(hours * 3600 / STEP_SECONDS)
    said = folder.with_name("looks.json")
    command = [sys.executable, "-m", "rltrace", "exec", "--out", str(folder), "--max-disk", str(budget_bytes), "--"]
    command += [sys.executable, "-c", PROGRAM, str(steps), str(STEP_SECONDS / speed), str(SPANS), str(said)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLTRACE_")}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Simulated(folder, budget_bytes, steps, json.loads(said.read_text()), 4 * steps)


def check(run: Simulated) -> None:
    """Hold what the Recording says, and what the process had, against what was promised."""
    size_bytes = budgeted_runs.disk_bytes(run.folder)
    print(f"{run.steps:,} steps, {size_bytes:,} of {run.budget_bytes:,} bytes")
    print(run.looks[len(run.looks) // 5], run.looks[-1])
    assert size_bytes <= run.budget_bytes
    early, late = run.looks[len(run.looks) // 5], run.looks[-1]
    assert late["files"] == early["files"]
    half = len(run.looks) // 2
    # A segment stays mapped until its thread is gone, so one look more or less has a few: the most of each half counts.
    early_most, late_most = (
        max(look["mapped_segments"] for look in looks) for looks in (run.looks[:half], run.looks[half:])
    )
    assert late_most <= early_most + 2, run.looks
    assert late["anonymous_kib"] <= early["anonymous_kib"] + 1024, "less than a MiB in all the time"
    found = summarize(Recording.open(run.folder))
    assert {span.name: span.count for span in found.own_spans} == {"own": run.steps * SPANS, "thread": run.threads}
    assert found.losses == [] and found.removed, "the budget was spent, and nothing went whole"
