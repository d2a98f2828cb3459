"""A program on two hosts without Ray, each with a folder of its own: one command on either, and one clock each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from other_clock import RENAMED, OtherClock

import rltrace
from rltrace.hooks.environment import with_startup
from rltrace.record import clock_readings, cluster

ROOT = Path(rltrace.__file__).parents[1]
SECONDS = 240

RANKS = """
import os, sys, time

import torch
import torch.distributed as dist

import rltrace

dist.init_process_group("gloo", init_method="env://")
n, is_over = 0, torch.zeros(1)
while not is_over:
    with rltrace.span("step", step=n):
        with rltrace.phase("actor.update", n=n):
            time.sleep(0.02)
        with rltrace.span("together", n=n):
            is_over[0] = os.path.exists(sys.argv[1])
            dist.all_reduce(is_over, dist.ReduceOp.MAX)
    n += 1
time.sleep(dist.get_rank())
dist.destroy_process_group()
"""
"""What each rank does until the file is there. `together` begins on no host after it has ended on another. Rank 0 ends
first, and with it its store, if that is no launcher's."""


@dataclass(frozen=True)
class Hosts:
    """Two hosts on which the same program runs; the clock of the first one is this machine's, and rank 0 is there."""

    folder: Path
    clock: OtherClock
    """The second host's."""
    running: tuple[subprocess.Popen[str], subprocess.Popen[str]]

    def readings(self) -> int:
        """How many there are."""
        return sum(len(file.read_text().splitlines()) for file in self.folder.glob(f"*/{clock_readings.FILE}"))

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something, as long as both run."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            ended = [process for process in self.running if process.poll() is not None]
            assert not ended, ended[0].communicate()[1]
            assert time.monotonic() < deadline, f"{self.readings()} readings"
            time.sleep(0.1)

    def stop(self) -> tuple[str, str]:
        """End the program in good order, and return what each host wrote to its stderr."""
        (self.folder / "over").touch()
        said = [process.communicate(timeout=SECONDS)[1] for process in self.running]
        assert [process.returncode for process in self.running] == [0, 0], said
        return said[0], said[1]


def exec_command(out: str, *command: str) -> list[str]:
    """`rltrace exec` of a command."""
    return [sys.executable, "-m", "rltrace", "exec", "--sample", "0", "--out", out, "--", *command]


@contextmanager
def two_hosts(
    folder: Path, clock: OtherClock, commands: tuple[list[str], list[str]], environments: Sequence[Mapping[str, str]]
) -> Iterator[Hosts]:
    """Run a command on each host."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RLTRACE_", "SLURM_"))}
    path = os.pathsep.join(map(str, [ROOT, ROOT / "exporters", ROOT / "reference_run"]))
    paths = path, os.pathsep.join([str(clock.folder), path])
    if cluster.DIR_VARIABLE in environments[0]:
        paths = with_startup(paths[0]), with_startup(paths[1])
    running = [
        subprocess.Popen(
            [*prefix, *command],
            env={**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for prefix, command, path, environment in zip(([], RENAMED), commands, paths, environments, strict=True)
    ]
    try:
        yield Hosts(folder, clock, (running[0], running[1]))
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
                process.communicate()
