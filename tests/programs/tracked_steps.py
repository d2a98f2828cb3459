"""Steps of a program that has a run open in W&B, MLflow and TensorBoard, and logs to each as it likes.

python tracked_steps.py OUT
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import rltrace

out = Path(sys.argv[1])
rltrace.instrument(out / "recording")

import mlflow  # noqa: E402 - behind the hooks
import tensorboardX  # noqa: E402
import wandb  # noqa: E402
from torch.utils.tensorboard import SummaryWriter  # noqa: E402

from rltrace.instrument.trackers.handing import HANDING  # noqa: E402

run = wandb.init(project="tracked", dir=out, mode="offline")
mlflow.set_tracking_uri(f"file:{out / 'mlruns'}")
active = mlflow.start_run()
writer = SummaryWriter(out / "events")
other_writer = tensorboardX.SummaryWriter(str(out / "events_x"))

rltrace.counter("rollout.weights_bytes", 3 << 30)  # before the first step: it holds them in all of them
wandb_steps = []
for number in range(10, 13):
    with rltrace.span("step", step=number):
        with rltrace.phase("actor.update"):
            time.sleep(0.02)
            rltrace.counter("actor.params_bytes", number << 30)
        for _ in range(2):
            with rltrace.span("weight_sync"):  # a phase by its name
                time.sleep(0.01)
        rltrace.counter("actor.params_bytes", 1 << 30)
        wandb.log({"loss": number / 10})
        mlflow.log_metric("loss", number / 10, step=number)
        writer.add_scalar("loss", number / 10, number)
        other_writer.add_scalar("loss", number / 10, number)
    wandb_steps.append(run.step)
    HANDING.settle(60)  # a step takes longer than this in earnest: W&B has it before the next row
run.log({"last": 1.0})
wandb_steps.append(run.step)
writer.close()
other_writer.close()
mlflow.end_run()
wandb.finish()
with rltrace.span("step", step=13):  # nobody is told
    pass
said = {"wandb_steps": wandb_steps, "mlflow_run": active.info.run_id, "wandb_file": run.settings.sync_file}
(out / "said.json").write_text(json.dumps(said))
