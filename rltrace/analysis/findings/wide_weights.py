"""Weights go to the engine in a wider type than it holds them in."""

from __future__ import annotations

from statistics import fmean

from rltrace.analysis.findings.amounts import as_text, bytes_as_text
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run
from rltrace.analysis.findings.syncs import length, per_step, slowest
from rltrace.analysis.weight_sync import RankSync
from rltrace.events import REQUEST, STAGES_INSIDE

NAME = "wide_weights"
WEIGHTS = "rollout.weights"

LEAST_RATIO = 1.5
"""Widths of types differ by powers of two (IEEE 754, OCP FP8). Some tensors keep theirs, so the limit is between 1 and
2."""

NOT_BY_BYTES = (*STAGES_INSIDE, "weight_sync.merge", "weight_sync.map", "weight_sync.reset_cache")
"""Stages whose length does not depend on the type."""

SETTINGS = (
    Setting(
        "verl",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16: the master weights are bf16 then, too",
        since="0.6.0",
    ),
    Setting("your program", "cast each tensor to the engine's type before it is gathered and sent"),
)


def judge(run: Run) -> list[Finding]:
    """Compare the bytes that are sent with those that the engines hold."""
    syncs = run.steady_syncs()
    sent = fmean(sum(sync.bytes for sync in of_step) for of_step in syncs.values())
    held = [peak.bytes for device in run.summary.memory if (peak := device.owner_peaks.get(WEIGHTS)) and peak.bytes]
    if not held:
        raise UnjudgeableError("nobody said how many bytes of weights the engines hold")
    if not sent:
        raise UnjudgeableError("the weight sync does not say how many bytes it sends")
    ratio = sent / sum(held)
    if ratio < LEAST_RATIO:
        return []
    ratio /= _ranks_of_an_engine(run, len(held))
    if ratio < LEAST_RATIO:
        return []
    surplus = 1 - 1 / ratio
    of_rank = sent / len(held)
    stages = per_step(run, syncs, lambda sync: _by_bytes(sync) * surplus)
    return [
        run.finding(
            NAME,
            f"Each rank sends {bytes_as_text(of_rank)} of weights where the engine holds "
            f"{bytes_as_text(of_rank / ratio)}",
            [
                f"{ratio:.2f} times the bytes: {bytes_as_text(of_rank)} a rank and step are sent, "
                f"{bytes_as_text(sum(held) / len(held))} are held in the engine",
                f"gather, send, wait and load take {as_text(fmean(slowest(syncs, _by_bytes)))} of a sync of "
                f"{as_text(length(syncs))}, on the slowest rank",
            ],
            per_step=stages,
            size_bytes=of_rank * surplus,
            bound=surplus * fmean(per_step(run, syncs, lambda sync: sync.seconds)),
            less_because="stages whose length is a launch or a call, and not bytes, stay as long",
            basis="modelled",
            figures={"sent_bytes": of_rank, "held_bytes": sum(held) / len(held), "ratio": ratio},
            phases=["weight_sync"],
            settings=SETTINGS,
        )
    ]


def _by_bytes(sync: RankSync) -> float:
    """Return the seconds of a sync in stages whose length depends on the bytes."""
    fixed = sum(sync.stages[name].seconds for name in NOT_BY_BYTES if name in sync.stages)
    return max(sync.seconds - sync.rest_seconds - fixed, 0.0)


def _ranks_of_an_engine(run: Run, workers: int) -> float:
    """Return over how many ranks one engine spreads its weights; each of them holds a part of a tensor that is sent."""
    replicas = sum(REQUEST in process.passed for process in run.seen.processes)
    if not replicas:
        raise UnjudgeableError(
            "no engine recorded a request, so over how many ranks one spreads its weights is unknown"
        )
    return max(workers / replicas, 1.0)
