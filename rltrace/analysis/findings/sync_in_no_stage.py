"""A part of the weight sync is in none of its stages."""

from __future__ import annotations

from statistics import fmean

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run
from rltrace.analysis.findings.syncs import length, per_step, slowest
from rltrace.analysis.weight_sync import RankSync

NAME = "sync_in_no_stage"

SETTINGS = (Setting("your program", "look into this phase with py-spy or torch.profiler, in one step"),)


def judge(run: Run) -> list[Finding]:
    """Price the time of a sync in which no stage is open."""
    syncs = run.steady_syncs()
    if not any(sync.stages for of_step in syncs.values() for sync in of_step):
        raise UnjudgeableError("the weight sync was recorded without its stages")
    rest = fmean(slowest(syncs, _rest))
    return [
        run.finding(
            NAME,
            f"{as_text(rest)} of a weight sync of {as_text(length(syncs))} are in none of its stages",
            ["neither gathered, nor packed, sent, waited for or loaded: copies into buckets, waits for the GPU, calls"],
            per_step=per_step(run, syncs, _rest),
            less_because="part of it is work that has no span",
            basis="modelled",
            phases=["weight_sync"],
            settings=SETTINGS,
        )
    ]


def _rest(sync: RankSync) -> float:
    return sync.rest_seconds
