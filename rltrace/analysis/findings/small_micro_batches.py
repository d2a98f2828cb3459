"""Micro-batches are small although the card has room: each gathers all parameters anew, or is bound by its launches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rltrace.analysis.findings.amounts import as_text, bytes_as_text
from rltrace.analysis.findings.capacity import capacity_bytes, gpus, least_free_in
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.launches import Launches, forwards_in, launch_bound_phases, mean_seconds
from rltrace.analysis.findings.programs import EXAMPLE
from rltrace.analysis.findings.run import PerStep, Run
from rltrace.analysis.gpu_work import GATHERS_AND_SCATTERS
from rltrace.analysis.intervals import cut, union

NAME = "small_micro_batches"
GATHER = GATHERS_AND_SCATTERS[0]

VALIDATED = "Followed on 2 H100s, such prices of 6.14 and 2.76 s came true as 6.86 and 2.36 s"
"""Where somebody has followed the finding (docs/measurements/findings_followed.md)."""

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


class Repeated(NamedTuple):
    """What each micro-batch of a phase does again."""

    what: str
    seconds: PerStep
    """In each step, all micro-batches together."""
    facts: tuple[str, str]


def judge(run: Run) -> list[Finding]:
    """Price half of what each phase repeats that could have half as many micro-batches."""
    launches = launch_bound_phases(run) or {}
    if not launches and not any(row.work == GATHER for row in run.summary.gpu_work):
        raise UnjudgeableError("no all-gather of FSDP was timed on a GPU")
    if not list(gpus(run)):
        raise UnjudgeableError("no GPU's memory was measured")
    return [found for phase in MICRO_BATCH for found in _of_phase(run, phase, launches.get(phase))]


def _of_phase(run: Run, phase: str, launches: Launches | None) -> Iterator[Finding]:
    times = forwards_in(run, phase)
    free_bytes = least_free_in(run, phase) or 0
    repeated = _gathers(run, phase) if launches is None else _launching(run, phase, launches, times)
    if repeated is None or times < 2 or free_bytes < ROOM * min(map(capacity_bytes, gpus(run))):
        return
    yield run.finding(
        NAME,
        f"{phase} has {times:.0f} micro-batches, each of which {repeated.what}, while {bytes_as_text(free_bytes)} of "
        "each card are free",
        repeated.facts,
        per_step=repeated.seconds / 2,
        bound=float(repeated.seconds.mean()) * (1 - 1 / times),
        less_because="gathers overlap with computing where that takes longer, and larger batches with their launches",
        basis="modelled",
        figures={"micro_batches": times, "free_bytes": float(free_bytes)},
        phases=[phase],
        settings=MICRO_BATCH[phase],
    )


def _launching(run: Run, phase: str, launches: Launches, times: float) -> Repeated:
    """Return the whole phase: its kernels run as fast as they are launched, however few tokens they have."""
    seconds = mean_seconds(run, phase)
    whole = float(seconds.mean())
    return Repeated(
        "takes as long to launch as to run",
        seconds,
        (
            f"a forward takes {as_text(launches.host_seconds)} to launch and {as_text(launches.gpu_seconds)} to run, "
            f"so the phase lasts as long as its launches: {as_text(whole)} for {times:.0f} micro-batches",
            f"the price: twice as large, {times / 2:.0f} micro-batches need half of the launches, {as_text(whole / 2)} "
            f"less. The GPU does the same work in larger kernels, which fill it better. {VALIDATED}",
        ),
    )


def _gathers(run: Run, phase: str) -> Repeated | None:
    seconds = _gathering(run, phase)
    return (
        None
        if seconds is None
        else Repeated(
            "gathers all parameters",
            seconds,
            (
                f"gathers take {as_text(seconds.mean())} of a step on the rank that waits least for others",
                f"the price: half as many micro-batches have half as many gathers, {as_text(seconds.mean() / 2)} less",
            ),
        )
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
