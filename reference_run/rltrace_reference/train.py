"""The story of a colocated GRPO run; each call below runs on every rank at once.

Only `rltrace.phase`, `span` and `counter` of the driver are written here. All else in a timeline, from the weight sync
to the optimizer, comes from the hooks in `rltrace/instrument/`, which need no line in this program.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import replace

import torch

import rltrace
from rltrace_reference import batch as batches
from rltrace_reference import grpo, task
from rltrace_reference.config import Config
from rltrace_reference.progress import Display
from rltrace_reference.step_record import StepRecord, record_step
from rltrace_reference.worker_group import WorkerGroup


def train(config: Config, display: Display, on_step: Callable[[StepRecord], None]) -> None:
    """Run all steps.

    Args:
        config: The run.
        display: Shows where it is.
        on_step: Called with each step's record when it is done.

    Raises:
        RunError: a process died, or weights did not arrive.
    """
    with WorkerGroup(config, run_id=uuid.uuid4().hex[:8], on_call=display.phase) as workers:
        for step in range(config.steps):
            with (
                workers.recording("allocations", step in config.allocations.steps),  # written when the step is over
                rltrace.span("step", step=step) as span,
                workers.recording("kernels", step in config.kernels.steps),
            ):
                record = train_step(config, workers, display, step)
                rltrace.counter("reward_mean", record.reward_mean)
                rltrace.counter("tokens_per_second", record.tokens_per_second)
                rltrace.counter("logprob_abs_diff_max", record.logprob_abs_diff_max)
                span.set(**record.figures())
            display.step(record)
            on_step(record)


def train_step(config: Config, workers: WorkerGroup, display: Display, step: int) -> StepRecord:
    """Run one step of GRPO: ask, score, compare with the group, learn."""
    start = time.monotonic()

    # Each rank wakes its engine, syncs the weights into it, generates, and puts it to sleep again.
    prompts = task.prompts(config.task.prompts, config.seed, step, config.task.prompt_tokens)
    size = config.prompts_per_rank
    parts = [prompts[rank * size : (rank + 1) * size] for rank in range(config.ranks)]
    batch = batches.concatenate(workers.call("generate", [(part, step) for part in parts]))

    display.phase("reward")
    with rltrace.phase("reward"):
        reward_B = task.rewards(batch.tokens_BT, batch.response_mask_BT)

    # Log-probs of what was said: by the policy as it is before the update, and by the one it started from.
    shards = [(part,) for part in batch.split(config.ranks)]
    old_BT = torch.cat(workers.call("old_log_prob", shards))
    ref_BT = torch.cat(workers.call("ref_log_prob", shards))

    display.phase("advantage")
    with rltrace.phase("advantage"):
        advantages_B = grpo.group_advantages(reward_B, config.rollout.n)
        batch = replace(batch, old_log_probs_BT=old_BT, ref_log_probs_BT=ref_BT, advantages_B=advantages_B)

    updates = workers.call("update", [(part, step) for part in batch.split(config.ranks)])

    return record_step(step, reward_B, batch, updates, time.monotonic() - start)
