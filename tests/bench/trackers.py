"""What a step costs a program whose trackers are told of it, with real runs open in W&B, MLflow and TensorBoard.

    python tests/bench/trackers.py

It fails above `MOST_MICROSECONDS`, and if a tracker was told nothing. What a tracker does in a thread is not counted.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

os.environ.update(RLTRACE_TRACKERS="1", WANDB_SILENT="true", MLFLOW_ALLOW_FILE_STORE="true", RLTRACE_QUIET="1")

import rltrace

STEPS = 300
PHASES = (
    "rollout.generate",
    "weight_sync",
    "reward",
    "advantage",
    "actor.old_log_prob",
    "ref.log_prob",
    "actor.update",
)
OWNERS = (
    "actor.params", "actor.grads", "actor.optimizer", "actor.activations", "ref.params", "rollout.weights",
    "rollout.kv_cache", "rollout.graphs", "rollout.activations", "allocator.cached", "cuda.context", "nccl",
)  # fmt: skip
MOST_MICROSECONDS = 100
FILES = {
    "W&B": "wandb/*/*.wandb",
    "MLflow": "mlruns/*/*/metrics/rltrace/*",
    "TensorBoard": "events/*",
}
"""Where each tracker writes."""


def main() -> int:
    """Print the medians; return whether the hook is below its bar."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rltrace.instrument(folder / "recording")
        import mlflow
        import wandb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        run = wandb.init(project="bench", dir=folder, mode="offline")
        mlflow.set_tracking_uri(f"file:{folder / 'mlruns'}")
        mlflow.start_run()
        writer = EventFileWriter(str(folder / "events"))
        spent = []
        for number in range(STEPS):
            spent.append(_step(number))
            run.log({"loss": 1 / (1 + number)})  # what was added to the row goes with it
        writer.close()
        mlflow.end_run()
        run.finish()
        untold = [name for name, files in FILES.items() if not _have(folder.glob(files))]
    microseconds = sorted(spent)
    print(
        f"end of a step, all three open: median {median(spent):.0f} µs, 95 % {microseconds[int(0.95 * STEPS)]:.0f} µs"
    )
    if untold:
        print(f"told nothing: {', '.join(untold)}")
    return int(bool(untold) or median(spent) > MOST_MICROSECONDS)


def _have(files: Iterable[Path]) -> bool:
    """Return whether one of a tracker's files has a step's seconds, by its name or in it."""
    return any(file.name == "step_seconds" or b"step_seconds" in file.read_bytes() for file in files)


def _step(number: int) -> float:
    """Make a step with its phases and samples; return the microseconds that its end took beyond its record."""
    from rltrace.hooks.installation import installed
    from rltrace.record import spans

    (_, end) = spans._watchers["step"][-1]
    assert "trackers" in installed().patch_sets
    took = 0.0

    def timed(token: object) -> None:
        nonlocal took
        began = time.perf_counter_ns()
        end(token)
        took = (time.perf_counter_ns() - began) / 1e3

    watcher = spans._watchers["step"][-1]
    spans._watchers["step"][-1] = (watcher[0], timed)
    try:
        with rltrace.span("step", step=number):
            for phase in PHASES:
                with rltrace.phase(phase):
                    time.sleep(0.001)
            for owner in OWNERS:
                rltrace.counter(f"{owner}_bytes", number << 20)
    finally:
        spans._watchers["step"][-1] = watcher
    time.sleep(0.005)
    return took


if __name__ == "__main__":
    sys.exit(main())
