"""The most that a device's allocators had given out in a step of which every allocation was kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from rltrace.analysis.lanes import Lane, order
from rltrace.analysis.memory import DeviceMemory
from rltrace.analysis.observations import Balances, Observations, Seen
from rltrace.analysis.steps import StepWindows
from rltrace.events import OWNERS, UNATTRIBUTED, Span

NOT_ALLOCATED = frozenset(
    {"allocator.cached", "cuda.context", "nccl", "library.kernels", "interpreter", "driver.reserved"}
    | {"unexplained", "free"}
)
"""Owners of what no process's allocator has given out."""


class AllocationPeak(msgspec.Struct, frozen=True, kw_only=True):
    """An exact peak, over all processes of a device that kept their allocations."""

    lane: str
    rank: int | None
    host: str | None
    device: str | None
    step: int | None
    """None: it was kept outside of any step."""
    peak_bytes: int
    peak_at_seconds: float
    """After the Recording's first instant."""
    at_peak_bytes: dict[str, int]
    """By owner."""
    sampled_peak_bytes: int | None
    """What the same owners held together at the step's sampled peak; None where nothing was sampled."""
    error_seconds: float
    """A time is that far off at most."""
    lost: int
    """Entries of the allocators' histories that are missing."""


def allocation_peaks(seen: Observations, windows: StepWindows, memory: Sequence[DeviceMemory]) -> list[AllocationPeak]:
    """Every device and step with all allocations, by device."""
    kept: dict[tuple[Lane, int | None], list[tuple[Seen, Span]]] = {}
    for process in seen.processes:
        for span in process.allocations_kept:
            kept.setdefault((process.lane, _step_of(span, windows.of(process.lane))), []).append((process, span))
    sampled = {
        (device.lane, moment.step): sum(size for owner, size in moment.bytes.items() if owner not in NOT_ALLOCATED)
        for device in memory
        for moment in device.steps
    }
    return [
        _peak(lane, step, parts, sampled.get((lane.name, step)), seen.start_ns)
        for (lane, step), parts in sorted(kept.items(), key=lambda item: (order(item[0][0]), item[0][1] or 0))
    ]


def _step_of(span: Span, windows: StepWindows) -> int | None:
    """The step that a span has most of."""
    shared = [
        (min(span.end_ns or span.start_ns, end_ns) - max(span.start_ns, start_ns), number)
        for (start_ns, end_ns), number in zip(windows.windows[1:].tolist(), windows.numbers[1:], strict=True)
    ]
    most_ns, number = max(shared, key=lambda pair: pair[0], default=(0, None))
    return number if most_ns > 0 else None


def _peak(
    lane: Lane, step: int | None, parts: list[tuple[Seen, Span]], sampled_bytes: int | None, start_ns: int
) -> AllocationPeak:
    changes = [change for process, span in parts for change in _changes(process.balances, span)]
    changes.sort(key=lambda change: change[0])  # stable: an allocator's own order counts where times are equal
    sizes = np.cumsum([size for _, _, size in changes])
    at = int(np.argmax(sizes))
    held: Counter[str] = Counter()
    for _, owner, size in changes[: at + 1]:
        held[owner] += size
    return AllocationPeak(
        lane=lane.name,
        rank=lane.rank,
        host=lane.host,
        device=lane.device,
        step=step,
        peak_bytes=int(sizes[at]),
        peak_at_seconds=(changes[at][0] - start_ns) / 1e9,
        at_peak_bytes={owner: held[owner] for owner in OWNERS if held[owner]},
        sampled_peak_bytes=sampled_bytes,
        error_seconds=max(span.args.get("error_ns", 0) for _, span in parts) / 1e9,
        lost=sum(span.args.get("lost", 0) for _, span in parts),
    )


def _changes(balances: Balances, span: Span) -> Iterator[tuple[int, str, int]]:
    """When an owner's bytes changed, whose and by how much, where a span has them; they begin and end at 0."""
    held: Counter[str] = Counter()
    yield span.start_ns, UNATTRIBUTED, 0
    for ts_ns, place, value in zip(balances.times_ns, balances.places, balances.values, strict=True):
        if span.start_ns <= ts_ns <= (span.end_ns or ts_ns):
            owner, size = balances.owners[place], int(value)
            yield ts_ns, owner, size - held[owner]
            held[owner] = size
