"""A row of the ledger is larger after each sleep."""

from __future__ import annotations

from rltrace.analysis.findings.amounts import bytes_as_text
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run
from rltrace.analysis.ledger import ALLOWED_CPU_BYTES, ALLOWED_GPU_BYTES, UNACCOUNTED
from rltrace.analysis.transactions import CACHES, Leak
from rltrace.events import SLEEP

NAME = "memory_grows"

NO_OWNERS = CACHES | {UNACCOUNTED}
"""Rows that fill as a run meets new sizes, or that hold what no other row does."""

SETTINGS = (Setting("your program", "`rltrace exec --allocations 3,30` says who allocates, in two steps far apart"),)


def judge(run: Run) -> list[Finding]:
    """Name the owners that grow by more than the ledger's error."""
    if not run.summary.sleeps:
        raise UnjudgeableError("no engine sleeps, and growth is judged from sleep to sleep")
    worst: dict[str, Leak] = {}
    for leak in run.summary.leaks:
        grown = leak.bytes_per_sleep * leak.sleeps
        if leak.owner in NO_OWNERS or grown < _allowed_bytes(run, leak):
            continue
        if leak.owner not in worst or leak.bytes_per_sleep > worst[leak.owner].bytes_per_sleep:
            worst[leak.owner] = leak
    return [_finding(run, leak) for leak in worst.values()]


def _allowed_bytes(run: Run, leak: Leak) -> int:
    """Return how many bytes of its device may be unaccounted at a phase boundary."""
    device = next((device.device for device in run.summary.memory if device.lane == leak.lane), None)
    return ALLOWED_CPU_BYTES if device is None or device.startswith("cpu") else ALLOWED_GPU_BYTES


def _finding(run: Run, leak: Leak) -> Finding:
    return run.finding(
        NAME,
        f"{leak.owner} grows by {bytes_as_text(leak.bytes_per_sleep)} from each sleep to the next on {leak.lane}",
        [f"after each of {leak.sleeps} sleeps in a row; it holds {bytes_as_text(leak.last_bytes)} after the last one"],
        size_bytes=leak.bytes_per_sleep,
        less_because="",
        figures={"last_bytes": float(leak.last_bytes)},
        ranks=[] if leak.rank is None else [leak.rank],
        phases=[SLEEP],
        about=[leak.owner],
        settings=SETTINGS,
    )
