"""The sender of the weights waits for the receiver: until it begins, takes a bucket, or is done."""

from __future__ import annotations

from statistics import fmean

from rltrace.analysis.findings.amounts import as_text, bytes_as_text
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.programs import EXAMPLE
from rltrace.analysis.findings.run import Run
from rltrace.analysis.findings.syncs import length, per_step, seconds_of, slowest

NAME = "sender_waits"
WAIT = "weight_sync.wait"

SETTINGS = (
    Setting(
        "verl",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes: larger buckets",
        since="0.7.0",
    ),
    Setting(
        "verl",
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes: larger buckets",
        since="0.5.0",
        until="0.7.0",
    ),
    Setting(EXAMPLE, "rollout.bucket_megabytes: larger"),
    Setting("your program", "two buckets in turns: the sender fills one while the receiver empties the other"),
)


def judge(run: Run) -> list[Finding]:
    """Price the stage in which the sender waits, on the rank that waits longest."""
    syncs = run.steady_syncs()
    having = [sync for of_step in syncs.values() for sync in of_step if WAIT in sync.stages]
    if not having:
        raise UnjudgeableError(f"the weight sync has no stage `{WAIT}`")
    seconds = fmean(slowest(syncs, seconds_of(WAIT)))
    buckets = max(having[-1].buckets, 1)
    bucket_bytes = having[-1].bytes / buckets
    return [
        run.finding(
            NAME,
            f"The sender waits for the receiver for {as_text(seconds)} of a weight sync of {as_text(length(syncs))}",
            [f"{buckets} buckets of {bytes_as_text(bucket_bytes)} in the mean; on the rank that waits longest"],
            per_step=per_step(run, syncs, seconds_of(WAIT)),
            less_because="the receiver loads meanwhile, which has to be done; larger buckets take more of the card, "
            "and do not shorten the waits for the receiver to begin and to be done",
            figures={"buckets": float(buckets), "bucket_bytes": bucket_bytes},
            phases=["weight_sync"],
            settings=SETTINGS,
        )
    ]
