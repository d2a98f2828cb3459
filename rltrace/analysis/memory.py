"""Who held a device's bytes: at its peak, at each step's and each phase's peak, and at every phase boundary."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain
from math import isfinite
from typing import NamedTuple

import msgspec
import numpy as np

from rltrace.analysis.allocated_peaks import AllocatedPeak, AllocatedPeaks, Peak, of_steps
from rltrace.analysis.intervals import holding
from rltrace.analysis.lanes import Lane, order
from rltrace.analysis.ledger import (
    ALLOWED_CPU_BYTES,
    ALLOWED_GPU_BYTES,
    ALLOWED_SHARE,
    CONTEXT,
    FORMER_NAMES,
    FREE,
    UNACCOUNTED,
    Ledger,
    ledgers,
    most_held,
)
from rltrace.analysis.looks import CONSISTENT_NS, DRIVER_RESERVED
from rltrace.analysis.observations import Observations
from rltrace.analysis.phase_times import PhaseTimes
from rltrace.analysis.phases import ORDER
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.steps import StepWindows
from rltrace.analysis.used_memory import used_memory
from rltrace.events import OWNERS, UNATTRIBUTED, Span

CACHED = "allocator.cached"


class OwnerPeak(msgspec.Struct, frozen=True):
    """The most that one owner held."""

    bytes: int
    """The most that the owner held."""
    at_seconds: float
    """When, counted from the beginning of the Recording."""
    phase: str | None
    """The rank's phase then; None outside of phases."""


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Who held a device's bytes at one moment."""

    step: int | None
    """Number of the step; None outside of steps."""
    phase: str | None
    """The rank's phase; None outside of phases."""
    at_seconds: float
    """When, counted from the beginning of the Recording."""
    used_bytes: int
    """The device's total if it was read, else the sum of the owners."""
    bytes: dict[str, int]
    """By owner; without `free` they add up to `used_bytes`."""
    apart_seconds: float | None
    """How far apart the times lie during which the samples of its processes hold; 0 if they intersect. In a Recording
    without stamps the age of the oldest sample. None if nobody read the device's total."""
    is_consistent: bool | None
    """Whether the moment is consistent: these times intersect, or are at most 5 ms apart. In a Recording without stamps
    an older sample may hold too, if nothing has moved since. None if nobody read the device's total."""


class Boundary(Moment, frozen=True, kw_only=True):
    """A phase boundary: a phase's beginning or end, and the moment nearest to it."""

    side: str
    """`begin` or `end` of the phase."""
    away_seconds: float
    """From the boundary to the moment nearest to it; if more than 5 ms, the boundary is not consistent."""


class Residual(msgspec.Struct, frozen=True, kw_only=True):
    """How many of a device's bytes have no owner, over its phase boundaries."""

    boundaries: int
    """How many phase boundaries there are."""
    inconsistent_boundaries: int
    """How many of them are not consistent, and so not judged."""
    boundaries_over_limit: int
    """How many consistent ones exceed the limit with their unaccounted and unattributed bytes."""
    worst_bytes: int
    """The most that a consistent phase boundary had without an owner: unaccounted bytes, whatever their sign, plus
    unattributed ones."""
    worst_limit_bytes: int
    """The limit at that boundary: 1 % of the used bytes, at least 24 MiB on a CPU and 256 MiB on a GPU."""
    worst_phase: str | None
    """The phase at that boundary."""
    sample_seconds: float
    """Time that one boundary costs a process that is sampled there; the median."""
    sample_share: float | None
    """Share of the steps' time that all samples in them take, 0 to 1; None without a finished step."""


class Others(msgspec.Struct, frozen=True, kw_only=True):
    """Processes on a GPU that do not belong to the Recording, at the moment when they held most together."""

    at_seconds: float
    """When, counted from the beginning of the Recording."""
    unaccounted_bytes: int
    """The device's unaccounted bytes then; they include what the other processes held."""
    held_bytes: dict[str, int]
    """By process id, as the driver said, the largest first."""


class MostUsed(msgspec.Struct, frozen=True, kw_only=True):
    """The most that was used of a device, between the samples of its processes too."""

    bytes: int
    """What was used, with what the driver reserves."""
    at_seconds: float
    """When, counted from the beginning of the Recording."""
    by_sampler: bool
    """Whether the host's sampler saw it; else a process of the run looked, as at `peak_bytes`."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A device's bytes by owner, over all processes that sampled them."""

    lane: str
    """The rank's lane."""
    rank: int | None
    """The rank; None if it has none."""
    host: str | None
    """Host of the device."""
    device: str | None
    """Uuid of the device; None for a CPU."""
    peak_bytes: int
    """The largest total over all owners and processes, without `free`."""
    peak_at_seconds: float
    """When that was, counted from the beginning of the Recording."""
    peak_step: int | None
    """Number of the step then; None outside of steps."""
    peak_phase: str | None
    """The rank's phase then; None outside of phases. A sample at a phase boundary belongs to the phase that ends there,
    or else to the one that begins."""
    at_peak_bytes: dict[str, int]
    """By owner, at that moment; without `free` they add up to `peak_bytes`."""
    most_used: MostUsed | None
    """The most that was used by anybody's reading, the host's sampler's too; None where nobody read the total."""
    owner_peaks: dict[str, OwnerPeak]
    """By owner, its own peak, which may be at another moment."""
    steps: list[Moment]
    """The peak of each step."""
    phases: list[Moment]
    """The peak of each phase over all steps, in the order of a step. Parts of a phase that take less than 5 ms do not
    count where the phase has longer ones."""
    boundaries: list[Boundary]
    """Both boundaries of every phase, those of the start-up included."""
    residual: Residual | None
    """Bytes without an owner, over the phase boundaries; None if nobody read the device's total."""
    allocated_peaks: list[AllocatedPeak]
    """One item per process whose torch counts its own peak; engines in processes of their own are not among them, and
    the pools of an engine beside a trainer are not in it."""
    allocated_steps: list[AllocatedPeak]
    """The same of each step and process."""
    unknown: dict[str, str]
    """Rows that cannot be known on this machine, with the reason."""
    others: Others | None
    """Processes outside of this Recording that hold memory of the device; None if the driver named none."""


OF_GPUS = ("actor.activations", "rollout.graphs", "allocator.cached", "cuda.context", "nccl", "driver.reserved")
"""Rows of every GPU that are measured by more than tensors."""

NOT_SAMPLED = "no process of the run measured it"
NO_PASS = "no forward and no backward was looked at"
NO_TOTAL = "no process read the device's total, so unaccounted bytes are unknown"


def device_memory(seen: Observations, windows: StepWindows) -> list[DeviceMemory]:
    """Return every device whose owners' bytes were sampled, by rank."""
    return [device.figures() for device in _devices(seen, windows)]


def _devices(seen: Observations, windows: StepWindows) -> Iterator[_Device]:
    found = ledgers(seen)
    return (_Device(lane, found[lane], seen, windows.of(lane)) for lane in sorted(found, key=order))


class DeviceMoments(NamedTuple):
    """All moments of a device's ledger, with the step and the phase of each."""

    ledger: Ledger
    steps: list[int | None]
    phases: list[str | None]


def moments_of_devices(seen: Observations, windows: StepWindows) -> Iterator[tuple[Lane, DeviceMoments]]:
    """Yield all moments of every device whose owners' bytes were sampled, by rank."""
    for device in _devices(seen, windows):
        steps = [*map(device.windows.step_at, device.times_ns)]
        yield device.lane, DeviceMoments(device.ledger, steps, [*map(device.phase_at, device.times_ns)])


def phase_boundaries(seen: Observations, windows: StepWindows) -> Iterator[tuple[Lane, list[Boundary]]]:
    """Yield both boundaries of every phase, by device."""
    for device in _devices(seen, windows):
        yield device.lane, [*device.boundaries()]


class FullestMoment(NamedTuple):
    """Of a phase, over all steps or in one."""

    moment: Moment
    """When its owners held most together: what an allocator keeps for reuse is nobody's."""
    used_bytes: int
    """The most of the device's total in it, caches and all; it may be of another moment."""
    is_sampled_inside: bool
    """Whether anybody looked between the two ends of the phase; what comes and goes between them is in no row else."""


def fullest_moments(
    lane: Lane, ledger: Ledger, seen: Observations, windows: StepWindows, step_ns: tuple[int, int] | None = None
) -> list[FullestMoment]:
    """Of each phase the moment when most was allocated, in the order of a step.

    Args:
        lane: Of the device.
        ledger: Of the device.
        seen: The whole Recording.
        windows: The steps of the lane.
        step_ns: Only phases that begin inside of this count; None for all.
    """
    return list(_Device(lane, ledger, seen, windows).fullest_moments(step_ns))


class _Device:
    """One device's ledger beside its phases and the run's steps."""

    def __init__(self, lane: Lane, ledger: Ledger, seen: Observations, windows: StepWindows) -> None:
        self.lane, self.ledger, self.seen, self.windows = lane, ledger, seen, windows
        self.processes = seen.on(lane)
        self.used = ledger.used
        self.spans = sorted(_phases_of(self.processes, seen.end_ns))
        self.told_apart = _told_apart(self.spans)
        self.phase_times = PhaseTimes(self.told_apart)
        self.samplings = _samplings_of(self.processes)
        # Plain numbers: a moment at a time is asked for.
        self.times_ns: list[int] = ledger.times_ns.tolist()
        self.used_bytes: list[int] = self.used.astype(np.int64).tolist()
        self.owned_bytes: list[list[int]] = ledger.bytes.astype(np.int64).tolist()
        self._owned: dict[int, dict[str, int]] = {}

    def figures(self) -> DeviceMemory:
        """Return all its figures."""
        peak = self.moment(int(np.argmax(self.used)))
        boundaries = list(self.boundaries())
        counted = list(self.counted_peaks())
        return DeviceMemory(
            lane=self.lane.name,
            rank=self.lane.rank,
            host=self.lane.host,
            device=self.lane.device,
            peak_bytes=sum(size for owner, size in peak.bytes.items() if owner != FREE),
            peak_at_seconds=peak.at_seconds,
            peak_step=peak.step,
            peak_phase=peak.phase,
            at_peak_bytes=peak.bytes,
            most_used=self.most_used(),
            owner_peaks=self.owner_peaks(),
            steps=list(self.step_peaks()),
            phases=list(self.phase_peaks()),
            boundaries=boundaries,
            residual=self.residual(boundaries) if self.ledger.has_total else None,
            allocated_peaks=[self.allocated_peak(name, most) for name, most, _ in counted],
            allocated_steps=[self.allocated_peak(name, peak) for name, _, steps in counted for peak in steps],
            unknown=self.unknown(),
            others=self.others(),
        )

    def moment(self, index: int, phase: str | None = None) -> Moment:
        """Return one moment of the ledger; its phase goes by its time unless it is given."""
        at_ns = self.times_ns[index]
        apart_seconds, is_consistent = self.apart(index)
        return Moment(
            step=self.windows.step_at(at_ns),
            phase=phase or self.phase_at(at_ns),
            at_seconds=(at_ns - self.seen.start_ns) / 1e9,
            used_bytes=self.used_bytes[index],
            bytes=self.owned(index),
            apart_seconds=apart_seconds,
            is_consistent=is_consistent,
        )

    def owned(self, index: int) -> dict[str, int]:
        """Return the bytes of each owner at a moment, which many boundaries and peaks share: nobody may change it."""
        found = self._owned.get(index)
        if found is None:
            found = self._owned[index] = dict(zip(self.ledger.owners, self.owned_bytes[index], strict=True))
        return found

    def apart(self, index: int) -> tuple[float | None, bool | None]:
        """Return how far apart in seconds the samples of a moment are, and whether it is consistent; None where nobody
        knows."""
        apart_ns = float(self.ledger.apart_ns[index])
        return (apart_ns / 1e9, bool(self.ledger.is_consistent[index])) if isfinite(apart_ns) else (None, None)

    def phase_at(self, at_ns: int) -> str | None:
        """Return the phase that holds an instant; where one ends and another begins, the one that begins.

        A sample of a phase boundary lies just outside of its phase. It belongs to the phase that had just ended when
        the sample was begun, else to the one that begins after it.
        """
        return self.phase_by(at_ns) or self.phase_times.begins(at_ns, at_ns + CONSISTENT_NS)

    def phase_by(self, at_ns: int) -> str | None:
        """Return the same for what held by an instant: not a phase that only begins after it."""
        around = self.phase_times.around(at_ns)
        if around is not None:
            return around
        return self.phase_times.ended(at_ns, self.sampling_began_ns(at_ns) - CONSISTENT_NS)

    def sampling_began_ns(self, at_ns: int) -> int:
        """Return when the sample that an instant lies in was begun; on a busy machine a sample takes longer than 5
        ms."""
        starts_ns, ends_ns = self.samplings
        place = bisect_left(ends_ns, at_ns)
        return min(at_ns, starts_ns[place]) if place < len(ends_ns) else at_ns

    def inside(self, start_ns: int, end_ns: int) -> range:
        """Return the moments from an instant to another one, both included."""
        return range(bisect_left(self.times_ns, start_ns), bisect_right(self.times_ns, end_ns))

    def step_peaks(self) -> Iterator[Moment]:
        """Return the fullest moment of each step."""
        for number, (start_ns, end_ns) in zip(self.windows.numbers, self.windows.windows.tolist(), strict=True):
            inside = self.inside(start_ns, end_ns - 1)
            if number is not None and len(inside):
                yield self.moment(inside.start + int(np.argmax(self.used[inside.start : inside.stop])))

    def phase_peaks(self) -> Iterator[Moment]:
        """Return the fullest moment of each phase: inside it, or at one of its boundaries."""
        for name, moments in self.moments_of_phases().items():
            yield self.moment(max(moments, key=lambda index: self.used[index]), name)

    def fullest_moments(self, step_ns: tuple[int, int] | None) -> Iterator[FullestMoment]:
        """Return the moment of each phase when most was allocated, and of those alike the fullest."""
        allocated = self.used - self.ledger.row(CACHED)
        for name, moments in self.moments_of_phases(step_ns).items():
            index = max(moments, key=lambda index: (allocated[index], self.used[index]))
            spans = [(start_ns, end_ns) for start_ns, end_ns, called in self.told_apart if called == name]
            yield FullestMoment(
                self.moment(index, name), int(max(self.used[moments])), any(map(self.is_sampled_inside, spans))
            )

    def is_sampled_inside(self, span: tuple[int, int]) -> bool:
        """Return whether anybody looked further from both ends of a phase than a sample of these may be."""
        return len(self.inside(span[0] + CONSISTENT_NS + 1, span[1] - CONSISTENT_NS - 1)) > 0

    def moments_of_phases(self, step_ns: tuple[int, int] | None = None) -> dict[str, list[int]]:
        """The moments inside of each phase and at its boundaries, in the order of a step."""
        found: dict[str, list[list[int]]] = {}
        begins: dict[str, list[int]] = {}
        for start_ns, end_ns, name in self.told_apart:
            if step_ns is not None and not step_ns[0] <= start_ns < step_ns[1]:
                continue
            found.setdefault(name, []).append([*self.inside(start_ns, end_ns), self.nearest(end_ns)])
            # Its first sample may lie before its beginning: what a sleep frees was there when it began.
            if self.away_ns(index := self.nearest(start_ns), start_ns) <= CONSISTENT_NS:
                begins.setdefault(name, []).append(index)
        # In this order, for of moments that hold as much the first is taken.
        return {
            name: [*chain.from_iterable(reversed(found[name])), *begins.get(name, ())]
            for name in sorted(found, key=lambda name: (ORDER.get(name, len(ORDER)), name))
        }

    def boundaries(self) -> Iterator[Boundary]:
        """Return both boundaries of every phase that is over."""
        for start_ns, end_ns, name in self.spans:
            step = self.windows.step_at(start_ns)
            for side, at_ns in (("begin", start_ns), ("end", end_ns)):
                index = self.nearest(at_ns)
                away_ns = self.away_ns(index, at_ns)
                apart_seconds, is_consistent = self.apart(index)
                if away_ns > CONSISTENT_NS and is_consistent:  # that moment tells little of this boundary
                    is_consistent = False
                yield Boundary(
                    step=step,
                    phase=name or self.phase_at(self.times_ns[index]),
                    at_seconds=(self.times_ns[index] - self.seen.start_ns) / 1e9,
                    used_bytes=self.used_bytes[index],
                    bytes=self.owned(index),
                    apart_seconds=apart_seconds,
                    is_consistent=is_consistent,
                    side=side,
                    away_seconds=away_ns / 1e9,
                )

    def nearest(self, at_ns: int) -> int:
        """Return the moment that says most about an instant: the nearest one, or if that is not near, the last one
        before.

        If nobody looked at that time, what was there is what was there last; the next sample may be after memory has
        moved.
        """
        times_ns = self.times_ns
        index = bisect_left(times_ns, at_ns)
        if index == len(times_ns) or (index and at_ns - times_ns[index - 1] <= times_ns[index] - at_ns):
            index = bisect_left(times_ns, times_ns[index - 1])  # the first one of that time
        if self.away_ns(index, at_ns) > CONSISTENT_NS:
            return max(bisect_right(times_ns, at_ns) - 1, 0)
        return index

    def away_ns(self, index: int, at_ns: int) -> int:
        """Return how far an instant is from the sampling of a moment, which takes a while on a busy machine; 0 inside
        it."""
        end_ns = self.times_ns[index]
        return max(self.sampling_began_ns(end_ns) - at_ns, at_ns - end_ns, 0)

    def most_used(self) -> MostUsed | None:
        """The highest point of the line of what is used."""
        line = used_memory(self.seen, self.lane)
        if not len(line.bytes):
            return None
        most = int(np.argmax(line.bytes))
        return MostUsed(
            bytes=int(line.bytes[most]),
            at_seconds=(int(line.times_ns[most]) - self.seen.start_ns) / 1e9,
            by_sampler=bool(line.is_sampled[most]),
        )

    def owner_peaks(self) -> dict[str, OwnerPeak]:
        """Return each owner's peak, over all its samples."""
        return {
            owner: OwnerPeak(most.bytes, (most.at_ns - self.seen.start_ns) / 1e9, self.phase_at(most.at_ns))
            for owner, most in most_held(self.processes).items()
        }

    def residual(self, boundaries: list[Boundary]) -> Residual:
        """Return the bytes without an owner at the phase boundaries that are consistent."""
        consistent = [boundary for boundary in boundaries if boundary.is_consistent]
        over = [boundary for boundary in consistent if ownerless_bytes(boundary) > self.limit_bytes(boundary)]
        worst = max(consistent, key=ownerless_bytes, default=None)
        return Residual(
            boundaries=len(boundaries),
            inconsistent_boundaries=len(boundaries) - len(consistent),
            boundaries_over_limit=len(over),
            worst_bytes=ownerless_bytes(worst) if worst else 0,
            worst_limit_bytes=self.limit_bytes(worst) if worst else 0,
            worst_phase=worst.phase if worst else None,
            sample_seconds=float(np.median(self.ledger.cost_ns)) / 1e9,
            sample_share=self.sample_share(),
        )

    def counted_peaks(self) -> Iterator[tuple[str, Peak, list[Peak]]]:
        """By torch's own count, of each process by name: the peak of the run, and that of each step."""
        for process in self.processes:
            if len(process.allocated_peak.values):
                peaks = AllocatedPeaks(process)
                if (most := peaks.most()) is not None:
                    yield process.process.name, most, list(of_steps(peaks, self.windows))

    def allocated_peak(self, name: str, peak: Peak) -> AllocatedPeak:
        """One of a process with this name."""
        phase = self.phase_by(peak.told_ns)
        return AllocatedPeak(
            process=name,
            bytes=peak.bytes,
            at_most_bytes=peak.at_most_bytes,
            at_seconds=(peak.told_ns - self.seen.start_ns) / 1e9,
            step=None if phase is None else self.windows.step_at(peak.began_ns),
            phase=phase,
            at_peak_bytes=peak.by_owner,
        )

    def unknown(self) -> dict[str, str]:
        """Return the rows that this device has and nobody could measure; they are never shown as zero."""
        of_lane = [process.process.unavailable for process in self.processes]
        named = [(FORMER_NAMES.get(row, row), reason) for one in of_lane for row, reason in one.items()]
        said = {row: reason for row, reason in named if row in OWNERS}
        has_total, is_gpu = self.ledger.has_total, (self.lane.device or "").startswith("GPU")
        unknown: dict[str, str] = {}
        if is_gpu:  # who read its total has told of the other rows too: what it did not meet is not there
            rows = (CONTEXT,) if has_total else OF_GPUS
            unknown = {row: NOT_SAMPLED for row in rows if row not in self.ledger.owners}
            trained = [owner.partition(".")[0] for owner in self.ledger.owners if owner.endswith(".optimizer")]
            passes = [f"{subject}.activations" for subject in trained]
            unknown |= {row: NO_PASS for row in passes if row not in self.ledger.owners}
        if not has_total:  # whoever reads it reads these together
            of_total = (DRIVER_RESERVED, UNACCOUNTED, FREE) if is_gpu else (UNACCOUNTED,)
            unknown |= dict.fromkeys(of_total, said.get(UNACCOUNTED, NO_TOTAL))
        return unknown | said

    def others(self) -> Others | None:
        """Return what the driver says about processes that do not belong to the Recording."""
        hosts = {process.process.host for process in self.processes}
        ours = {str(pid) for host in hosts for pid in self.seen.pids[host]}
        held = [
            {pid: size for pid, size in said.items() if size and pid not in ours} for said in self.ledger.held_bytes
        ]
        most = max(range(len(held)), key=lambda index: sum(held[index].values()))
        if not held[most]:
            return None
        return Others(
            at_seconds=(int(self.ledger.times_ns[most]) - self.seen.start_ns) / 1e9,
            unaccounted_bytes=int(self.ledger.row(UNACCOUNTED)[most]),
            held_bytes=dict(sorted(held[most].items(), key=lambda one: -one[1])),
        )

    def limit_bytes(self, moment: Moment) -> int:
        """Return how many bytes may have no owner."""
        on_cpu = (self.lane.device or "").startswith("cpu")
        return max(int(ALLOWED_SHARE * moment.used_bytes), ALLOWED_CPU_BYTES if on_cpu else ALLOWED_GPU_BYTES)

    def sample_share(self) -> float | None:
        """Return the share of the finished steps' time that all samples of all processes took."""
        steps = self.windows.windows[1:][np.array(self.windows.finished[1:], bool)]
        samples = [
            (look.start_ns, look.end_ns)
            for process in self.processes
            for look in process.looks
            if look.end_ns is not None
        ]
        if not len(steps) or not samples:
            return None
        start_ns, end_ns = np.array(samples, np.int64).T
        inside = holding(steps, end_ns) >= 0
        return float((end_ns - start_ns)[inside].sum() / (steps[:, 1] - steps[:, 0]).sum())


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a device asked for more memory than there was."""

    lane: str
    """The rank's lane."""
    rank: int | None
    """The rank; None if it has none."""
    process: str
    """The process that asked."""
    at_seconds: float
    """When it failed, counted from the beginning of the Recording."""
    asked_bytes: int | None
    """What it asked for; None if the error does not say."""
    free_bytes: int | None
    """What was free then; None if unknown."""
    bound: str | None
    """What was exhausted: the GPU, the machine, or a limit of the process or of its control group."""
    reason: str
    """The error's own text."""
    moment: Moment | None
    """Who held what then, over all processes of the device; None if nobody sampled."""
    before: list[Moment]
    """The ledger of the last 30 seconds before it."""
    changes: list[str]
    """What would have made room, the largest first; each of them frees at least what was missing."""


LAST_NS = 30_000_000_000

CHANGES = {
    "actor.params": "offload the actor's parameters while they are not used",
    "actor.grads": "fewer parameters per rank, with more ranks, or a smaller dtype of the gradients",
    "actor.optimizer": "offload the optimizer's state",
    "actor.activations": "a smaller micro-batch, or activation checkpointing",
    "ref.params": "offload the ref",
    "critic.params": "offload the critic's parameters while they are not used",
    "critic.grads": "fewer of the critic's parameters per rank, with more ranks, or a smaller dtype of its gradients",
    "critic.optimizer": "offload the state of the critic's optimizer",
    "critic.activations": "a smaller micro-batch of the critic, or activation checkpointing",
    "weight_sync.bucket": "smaller or fewer buckets",
    "rollout.weights": "let the engine sleep at level 2 meanwhile",
    "rollout.kv_cache": "a smaller KV cache, or let the engine sleep meanwhile",
    "rollout.graphs": "fewer CUDA graphs",
    "allocator.cached": "empty the allocator's cache before",
    "unattributed": "a smaller micro-batch, or find who allocates it",
}
"""What makes an owner smaller."""


def out_of_memory(seen: Observations, windows: StepWindows) -> list[OutOfMemory]:
    """Return every time that a process ran out of memory, in order of time."""
    found = ledgers(seen)
    failures = [(span, process) for process in seen.processes for span in process.out_of_memory]
    return [
        _out_of_memory(span, process, found.get(process.lane), seen, windows.of(process.lane))
        for span, process in sorted(failures, key=lambda failure: failure[0].start_ns)
    ]


def _out_of_memory(
    span: Span, process: Seen, ledger: Ledger | None, seen: Observations, windows: StepWindows
) -> OutOfMemory:
    before: list[Moment] = []
    if ledger is not None:
        device = _Device(process.lane, ledger, seen, windows)
        until_ns = seen.end_ns if span.end_ns is None else span.end_ns
        before = [device.moment(index) for index in device.inside(until_ns - LAST_NS, until_ns)]
    moment = before[-1] if before else None
    asked_bytes, free_bytes = (span.args.get(name) for name in ("asked_bytes", "free_bytes"))
    missing_bytes = (asked_bytes or 0) - (free_bytes or 0)
    holders = sorted(moment.bytes.items(), key=lambda held: -held[1]) if moment else []
    return OutOfMemory(
        lane=process.lane.name,
        rank=process.lane.rank,
        process=process.process.name,
        at_seconds=(span.start_ns - seen.start_ns) / 1e9,
        asked_bytes=asked_bytes,
        free_bytes=free_bytes,
        bound=span.args.get("bound"),
        reason=str(span.args.get("reason", "")),
        moment=moment,
        before=before,
        changes=[
            *(
                f"{CHANGES[owner]} ({owner} asked for them)"
                for owner in span.args.get("owners", ())
                if owner in CHANGES
            ),
            *(
                f"{CHANGES[owner]} ({owner} holds {size:,} bytes)"
                for owner, size in holders
                if owner in CHANGES and size > 0 and size >= missing_bytes
            ),
        ],
    )


def ownerless_bytes(moment: Moment) -> int:
    """Return the unaccounted bytes, whatever their sign, plus the unattributed ones."""
    return abs(moment.bytes.get(UNACCOUNTED, 0)) + abs(moment.bytes.get(UNATTRIBUTED, 0))


def _phases_of(processes: Iterable[Seen], until_ns: int) -> Iterator[tuple[int, int, str]]:
    """Return start, end and name of every phase of some processes; an open phase lasts until now."""
    for process in processes:
        for name, kept in process.phases.items():
            for start_ns, end_ns in kept.rows(until_ns).tolist():
                yield start_ns, end_ns, name


def _told_apart(spans: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Return phases without the slivers of a phase that is longer elsewhere.

    Samples within 5 ms are one moment of the ledger: a shorter phase cannot be told from those around it. verl's
    `weight_sync` has such a remainder after `rollout.wake_kv_cache`, when the KV cache is back already.
    """
    longer = {name for start_ns, end_ns, name in spans if end_ns - start_ns >= CONSISTENT_NS}
    return [span for span in spans if span[1] - span[0] >= CONSISTENT_NS or span[2] not in longer]


def _samplings_of(processes: Iterable[Seen]) -> tuple[list[int], list[int]]:
    """Return start and end of every phase boundary that some processes sampled, by their ends."""
    samplings = [
        (look.end_ns, look.start_ns) for process in processes for look in process.looks if look.end_ns is not None
    ]
    samplings.sort()
    return [start_ns for _, start_ns in samplings], [end_ns for end_ns, _ in samplings]
