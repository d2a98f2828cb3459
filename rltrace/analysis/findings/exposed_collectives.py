"""Collectives run while their GPU computes nothing."""

from __future__ import annotations

from rltrace.analysis.findings.amounts import as_text, between_as_text
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run
from rltrace.analysis.gpu_work import COLLECTIVES

NAME = "exposed_collectives"

SETTINGS = (
    Setting("PyTorch", "fully_shard(reshard_after_forward=False), or set_modules_to_forward_prefetch"),
    Setting("verl", "actor_rollout_ref.actor.fsdp_config.forward_prefetch=True"),
)


def judge(run: Run) -> list[Finding]:
    """Price what is exposed for certain, on the rank with the least of it; others have waits for a rank in theirs."""
    if not run.summary.gpu_work:
        raise UnjudgeableError("no GPU was timed")
    whole = [row for row in run.summary.gpu_work if row.work == COLLECTIVES and row.phase is None]
    known = [row for row in whole if row.least_exposed_seconds is not None]
    if not known:
        missing = "layers were not timed (RLTRACE_CUDA_TIME=layers)" if whole else "no collective of FSDP was timed"
        raise UnjudgeableError(f"{missing}, so what runs beside a collective is unknown")
    least = min(known, key=lambda row: row.least_exposed_seconds or 0.0)
    by_phase = {
        row.phase: row.least_exposed_seconds or 0.0
        for row in run.summary.gpu_work
        if row.work == COLLECTIVES and row.lane == least.lane and row.phase is not None
    }
    where = max(by_phase, key=lambda name: by_phase[name], default=None)
    seconds, most = least.least_exposed_seconds or 0.0, least.most_exposed_seconds or 0.0
    return [
        run.finding(
            NAME,
            f"For {as_text(seconds)} of a step a GPU does nothing but exchange shards"
            + (f", most in {where}" if where else ""),
            [
                f"{least.lane}, which waits least: {as_text(least.seconds)} of collectives, of which "
                f"{between_as_text(seconds, most)} are exposed"
            ],
            mean=seconds,
            bound=most,
            less_because="the first gather and the last reduce-scatter of a pass have nothing beside them",
            ranks=[] if least.rank is None else [least.rank],
            phases=[] if where is None else [where],
            about=(),
            settings=SETTINGS,
        )
    ]
