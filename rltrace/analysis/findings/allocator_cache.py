"""Torch's cache is in the way of an engine that wakes up, or emptying it takes time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rltrace.analysis.findings.capacity import NOT_MEASURED, capacity_bytes, gpus
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run, rows_of
from rltrace.analysis.memory import CACHED
from rltrace.events import EMPTY_CACHE, WAKE_UPS

NAME = "allocator_cache"

IN_THE_WAY = 0.05
"""Share of a card that the cache must hold when an engine wakes up. vLLM leaves 8 % of a card to what it does not count
(`gpu_memory_utilization` is 0.92); a cache of this size takes most of that."""

LARGER_SEGMENTS = Setting("PyTorch", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the trainer: fewer segments")
ONCE = Setting("your program", "torch.cuda.empty_cache() once, just before the engine wakes")


def judge(run: Run) -> list[Finding]:
    """Price the time that emptying takes, and say where the cache is in the way."""
    by_lane = {lane: rows_of(members, EMPTY_CACHE, run) for lane, members in run.members.items()}
    if not list(gpus(run)) and not any(map(len, by_lane.values())):
        raise UnjudgeableError(NOT_MEASURED)
    return [*_in_the_way(run), *_emptied(run)]


def _emptied(run: Run) -> Iterator[Finding]:
    by_lane = {lane: rows_of(members, EMPTY_CACHE, run) for lane, members in run.members.items()}
    seconds = {lane: run.seconds_in(rows) for lane, rows in by_lane.items() if len(rows)}
    if not seconds:
        return
    price = np.max(list(seconds.values()), axis=0)
    most = max(seconds, key=lambda lane: float(seconds[lane].sum()))
    where = run.most_in(most, by_lane[most])
    yield run.finding(
        NAME,
        f"Emptying torch's cache takes {price.mean():.2f} s of a step" + (f", in {where[0]}" if where else ""),
        [f"most on {most.name}; to map the memory again where it is needed next is not in these seconds"],
        per_step=price,
        less_because="an engine beside the trainer needs the memory, and gets it in no other way",
        ranks=[] if most.rank is None else [most.rank],
        phases=where,
        settings=[LARGER_SEGMENTS, ONCE],
    )


def _in_the_way(run: Run) -> Iterator[Finding]:
    """Yield what the cache holds while an engine takes its memory, on the device that has most of it."""
    found = [
        (edge.bytes.get(CACHED, 0) / capacity_bytes(device), edge, device)
        for device in gpus(run)
        for edge in device.boundaries
        if edge.phase in WAKE_UPS and edge.side == "begin" and edge.step is not None
    ]
    share, edge, device = max(found, key=lambda item: item[0], default=(0.0, None, None))
    if edge is None or device is None or share < IN_THE_WAY:
        return
    size = edge.bytes[CACHED]
    yield run.finding(
        NAME,
        f"Torch's cache keeps {size / 1e9:.1f} GB of {device.lane}'s card while the engine wakes",
        [f"{edge.phase} of step {edge.step}: {share:.0%} of the card, which nobody uses"],
        size_bytes=size,
        less_because="",
        ranks=[] if device.rank is None else [device.rank],
        phases=[] if edge.phase is None else [edge.phase],
        settings=[ONCE, LARGER_SEGMENTS],
    )
