"""What `rltrace summary` takes of large Recordings: `python tests/bench/summary.py --help`.

A Recording is made of the records of a real one (`tests/scale/made_recording.py`), and read by the command itself in a
process of its own. Figures are its CPU seconds and its peak memory. Each case has a goal, which is printed with whether
it was met, and a limit, above which this fails: what was reached must not be lost.
"""

from __future__ import annotations

import argparse
import compileall
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "scale"))

from made_recording import Wanted, make

import rltrace
from rltrace.read import native


class Case(NamedTuple):
    """A Recording, and what reading it may take."""

    ranks: int
    steps: int
    limit_seconds: float
    limit_megabytes: float
    goal_seconds: float | None = None
    goal_megabytes: float | None = None
    again_seconds: float | None = None
    """What a second reading may take, which loads what the first one kept."""
    is_thin: bool = False
    """Without the spans of layers and of an engine's steps, as `made_recording.py --thin` makes it."""


USUAL = (
    Case(8, 10, 1.5, 120),
    Case(8, 2000, 9, 1100, 5, again_seconds=5, is_thin=True),
    Case(256, 10, 18, 1000, 10, 1000, 2),
)
LARGE = (Case(8, 2000, 85, 5000), Case(1024, 10, 75, 3500, 45, 2000, 5))
"""These take minutes, and up to 8 GB of disk."""


class Taken(NamedTuple):
    """What a process took."""

    cpu_seconds: float
    megabytes: float


def measured(folder: Path, *arguments: str) -> Taken:
    """Summarize a Recording in another process."""
    command = [sys.executable, "-m", "rltrace", "summary", str(folder), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)} failed")
    return Taken(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6)


def _said(what: float, goal: float | None, unit: str) -> str:
    if goal is None:
        return f"{what:,.1f} {unit}"
    return f"{what:,.1f} {unit} (goal {goal:,.0f}: {'met' if what <= goal else 'NOT MET'})"


def run(case: Case, folder: Path) -> bool:
    """Make one, print what it takes, and return whether that is within the limits."""
    records = make(folder, Wanted(case.ranks, case.steps, is_thin=case.is_thin))
    taken = measured(folder)
    print(
        f"{case.ranks} ranks x {case.steps} steps{', thin' * case.is_thin}, {records:,} records: "
        f"{_said(taken.cpu_seconds, case.goal_seconds, 's of CPU')}, "
        f"{_said(taken.megabytes, case.goal_megabytes, 'MB')}, "
        f"{taken.cpu_seconds / records * 1e6:.2f} µs a record",
        flush=True,
    )
    again = measured(folder)
    second = _said(again.cpu_seconds, case.again_seconds, "s of CPU")
    print(f"  a second time: {second}, {_said(again.megabytes, None, 'MB')}", flush=True)
    is_within = taken.cpu_seconds <= case.limit_seconds and taken.megabytes <= case.limit_megabytes
    return is_within and again.cpu_seconds <= (case.again_seconds or case.limit_seconds)


def main() -> int:
    """Measure, and return 1 if a limit was exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="the largest ones too: minutes, and up to 8 GB of disk")
    cases = USUAL + (LARGE if parser.parse_args().large else ())
    compileall.compile_dir(Path(rltrace.__file__).parent, quiet=1)  # as an installation is
    print(f"segments are decoded {native.decoder()}")
    within = True
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="rltrace-bench-") as folder:
            within &= run(case, Path(folder) / "run")
    if not within:
        print("above the limits")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
