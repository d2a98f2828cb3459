"""Micro-batches are small although the card has room, and each one gathers all parameters anew."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.capacity import capacity_bytes, gpus, least_free_in
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.programs import EXAMPLE
from rltrace.analysis.findings.run import PerStep, Run
from rltrace.analysis.gpu_work import FORWARD, GATHERS_AND_SCATTERS
from rltrace.analysis.intervals import cut, union

NAME = "small_micro_batches"
GATHER = GATHERS_AND_SCATTERS[0]

ROOM = 0.5
"""Share of a card that must be free in a phase: then twice the activations fit, whatever part of the rest they are."""


def _of_verl(key: str) -> Setting:
    return Setting("verl", f"{key}: twice as large")


TRL = Setting("TRL", "GRPOConfig(per_device_train_batch_size=...): larger, gradient_accumulation_steps=... smaller")
OURS = Setting(EXAMPLE, "actor.micro_batch: twice as large")
YOURS = Setting("your program", "twice as many sequences at once")

MICRO_BATCH = {
    "actor.update": (_of_verl("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"), TRL, OURS, YOURS),
    "actor.old_log_prob": (_of_verl("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"), TRL, OURS, YOURS),
    "ref.log_prob": (_of_verl("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"), TRL, OURS, YOURS),
    "critic.update": (_of_verl("critic.ppo_micro_batch_size_per_gpu"), YOURS),
}
"""By phase, what to change."""


def judge(run: Run) -> list[Finding]:
    """Price half of the gathers of each phase that could have half as many micro-batches."""
    if not any(row.work == GATHER for row in run.summary.gpu_work):
        raise UnjudgeableError("no all-gather of FSDP was timed on a GPU")
    if not list(gpus(run)):
        raise UnjudgeableError("no GPU's memory was measured")
    return [found for phase in MICRO_BATCH for found in _of_phase(run, phase)]


def _of_phase(run: Run, phase: str) -> Iterator[Finding]:
    times = max((row.count for row in run.summary.gpu_work if row.work == FORWARD and row.phase == phase), default=0)
    free_bytes = least_free_in(run, phase) or 0
    seconds = _gathering(run, phase)
    if seconds is None or times < 2 or free_bytes < ROOM * min(map(capacity_bytes, gpus(run))):
        return
    yield run.finding(
        NAME,
        f"{phase} has {times:.0f} micro-batches, each of which gathers all parameters, while {free_bytes / 1e9:.0f} GB "
        "of each card are free",
        [
            f"gathers take {as_text(seconds.mean())} of a step on the rank that waits least for others",
            "half as many micro-batches have half as many gathers",
        ],
        per_step=seconds / 2,
        bound=float(seconds.mean()) * (1 - 1 / times),
        less_because="gathers overlap with computing where that takes longer",
        basis="modelled",
        figures={"micro_batches": times, "free_bytes": float(free_bytes)},
        phases=[phase],
        settings=MICRO_BATCH[phase],
    )


def _gathering(run: Run, phase: str) -> PerStep | None:
    """Return the seconds of gathers in each step on the rank that waits least in them; None if none was timed."""
    found = []
    for lane in run.ranks:
        kept = [process.device_spans[GATHER] for process in run.members[lane] if GATHER in process.device_spans]
        if kept and phase in run.phases[lane]:
            rows = union(*(spans.rows(run.seen.end_ns) for spans in kept))
            found.append(run.seconds_in(cut(rows, run.phases[lane][phase])[0]))
    return np.asarray(np.min(found, axis=0)) if found else None
