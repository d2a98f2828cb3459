"""An engine leaves bytes on the card while it sleeps."""

from __future__ import annotations

from rltrace.analysis.findings.amounts import bytes_as_text
from rltrace.analysis.findings.finding import Finding, Moment, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run
from rltrace.analysis.transactions import Transaction
from rltrace.events import SLEEP

NAME = "sleep_leaves"

LEAVES = ("freed nothing", "freed less than it said", "partly awake", "left bytes behind")
"""Verdicts about sleeps that leave bytes behind; their limits are in `rltrace/analysis/transactions.py`."""

SETTINGS = (
    Setting("vLLM", "sleep(level=2): it gives back the weights and the KV cache"),
    Setting("PyTorch", "PYTORCH_CUDA_ALLOC_CONF without expandable_segments in the engine's processes"),
)


def judge(run: Run) -> list[Finding]:
    """Say how much the worst sleep left."""
    sleeps = [sleep for sleep in run.summary.sleeps if sleep.name == SLEEP]
    if not sleeps:
        raise UnjudgeableError("no sleep of an engine was recorded")
    bad = [sleep for sleep in sleeps if sleep.verdict in LEAVES]
    if not bad:
        return []
    worst = max(bad, key=_left_bytes)
    end = worst.at_seconds + worst.seconds
    return [
        run.finding(
            NAME,
            f"{worst.lane}'s engine leaves {bytes_as_text(_left_bytes(worst))} on the card while it sleeps",
            [f"{worst.verdict}: {worst.reason}", f"so in {len(bad)} of {len(sleeps)} sleeps"],
            size_bytes=_left_bytes(worst),
            less_because="",
            ranks=sorted({sleep.rank for sleep in bad if sleep.rank is not None}),
            phases=[SLEEP],
            settings=SETTINGS,
            moment=Moment(
                step=worst.step,
                rank=worst.rank,
                start_seconds=worst.at_seconds,
                end_seconds=end,
                command=run.view("--time", f"{max(worst.at_seconds - 1, 0):.0f}:{end + 1:.0f}"),
            ),
        )
    ]


def _left_bytes(sleep: Transaction) -> int:
    """Return the bytes that stayed: those that the engine still holds, or those that the device did not get back."""
    held = sum(size for owner, size in sleep.left_bytes.items() if owner in ("rollout.weights", "rollout.kv_cache"))
    expected = max(sum(sleep.expected_bytes.values()), sum(sleep.moved_bytes.values()))
    missing = 0 if sleep.changed_bytes is None else max(expected - sleep.changed_bytes, 0)
    return max(held, missing)
