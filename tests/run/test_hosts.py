"""Two hosts without Ray: ranks of torchrun and of SLURM, each host's folder, one Recording on one clock."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from other_clock import OtherClock, require_namespaces
from two_hosts import RANKS, Hosts, exec_command, free_port, two_hosts

from rltrace.analysis.clocks import TimeLine
from rltrace.events import Span
from rltrace.read.recording import Process, Recording
from rltrace.record import clock_readings

pytestmark = [pytest.mark.run, pytest.mark.timeout(600)]

DRIFT_PPM = 100
JUMP_NS = 80_000_000


@dataclass(frozen=True)
class Run:
    """What two hosts recorded."""

    hosts: Hosts
    said: tuple[str, str]
    """Standard error of each host."""
    together: Path
    """Their Recording."""
    collected: str
    """What `rltrace collect` said."""


def rltrace_command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rltrace", *words]
    return subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=120)


def torchrun(folder: Path, host: int, port: int) -> list[str]:
    """The command of one of two hosts."""
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}", "--nproc-per-node=1"]
    where = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    return [sys.executable, *launcher, *where, str(folder / "ranks.py"), str(folder / "over")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """torchrun on two hosts; the second one's clock drifts, and jumps once while it is read."""
    require_namespaces()
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "ranks.py").write_text(RANKS)
    clock = OtherClock.begin(folder / "clock", ppm=DRIFT_PPM, jump_ns=JUMP_NS)
    port = free_port()
    commands = tuple(
        exec_command(folder / name, *torchrun(folder, host, port)) for host, name in enumerate(("first", "second"))
    )
    with two_hosts(folder, clock, (commands[0], commands[1]), ({}, {})) as hosts:
        hosts.until(lambda: hosts.readings() >= 5)
        clock.jump()
        hosts.until(lambda: hosts.readings() >= 8)
        said = hosts.stop()
    shutil.copytree(folder / "first", folder / "alone")
    done = rltrace_command(folder, "collect", "second", "first")
    assert done.returncode == 0, done.stderr
    return Run(hosts, said, folder / "first", done.stdout)


@dataclass(frozen=True)
class Timed:
    """A span of the second host: where the timeline shows its beginning, when that was, and how far off at most."""

    shown_ns: int
    true_ns: float
    bound_ns: float

    @property
    def error_ns(self) -> float:
        return abs(self.shown_ns - self.true_ns)


def far_spans(recording: Recording, clock: OtherClock, stated: Recording) -> list[Timed]:
    """Every span of the second host, on a Recording's time line, with the bound that the aligned one states."""
    line = TimeLine(recording)
    fits = {process.key: process.alignment for process in stated.processes}
    found = []
    for process in recording.processes:
        fit = fits[process.key]
        if process.host == "second" and fit is not None:
            as_written = Process(process.folder).events()
            for raw, event in zip(as_written, process.events(), strict=False):  # behind them are inferred ones
                if isinstance(raw, Span) and isinstance(event, Span):
                    shown_ns = event.start_ns + line.shift_ns(process)
                    found.append(Timed(shown_ns, float(clock.true_ns(raw.start_ns)), fit.bound_ns(raw.start_ns)))
    return found


def check_bound(spans: list[Timed]) -> None:
    """No span of the second host is farther from the truth than the Recording states."""
    assert len(spans) > 100
    assert all(span.error_ns <= span.bound_ns + 2 for span in spans)


def check_order(recording: Recording, bound_ns: float) -> None:
    """No rank leaves a collective before the other one has come to it."""
    line = TimeLine(recording)
    began: dict[int, list[int]] = {}
    ended: dict[int, list[int]] = {}
    for process in recording.processes:
        for event in process.events():
            if isinstance(event, Span) and event.name == "together" and event.end_ns is not None:
                began.setdefault(event.args["n"], []).append(event.start_ns + line.shift_ns(process))
                ended.setdefault(event.args["n"], []).append(event.end_ns + line.shift_ns(process))
    assert len(began) > 100 and all(len(times) == 2 for times in began.values())
    assert all(max(began[n]) <= min(ended[n]) + bound_ns for n in began)


def without_alignment(run: Path, copy: Path) -> Recording:
    shutil.copytree(run, copy)
    (copy / clock_readings.FILE).unlink()
    return Recording.open(copy)


def test_times_within_bound(run: Run, tmp_path: Path) -> None:
    """Drift and a jump stay within the stated bound; without alignment they do not."""
    recording = Recording.open(run.together)
    spans = far_spans(recording, run.hosts.clock, recording)
    check_bound(spans)
    with pytest.raises(AssertionError):
        check_bound(far_spans(without_alignment(run.together, tmp_path / "off"), run.hosts.clock, recording))
    outside = sorted(span.bound_ns for span in spans if span.bound_ns < JUMP_NS / 2)
    errors = sorted(span.error_ns for span in spans if span.bound_ns < JUMP_NS / 2)
    print(f"{len(spans)} spans; apart from the jump: bound {outside[-1] / 1e3:.0f} us, error {errors[-1] / 1e3:.0f} us")
    assert len(outside) > len(spans) / 2 and outside[-1] < 5_000_000
    assert any(span.bound_ns > JUMP_NS / 2 for span in spans)


def test_no_rank_leaves_before_the_other_comes(run: Run, tmp_path: Path) -> None:
    """No rank leaves a collective before the other one has come to it, whatever the clocks are known by."""
    recording = Recording.open(run.together)
    bounds = [span.bound_ns for span in far_spans(recording, run.hosts.clock, recording)]
    check_order(recording, max(bounds))
    with pytest.raises(AssertionError):
        check_order(without_alignment(run.together, tmp_path / "off"), max(bounds))
