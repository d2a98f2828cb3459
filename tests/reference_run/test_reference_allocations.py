"""`allocations: {steps: [1]}` in a run without a GPU: the run is the same, and every process says why it kept none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from reference_runs import write_config

from rltrace.events import ALLOCATIONS_KEPT
from rltrace.recording import Recording


@pytest.mark.run
def test_without_a_gpu_worker_and_engine_say_that_none_was_kept(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        steps=2,
        ranks=1,
        task={"prompts": 4},
        rollout={"n": 2, "max_tokens": 4, "slots": 8},
        actor={"minibatches": 1, "micro_batch": 8},
        allocations={"steps": [1]},
    )
    command = [sys.executable, "-c", "import sys; from rltrace.cli import main; main(sys.argv[1:])"]
    done = subprocess.run(
        [*command, "run", str(config), "--out", str(tmp_path / "run")], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    processes = {process.place: process for process in Recording.open(tmp_path / "run").processes}
    for place in ("rank 0 worker", "rank 0 engine"):
        assert processes[place].unavailable["allocations"] == "RuntimeError: this process uses no GPU"
        assert ALLOCATIONS_KEPT not in {event.name for event in processes[place].events()}
