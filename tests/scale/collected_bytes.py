"""What a collection of totals and chosen steps brings of each host, and what a reader of it holds.

    python tests/scale/collected_bytes.py OUT --ranks 64 --steps 10 --chosen 9

It makes a Recording, has each host make columns of its segments, and reads these together.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from made_recording import GPUS, Wanted, make

from rltrace.analysis.step_times import step_times
from rltrace.read import packed
from rltrace.read.recording import Process, Recording
from rltrace.record import manifest
from rltrace.record.step_numbers import numbers
from rltrace.run.abridgement import StepRow, abridge, by_clock


def main() -> None:
    """Print bytes of each host and step, CPU seconds of making them, and CPU seconds and memory of reading them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--chosen", default="9")
    asked = parser.parse_args()
    whole, collected = asked.out / "whole", asked.out / "collected"
    records = make(whole, Wanted(ranks=asked.ranks, steps=asked.steps))
    recording = Recording.open(whole)
    rows = [StepRow(step.number, step.start_ns, step.end_ns) for step in step_times(recording)]
    began = time.process_time()
    for process in recording.processes:
        abridge(
            process, by_clock(rows, own_clock(process)), numbers(asked.chosen), collected / "processes" / process.key
        )
    seconds = time.process_time() - began
    for name in (manifest.FILE, "clocks.jsonl"):
        shutil.copy(whole / name, collected / name)
    hosts = -(-asked.ranks // GPUS)
    sizes = {suffix: size_bytes(collected, suffix) / hosts for suffix in (packed.SUFFIX, ".jsonl", ".u64")}
    print(f"{records:,} records on {hosts} hosts, {size_bytes(whole, '.seg') / hosts:,.0f} bytes of segments each")
    print(f"made columns in {seconds / records * 1e6:.2f} us of CPU per record; each host gives", end=" ")
    print(", ".join(f"{size:,.0f} bytes of *{suffix}" for suffix, size in sizes.items()))
    for folder in (whole, collected):
        print(f"summary of {folder.name}: {read(folder)}")


def own_clock(process: Process) -> Callable[[int], int]:
    """Return what gives the time of a process's own clock at a time of the run's."""
    return int if process.alignment is None else process.alignment.undone_ns


def size_bytes(folder: Path, suffix: str) -> int:
    """Return the bytes of all files of one kind."""
    return sum(file.stat().st_size for file in folder.glob(f"processes/*/*{suffix}"))


def read(folder: Path) -> str:
    """Return CPU seconds and peak memory of `rltrace summary`."""
    started = subprocess.Popen([sys.executable, "-m", "rltrace", "summary", str(folder)], stdout=subprocess.DEVNULL)
    _, _, used = os.wait4(started.pid, 0)
    return f"{used.ru_utime + used.ru_stime:.1f} s of CPU, {used.ru_maxrss / 1024:,.0f} MiB"


if __name__ == "__main__":
    main()
