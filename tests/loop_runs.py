"""Loops of `tests/programs/loops` under `rltrace exec`, and what their own timers say of the same steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from free_port import free_port
from traced_runs import traced_environment
from warm_python import warm

from rltrace.analysis.steady import LaneSteps
from rltrace.analysis.summary import Summary, summarize
from rltrace.read.recording import Recording
from rltrace.record import manifest

LOOPS = Path(__file__).parent / "programs" / "loops"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")

COMMANDS = {
    "grpo_generate": (),
    "fsdp2_torchrun": TORCHRUN,
    "ddp_torchrun": TORCHRUN,
    "accelerate_zero": (),
    "asyncio_tools": (),
}
"""Each loop, and what Python is told in front of its file."""

OTHER = ("wait.driver", "unlabelled", "idle")


SECONDS = 400
"""DeepSpeed compiles what it needs in its first run, which takes minutes."""


class LoopRun(NamedTuple):
    """A run of a loop, and what two sides say of its steady steps: shares of a step."""

    summary: Summary
    recording: Recording
    found: dict[str, float]
    """Of its phases, `unlabelled` and `idle`, by rltrace; of rank 0, or of the only process."""
    own: dict[str, float]
    """Of its phases and `idle`, by the loop's own timers."""
    steps: int
    """Steps that the loop timed."""
    apart: list[dict[str, float]]
    """How far each phase, `idle` and `unlabelled` are from the loop's own timers in each step but the first, as shares
    of it; `unlabelled` is what the loop does not time."""

    @property
    def differences(self) -> dict[str, float]:
        """How far each phase and `idle` are from the loop's own timers, as shares of a step."""
        return {name: self.found.get(name, 0.0) - share for name, share in self.own.items()}


def run_loop(
    folder: Path, loop: str, python: Path = Path(sys.executable), *, ranks: int = 2, **variables: str
) -> LoopRun:
    """Run one to its end under `rltrace exec`; torchrun starts as many ranks."""
    timers, out = folder / "timers.json", folder / "recording"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RLTRACE_")}
    launcher = [*COMMANDS[loop], f"--nproc-per-node={ranks}"] if COMMANDS[loop] else []
    exec_ = [python, "-m", "rltrace", "exec", "--out", out, "--", python, *launcher, LOOPS / f"{loop}.py"]
    done = subprocess.run(
        list(map(str, exec_)),
        env={**inherited, "OMP_NUM_THREADS": "1", "OWN_TIMERS": str(timers), **variables},
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return _ended([done], out, timers)


def fork_loop(folder: Path, loop: str) -> LoopRun:
    """Run one to its end in a Python that has imported torch; its ranks are set by hand."""
    timers, out = folder / "timers.json", folder / "recording"
    manifest.create(out, owner=None, command=[], config=None)
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [{**job, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"] if COMMANDS[loop] else [{}]
    environments = [traced_environment(out, OWN_TIMERS=str(timers), **rank) for rank in ranks]
    ended = warm("torch").run_together(LOOPS / f"{loop}.py", environments, folder, SECONDS)
    return _ended(ended, out, timers)


def _ended(programs: Sequence[subprocess.CompletedProcess[str]], out: Path, timers: Path) -> LoopRun:
    for done in programs:
        assert done.returncode == 0, done.stderr[-4000:]
        assert "rltrace: the hook" not in done.stderr, done.stderr[-4000:]
    recording = Recording.open(out)
    summary = summarize(recording)
    times = json.loads(timers.read_text())
    own, steps = _own_shares(times)
    lane = _lane(summary)
    found = {name: part.share for name, part in lane.phases.items()}
    return LoopRun(summary, recording, found, own, steps, _apart(summary, lane.lane, times))


def one_rank(stage: int) -> dict[str, str]:
    """Return the environment of a single rank of DeepSpeed on a CPU, by its stage of ZeRO."""
    of_launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "LOCAL_RANK": "0"}
    return {**of_launcher, "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu", "ZERO_STAGE": str(stage)}


def _lane(summary: Summary) -> LaneSteps:
    assert summary.steady is not None
    lanes = [lane for lane in summary.steady.lanes if lane.rank in (0, None)]
    (lane,) = [lane for lane in lanes if any(name not in OTHER for name in lane.phases)]
    return lane


def _own_shares(times: list[tuple[str, int, int]]) -> tuple[dict[str, float], int]:
    """Return the share of each part in the steps after the first."""
    steps = [(start, end) for name, start, end in times if name == "step"]
    whole = fmean(end - start for start, end in steps[1:])
    parts: dict[str, float] = {}
    for name, start, end in times:
        if name != "step" and start >= steps[1][0]:
            parts[name] = parts.get(name, 0.0) + (end - start) / (len(steps) - 1) / whole
    return parts, len(steps)


def _apart(summary: Summary, lane: str, times: list[tuple[str, int, int]]) -> list[dict[str, float]]:
    found = {row.step: row.phases for row in summary.phases if row.lane == lane}
    whole = [(start, end) for name, start, end in times if name == "step"]
    apart = []
    for step, (first, last) in list(enumerate(whole))[1:]:
        parts = [(name, end - start) for name, start, end in times if name != "step" and first <= start < last]
        own = {"unlabelled": last - first - sum(length for _, length in parts)}
        for name, length in parts:
            own[name] = own.get(name, 0) + length
        seconds = {name: part.seconds for name, part in found[step].items()}
        apart.append({name: (seconds.get(name, 0.0) * 1e9 - length) / (last - first) for name, length in own.items()})
    return apart


def table(loop: str, run: LoopRun) -> str:
    """Return the rows of one loop in Markdown: by rltrace, by its own timers, the difference."""
    names = [*(name for name in run.own if name != "idle"), "idle", "unlabelled"]
    rows = []
    for name in names:
        own = f"{run.own[name]:.1%}" if name in run.own else ""
        apart = f"{run.differences[name]:+.1%}" if name in run.own else ""
        rows.append(f"| {loop} | `{name}` | {run.found.get(name, 0.0):.1%} | {own} | {apart} |")
    return "\n".join(rows)
