"""The weight sync gathers one parameter at a time."""

from __future__ import annotations

from statistics import fmean

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run
from rltrace.analysis.findings.syncs import per_step, seconds_of, slowest
from rltrace.analysis.weight_sync import GATHER

NAME = "one_by_one"

NEARLY_ONE = 1.1
"""Tensors per gather below which parameters are gathered one at a time. verl 0.9.1 has 399 for 400
(examples/recordings/verl_8b_4gpu.zip); the reference run, which gathers by bucket, 429 for 31."""

FEWEST_GATHERS = 32
"""With fewer gathers there are about as many buckets as tensors, whatever the program does."""

SETTINGS = (Setting("your program", "gather all shards of a layer, or of a bucket, at once"),)


def judge(run: Run) -> list[Finding]:
    """Price the gathers of a sync if there are as many as tensors."""
    syncs = run.steady_syncs()
    having = [sync for of_step in syncs.values() for sync in of_step if GATHER in sync.stages]
    if not having:
        raise UnjudgeableError(f"the weight sync has no stage `{GATHER}`")
    some = max(having, key=lambda sync: sync.stages[GATHER].spans)
    gathers = some.stages[GATHER].spans
    if gathers < FEWEST_GATHERS or some.tensors > NEARLY_ONE * gathers:
        return []
    seconds = fmean(slowest(syncs, seconds_of(GATHER)))
    rate = some.stages[GATHER].gigabytes_per_second
    return [
        run.finding(
            NAME,
            f"The weight sync gathers {gathers} parameters one at a time, in {as_text(seconds)}",
            [f"{gathers} gathers for {some.tensors} tensors" + (f", at {rate:.0f} GB/s" if rate else "")],
            per_step=per_step(run, syncs, seconds_of(GATHER)),
            less_because="the bytes have to be gathered in any case. Fewer gathers save latency: a sync of 15 GiB took "
            "85 instead of 151 ms (docs/measurements/weight_sync.md)",
            basis="modelled",
            figures={"gathers": float(gathers)},
            phases=["weight_sync"],
            settings=SETTINGS,
        )
    ]
