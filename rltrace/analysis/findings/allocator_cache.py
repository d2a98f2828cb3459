"""Torch's cache is in the way of an engine that wakes up, or emptying it takes time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.findings.amounts import as_text, bytes_as_text
from rltrace.analysis.findings.capacity import NOT_MEASURED, capacity_bytes, gpus
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run, rows_of
from rltrace.analysis.intervals import EMPTY
from rltrace.analysis.lanes import Lane
from rltrace.analysis.memory import CACHED, DeviceMemory
from rltrace.analysis.moments import Boundaries
from rltrace.analysis.observations import once
from rltrace.events import EMPTY_CACHE, SLEEP, WAKE_UPS

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
        f"Emptying torch's cache takes {as_text(price.mean())} of a step" + (f", in {where[0]}" if where else ""),
        [f"most on {most.name}; to map the memory again where it is needed next is not in these seconds"],
        per_step=price,
        less_because="an engine beside the trainer needs the memory, and gets it in no other way",
        ranks=[] if most.rank is None else [most.rank],
        phases=where,
        about=(),
        settings=[LARGER_SEGMENTS, ONCE],
    )


class CachedAtWakeUp(NamedTuple):
    """What torch's cache holds of a card while an engine takes its memory."""

    share: float
    """Share of the card."""
    bytes: int
    phase: str
    step: int
    device: DeviceMemory
    was_emptied: bool
    """Whether it had been emptied since the trainer last computed: then these are fragments."""


def _in_the_way(run: Run) -> Iterator[Finding]:
    """Yield what the cache holds while an engine takes its memory, on the device that has most of it."""
    worst = next((one for one in in_the_way(run) if not one.was_emptied), None)
    if worst is None or worst.share < IN_THE_WAY:
        return
    yield run.finding(
        NAME,
        f"Torch's cache keeps {bytes_as_text(worst.bytes)} of {worst.device.lane}'s card while the engine wakes",
        [f"{worst.phase} of step {worst.step}: {worst.share:.0%} of the card, which nobody uses"],
        size_bytes=worst.bytes,
        less_because="",
        ranks=[] if worst.device.rank is None else [worst.device.rank],
        phases=[worst.phase],
        about=(),
        settings=[ONCE, LARGER_SEGMENTS],
    )


def has_wake_ups(run: Run) -> bool:
    """Return whether it is known what a GPU holds when an engine wakes."""
    return any(len(_wake_ups(device)) for device in gpus(run))


@once
def in_the_way(run: Run) -> list[CachedAtWakeUp]:
    """Return all wake-ups in steps, those with the fullest caches first."""
    found = [one for device in gpus(run) for one in _of_device(run, device)]
    return sorted(found, key=lambda one: -one.share)


def _of_device(run: Run, device: DeviceMemory) -> Iterator[CachedAtWakeUp]:
    lane = next((lane for lane in run.members if lane.name == device.lane), None)
    edges, card_bytes = _wake_ups(device), capacity_bytes(device)
    at_ns = run.seen.start_ns + np.rint(edges.numbers["at_seconds"] * 1e9).astype(np.int64)
    were_emptied = np.zeros(len(edges), np.bool_) if lane is None else _just_emptied(run, lane, at_ns)
    columns = (edges.held(CACHED).tolist(), edges.phase.rows(), edges.step.rows(), were_emptied.tolist())
    for size, phase, step, was_emptied in zip(*columns, strict=True):
        yield CachedAtWakeUp(size / card_bytes, size, phase, step, device, was_emptied)


def _wake_ups(device: DeviceMemory) -> Boundaries:
    """Return how each wake-up in a step began."""
    edges = device.boundaries
    return edges.part(~edges.numbers["is_end"] & edges.phase.are_in(WAKE_UPS) & ~edges.step.are_in([None]))


def _just_emptied(run: Run, lane: Lane, at_ns: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether no phase has begun since the cache of a lane was last emptied before each instant, apart from the
    engine's own."""
    ends_ns = np.sort(rows_of(run.members[lane], EMPTY_CACHE, run)[:, 1])
    began = [rows[:, 0] for name, rows in run.phases.get(lane, {}).items() if name not in (*WAKE_UPS, SLEEP)]
    began_ns = np.sort(np.concatenate([EMPTY[:, 0], *began]))
    behind = np.searchsorted(ends_ns, at_ns, side="right")
    last_ns = np.concatenate([[0], ends_ns])[behind]
    none_since = np.searchsorted(began_ns, last_ns, side="right") >= np.searchsorted(began_ns, at_ns)
    return (behind > 0) & none_since
