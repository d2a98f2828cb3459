"""An instrumentation for measuring: of a verl run it records every step or, of each pair of steps, one.

It reaches every process as any other distribution's does, by an entry point (`write_distribution`). The driver says
before each step whether it is recorded, in one byte of a file, and every process looks at that byte all the time, in
both kinds of steps alike. Beside that file lies what a step that is not recorded has nowhere else: when each step began
and ended, and when each process collected all its garbage.
"""

from __future__ import annotations

import functools
import gc
import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rltrace
from rltrace.hooks.hook import Function
from rltrace.hooks.patching import PatchSet
from rltrace.record.spans import is_recording

VARIABLE = "VERL_PAIRS"
"""Environment variable with the number of pairs and the file of the byte: `20:/tmp/switch`."""
OFF, ON, MEASURE = b"0", b"1", b"m"
LOOK_SECONDS = 0.01
SETTLE_SECONDS = 0.1
"""Before a step's time begins: ten looks."""
STEPS = "steps.txt"
"""Beside the file of the byte: begin and end of each step, in nanoseconds of the host's monotonic clock."""
COLLECTIONS = "collections-{pid}.txt"
"""Beside it: the same of each full collection of one process."""
FULL = 2
"""The generation of a collection that looks at every object."""


class Pairs:
    """Switches recording in this process, and in the driver says when."""

    name = "verl_pairs"
    supports = ("verl >= 0.5",)

    def install(self, patches: PatchSet) -> None:
        """Follow the byte; in front of verl's own hooks, which are named at the same moment, tell it."""
        if VARIABLE not in os.environ:
            return
        count, _, file = os.environ[VARIABLE].partition(":")
        threading.Thread(target=follow, args=(Path(file),), daemon=True).start()
        gc.callbacks.append(Collections(Path(file).parent))
        patches.when_imported("verl", lambda _: name_timer(patches, int(count), Path(file)))


def name_timer(patches: PatchSet, count: int, file: Path) -> None:
    """Hook the generator beneath verl's timers."""
    patches.wrap("verl.utils.profiler.performance:_timer", lambda original, _: before_steps(original, count, file))


def before_steps(original: Function, count: int, file: Path) -> Function:
    """Switch before each block named `step`, outside of what verl measures of it."""
    states = plan(count)

    @functools.wraps(original)
    def timer(name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        if name == "step":
            with file.open("r+b") as byte:  # not truncated: it is mapped
                byte.write(next(states))
            time.sleep(SETTLE_SECONDS)
        start_ns = time.monotonic_ns()
        yield from original(name, *args, **kwargs)
        if name == "step":
            note(file.with_name(STEPS), start_ns)

    return timer


class Collections:
    """Notes full collections of this process, in either kind of steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start_ns = 0

    def __call__(self, state: str, info: dict[str, int]) -> None:
        """What `gc` calls at the begin and at the end of every collection."""
        if info["generation"] != FULL:
            return
        if state == "start":
            self._start_ns = time.monotonic_ns()
        else:
            note(self._folder / COLLECTIONS.format(pid=os.getpid()), self._start_ns)


def note(file: Path, start_ns: int) -> None:
    """Add a line: from then until now."""
    with file.open("a") as lines:
        lines.write(f"{start_ns} {time.monotonic_ns()}\n")


def plan(count: int) -> Iterator[bytes]:
    """The byte of each step; what is behind the plan is recorded.

    What an event costs is measured in the second step: before the first a process has timed nothing on its GPU.
    """
    from rltrace_reference.measure_overhead import plan

    recorded = [ON if on else OFF for _, on in plan(count, seed=0)]
    return itertools.chain([ON, MEASURE], recorded[2:], itertools.repeat(ON))


def follow(file: Path) -> None:
    """Do in this process what the byte says."""
    with file.open("rb") as opened:
        byte = mmap.mmap(opened.fileno(), 1, prot=mmap.PROT_READ)
    measured = False
    while True:
        state = byte[:1]
        if state == OFF:
            rltrace.pause()
        elif not is_recording():
            rltrace.resume()
        if state == MEASURE and not measured:
            measured = bool(rltrace.measure_cost())
        time.sleep(LOOK_SECONDS)


def write_distribution(folder: Path) -> None:
    """Make this file known as the instrumentation of a distribution, in a folder for PYTHONPATH."""
    info = folder / "verl_pairs-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: verl-pairs\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[rltrace.instrumentations]\nverl_pairs = verl_pairs:Pairs\n")
    (folder / "verl_pairs.py").symlink_to(Path(__file__).resolve())
