"""What a device's allocators had handed out in a step whose every allocation was kept, and which processes kept
none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.lanes import Lane, order
from rltrace.analysis.memory import DeviceMemory
from rltrace.analysis.moments import Moment
from rltrace.analysis.observations import Observations
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.samples import Balances, Samples
from rltrace.analysis.steps import StepWindows, number_of
from rltrace.events import ALLOCATIONS_RESERVED, OWNERS, UNATTRIBUTED, Span, allocations_of

NOT_ALLOCATED = frozenset(
    {"allocator.cached", "cuda.context", "nccl", "library.kernels", "interpreter", "driver.reserved"}
    | {"unaccounted", "free"}
)
"""Owners of memory that no process's allocator has handed out."""


GONE = "its process ended before they were written; choose a step that is followed by another one"
BEHIND = "later allocations pushed them out of the history before this process reached its next phase"


class AllocationPeak(msgspec.Struct, frozen=True, kw_only=True):
    """An exact peak, over all processes of a device that kept their allocations."""

    lane: str
    """The rank's lane."""
    rank: int | None
    """The rank; None if it has none."""
    host: str | None
    """Host of the device."""
    device: str | None
    """Uuid of the device."""
    step: int | None
    """Number of the step; None if it was kept outside of any step."""
    peak_bytes: int
    """The most that torch's and the engine's allocators had handed out in the step, over all processes: exact, in bytes
    as asked for."""
    peak_at_seconds: float
    """When that was, counted from the beginning of the Recording."""
    at_peak_bytes: dict[str, int]
    """By owner, at that moment."""
    reserved_peak_bytes: int | None
    """The most that those allocators had from the driver, caches included; None if no process said so."""
    sampled_peak_bytes: int | None
    """What the same owners held at the step's sampled peak; None if nothing was sampled."""
    error_seconds: float
    """The largest possible error of these times."""
    late_seconds: float
    """How long after the beginning of the step the last process began to keep its allocations; earlier ones are
    missing."""
    lost: int
    """Allocations and frees that are missing in the allocators' histories."""


class AllocationsMissed(msgspec.Struct, frozen=True, kw_only=True):
    """Processes that were to keep a step's allocations and did not."""

    step: int
    """Number of the step."""
    processes: list[str]
    """Names of the processes that kept none; empty if no such step began."""
    reason: str
    """Why."""


class AllocationTimeline(NamedTuple):
    """What the owners of a device had after each change, over all of its processes that kept their allocations."""

    lane: Lane
    step: int | None
    window: tuple[int, int] | None
    """When that step began and ended; None if it was kept outside of any step."""
    is_over: bool
    """Whether the step is over and was not aborted."""
    keys: frozenset[str]
    """Keys of those processes."""
    spans: list[Span]
    """Spans in which the allocations were kept."""
    times_ns: NDArray[np.int64]
    """Times of allocations and frees, and of memory that came from the driver or went back."""
    bytes_by_owner: dict[str, NDArray[np.int64]]
    """Bytes by owner at each of those times, as asked for, so without the rounding of blocks."""
    reserved_bytes: NDArray[np.int64] | None
    """What their allocators had from the driver; None in an older Recording that does not say."""

    def known(self) -> tuple[int, int]:
        """From when to when all of them kept their allocations."""
        return max(span.start_ns for span in self.spans), min(span.end_ns or span.start_ns for span in self.spans)

    def allocated_bytes(self) -> NDArray[np.int64]:
        """Return the bytes of all owners."""
        total: NDArray[np.int64] = sum(self.bytes_by_owner.values(), np.zeros(len(self.times_ns), np.int64))
        return total


def allocation_timelines(seen: Observations, windows: StepWindows) -> Iterator[AllocationTimeline]:
    """Return every device and step with all allocations, by device."""
    kept: dict[tuple[Lane, int], list[tuple[Seen, Span]]] = {}
    for process in seen.processes:
        for span in process.allocations_kept:
            place = _place_of(span, windows.of(process.lane))
            if place is not None:
                kept.setdefault((process.lane, place), []).append((process, span))
    for (lane, place), parts in sorted(kept.items(), key=lambda item: (order(item[0][0]), item[0][1])):
        yield _timeline(lane, place, windows.of(lane), parts)


def allocation_peaks(seen: Observations, windows: StepWindows, memory: Sequence[DeviceMemory]) -> list[AllocationPeak]:
    """Return the peak of each timeline."""
    sampled = {(device.lane, moment.step): moment for device in memory for moment in device.steps}
    return [
        _peak(kept, _allocated_bytes(sampled.get((kept.lane.name, kept.step))), seen.start_ns)
        for kept in allocation_timelines(seen, windows)
    ]


def _allocated_bytes(moment: Moment | None) -> int | None:
    """Return what allocators had handed out at a moment; None where there is none."""
    if moment is None:
        return None
    return sum(size for owner, size in moment.bytes.items() if owner not in NOT_ALLOCATED)


OUTSIDE = 0
"""The place of what was kept outside of any step; a step has the place of its window, from 1."""


def _place_of(span: Span, windows: StepWindows) -> int | None:
    """Return the step that a span covers most of; if it was kept for a numbered step, one of that number.

    None if it was kept for a step and covers nothing of it: all that its ring still had came after the step.
    """
    wanted = span.args.get("step")
    is_wanted = wanted in windows.numbers[1:]
    shared = [
        (_shared_ns(span, start_ns, end_ns), place)
        for place, (start_ns, end_ns) in enumerate(windows.windows.tolist())
        if place != OUTSIDE and (not is_wanted or windows.numbers[place] == wanted)
    ]
    most_ns, place = max(shared, key=lambda pair: pair[0], default=(0, OUTSIDE))
    if most_ns > 0:
        return place
    return None if is_wanted else OUTSIDE


def _shared_ns(span: Span, start_ns: int, end_ns: int) -> int:
    """Return how long a span and a step overlap; a negative number is the distance between them."""
    return min(span.end_ns or span.start_ns, end_ns) - max(span.start_ns, start_ns)


def _timeline(lane: Lane, place: int, windows: StepWindows, parts: list[tuple[Seen, Span]]) -> AllocationTimeline:
    start_ns, end_ns = windows.windows[place].tolist()
    changes = [change for process, span in parts for change in _changes(process, span)]
    changes.sort(key=lambda change: change[0])  # stable: an allocator's own order counts where times are equal
    names = np.array([name for _, name, _ in changes])
    sizes = np.array([size for _, _, size in changes], np.int64)
    levels = {name: np.cumsum(np.where(names == name, sizes, 0)) for name in dict.fromkeys(names.tolist())}
    reserved = levels.pop(ALLOCATIONS_RESERVED, None)
    return AllocationTimeline(
        lane=lane,
        step=windows.numbers[place],
        window=None if place == OUTSIDE else (start_ns, end_ns),
        is_over=place != OUTSIDE and windows.finished[place],
        keys=frozenset(process.process.key for process, _ in parts),
        spans=[span for _, span in parts],
        times_ns=np.array([ts_ns for ts_ns, _, _ in changes], np.int64),
        bytes_by_owner={owner: levels[owner] for owner in OWNERS if owner in levels},
        reserved_bytes=reserved if all(process.reserved.values for process, _ in parts) else None,
    )


def _peak(kept: AllocationTimeline, sampled_bytes: int | None, start_ns: int) -> AllocationPeak:
    inside = _inside(kept.times_ns, kept.window)
    sizes = kept.allocated_bytes()
    at = inside.start + int(np.argmax(sizes[inside]))
    at_ns = int(kept.times_ns[at])
    if kept.window is not None:
        at_ns = max(at_ns, kept.window[0])
    return AllocationPeak(
        lane=kept.lane.name,
        rank=kept.lane.rank,
        host=kept.lane.host,
        device=kept.lane.device,
        step=kept.step,
        peak_bytes=int(sizes[at]),
        peak_at_seconds=(at_ns - start_ns) / 1e9,
        at_peak_bytes={owner: int(level[at]) for owner, level in kept.bytes_by_owner.items() if level[at]},
        reserved_peak_bytes=None if kept.reserved_bytes is None else int(kept.reserved_bytes[inside].max()),
        sampled_peak_bytes=sampled_bytes,
        error_seconds=max(span.args.get("error_ns", 0) for span in kept.spans) / 1e9,
        late_seconds=0.0 if kept.window is None else max(0, kept.known()[0] - kept.window[0]) / 1e9,
        lost=sum(span.args.get("lost", 0) for span in kept.spans),
    )


def _inside(times_ns: NDArray[np.int64], window: tuple[int, int] | None) -> slice:
    """Return where the levels of a step are; an engine keeps its allocations until its first phase after the step."""
    if window is None:
        return slice(0, len(times_ns))
    first = max(0, int(np.searchsorted(times_ns, window[0], side="right")) - 1)  # the level that the step begins with
    return slice(first, max(first + 1, int(np.searchsorted(times_ns, window[1]))))


# ---- who kept none ----------------------------------------------------------------------------------------------


class _ChosenStep:
    """When a chosen step ran, by any process's spans, and on which hosts."""

    def __init__(self, step: int, seen: Observations) -> None:
        self.step = step
        spans = [
            (process.process.host, span)
            for process in seen.processes
            for place, span in enumerate(process.steps)
            if number_of(span, place) == step
        ]
        self.hosts = {host for host, _ in spans}
        self.start_ns = min((span.start_ns for _, span in spans), default=None)
        self.end_ns = max((span.end_ns or seen.end_ns for _, span in spans), default=0)


def allocations_missed(seen: Observations) -> list[AllocationsMissed]:
    """Return chosen steps that never began, and processes that kept none of one that did; one item per step and
    reason."""
    chosen = sorted({step for process in seen.processes for step in process.process.chosen_steps})
    return [missed for number in chosen for missed in _missed(_ChosenStep(number, seen), seen)]


def _missed(step: _ChosenStep, seen: Observations) -> Iterator[AllocationsMissed]:
    if step.start_ns is None:
        yield AllocationsMissed(step=step.step, processes=[], reason=f"no such step has begun: {_steps_there(seen)}")
        return
    alike: dict[str, list[str]] = {}
    for process in seen.processes:
        if (reason := _why_none(process, step)) is not None:
            alike.setdefault(reason, []).append(process.process.name)
    for reason, names in alike.items():
        yield AllocationsMissed(step=step.step, processes=names, reason=reason)


def _steps_there(seen: Observations) -> str:
    there = {number_of(span, place) for process in seen.processes for place, span in enumerate(process.steps)}
    return f"the steps of this Recording are {min(there)} to {max(there)}" if there else "no step is marked"


def _why_none(process: Seen, step: _ChosenStep) -> str | None:
    """Return why a process has no allocations of a step; None if it has them, or has nothing to do with the step."""
    said = process.process
    kept = [span for span in process.allocations_kept if _is_of(span, step)]
    assert step.start_ns is not None
    if kept and all(_shared_ns(span, step.start_ns, step.end_ns) <= 0 for span in kept):
        return BEHIND
    if step.step not in said.chosen_steps or kept:
        return None
    if (reason := said.unavailable.get(allocations_of(step.step))) is not None:
        return reason
    if step.step in said.allocations_begun:
        return "they are not written yet" if said.is_alive else GONE
    if not process.owners or process.first_ns > step.end_ns or process.last_ns < step.start_ns:
        return None
    if said.host not in step.hosts:
        return f"{said.host} did not hear in time that the step had begun"
    if not said.is_alive:
        return "its process ended before it had looked"
    return "the process has had no phase boundary in this step"


def _is_of(span: Span, step: _ChosenStep) -> bool:
    """Return whether a span belongs to a step: by the number it names, else by its time, since a program may keep
    allocations itself."""
    if "step" in span.args:
        return bool(span.args["step"] == step.step)
    return step.start_ns is not None and _shared_ns(span, step.start_ns, step.end_ns) > 0


def _changes(process: Seen, span: Span) -> Iterator[tuple[int, str, int]]:
    """Yield when an owner's bytes (or the reserved bytes) changed within a span, which and by how much; it starts and
    ends at 0."""
    held: Counter[str] = Counter()
    yield span.start_ns, UNATTRIBUTED, 0
    for ts_ns, name, value in (*_balances(process.balances), *_reserved(process.reserved)):
        if span.start_ns <= ts_ns <= (span.end_ns or ts_ns):
            yield ts_ns, name, int(value) - held[name]
            held[name] = int(value)


def _balances(balances: Balances) -> Iterator[tuple[int, str, float]]:
    for ts_ns, place, value in zip(balances.times_ns, balances.places, balances.values, strict=True):
        yield ts_ns, balances.owners[place], value


def _reserved(samples: Samples) -> Iterator[tuple[int, str, float]]:
    for ts_ns, value in zip(samples.times_ns, samples.values, strict=True):
        yield ts_ns, ALLOCATIONS_RESERVED, value
