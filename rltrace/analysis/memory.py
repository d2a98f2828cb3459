"""Who held a device's bytes: at its peak, at each step's and each phase's peak, and at every phase boundary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import starmap
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.allocated_peaks import AllocatedPeak, AllocatedPeaks, Peak, of_steps
from rltrace.analysis.coded import Coded
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
from rltrace.analysis.looks import CONSISTENT_NS, DRIVER_RESERVED, Places, looks
from rltrace.analysis.moment_times import MomentTimes
from rltrace.analysis.moments import Boundaries, Moment, by_owner, where_known
from rltrace.analysis.observations import Observations
from rltrace.analysis.phase_times import NONE, PhaseSpans, PhaseTimes, phase_spans
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
    boundaries: Boundaries
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
        times_ns = device.ledger.times_ns
        yield device.lane, DeviceMoments(device.ledger, device.steps_at(times_ns), device.phases_at(times_ns))


def phase_boundaries(seen: Observations, windows: StepWindows) -> Iterator[tuple[Lane, Boundaries]]:
    """Yield both boundaries of every phase, by device."""
    for device in _devices(seen, windows):
        yield device.lane, device.boundaries(device.edges())


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


class _Edges(NamedTuple):
    """Both boundaries of every phase, each phase's beginning before its end, and the moment nearest to each."""

    moments: Places
    away_ns: NDArray[np.int64]
    is_consistent: NDArray[np.bool_]
    """Whether that moment is consistent, and near."""


class _Device:
    """One device's ledger beside its phases and the run's steps."""

    def __init__(self, lane: Lane, ledger: Ledger, seen: Observations, windows: StepWindows) -> None:
        self.lane, self.ledger, self.seen, self.windows = lane, ledger, seen, windows
        self.processes = seen.on(lane)
        self.used = ledger.used
        self.used_bytes: NDArray[np.int64] = self.used.astype(np.int64)
        self.owned_bytes: NDArray[np.int64] = ledger.bytes.astype(np.int64, order="C")
        self.spans = phase_spans(self.processes, seen.end_ns)
        self.told_apart = self.spans.told_apart(CONSISTENT_NS)
        self.phase_times = PhaseTimes(self.told_apart)
        self.times = MomentTimes(ledger.times_ns, [looks(process) for process in self.processes])

    def figures(self) -> DeviceMemory:
        """Return all its figures."""
        (peak,) = self.moments([int(np.argmax(self.used))])
        edges = self.edges()
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
            steps=self.step_peaks(),
            phases=self.phase_peaks(),
            boundaries=self.boundaries(edges),
            residual=self.residual(edges) if self.ledger.has_total else None,
            allocated_peaks=[one for name, most, _ in counted for one in self.allocated_peaks(name, [most])],
            allocated_steps=[one for name, _, steps in counted for one in self.allocated_peaks(name, steps)],
            unknown=self.unknown(),
            others=self.others(),
        )

    def moments(self, moments: Sequence[int] | Places, phases: Sequence[str] | None = None) -> list[Moment]:
        """Return some moments of the ledger; their phases go by their times unless they are given."""
        chosen = np.array(moments, np.intp)
        times_ns = self.ledger.times_ns[chosen]
        named = self.phases_at(times_ns) if phases is None else self.named(phases, times_ns)
        apart_ns = self.ledger.apart_ns[chosen]
        is_known = np.isfinite(apart_ns)  # where nobody read a total, nobody knows how consistent a moment is
        columns = (
            self.steps_at(times_ns),
            named,
            ((times_ns - self.seen.start_ns) / 1e9).tolist(),
            self.used_bytes[chosen].tolist(),
            by_owner(self.ledger.owners, self.owned_bytes[chosen]),
            where_known((apart_ns / 1e9).tolist(), is_known),
            where_known(self.ledger.is_consistent[chosen].tolist(), is_known),
        )
        return [*starmap(Moment, zip(*columns, strict=True))]

    def steps_at(self, times_ns: NDArray[np.int64]) -> list[int | None]:
        """Return the number of the step that each instant is in; None outside of steps."""
        return Coded(self.windows.numbers, self.windows.places(times_ns)).rows()

    def phases_at(self, times_ns: NDArray[np.int64]) -> list[str | None]:
        """Return the phase that holds each instant; where one ends and another begins, the one that begins.

        A sample of a phase boundary lies just outside of its phase. It belongs to the phase that had just ended when
        the sample was begun, else to the one that begins after it.
        """
        by = self._places_by(times_ns)
        is_named = np.array([*map(bool, self.spans.names), False])[by]
        begins = self.phase_times.begins(times_ns, times_ns + CONSISTENT_NS)
        return self._names(np.where(is_named, by, begins))

    def named(self, phases: Iterable[str], times_ns: NDArray[np.int64]) -> list[str | None]:
        """Return some names of phases; for one that is empty the phase of its instant."""
        return [name or self.phase_at(int(at_ns)) for name, at_ns in zip(phases, times_ns.tolist(), strict=True)]

    def phase_at(self, at_ns: int) -> str | None:
        """Return the phase of one instant."""
        return self.phases_at(np.array([at_ns]))[0]

    def phases_by(self, times_ns: NDArray[np.int64]) -> list[str | None]:
        """Return the same for what held by each instant: not a phase that only begins after it."""
        return self._names(self._places_by(times_ns))

    def _places_by(self, times_ns: NDArray[np.int64]) -> Places:
        around = self.phase_times.around(times_ns)
        ended = self.phase_times.ended(times_ns, self.times.began_ns(times_ns) - CONSISTENT_NS)
        return np.where(around == NONE, ended, around)

    def _names(self, places: Places) -> list[str | None]:
        return Coded([*self.spans.names, None], places).rows()  # the last one is that of `NONE`

    def step_peaks(self) -> list[Moment]:
        """Return the fullest moment of each step."""
        has_number = np.array([number is not None for number in self.windows.numbers], np.bool_)
        starts_ns, ends_ns = self.windows.windows[has_number].T
        firsts, behind = self.times.firsts(starts_ns), self.times.behind(ends_ns - 1)
        has_any = firsts < behind
        return self.moments(_fullest(self.used, firsts[has_any], behind[has_any]))

    def phase_peaks(self) -> list[Moment]:
        """Return the fullest moment of each phase: inside it, or at one of its boundaries."""
        of_phases = self.moments_of_phases(self.told_apart)
        fullest = [int(moments[np.argmax(self.used[moments])]) for moments in of_phases.values()]
        return self.moments(fullest, [*of_phases])

    def fullest_moments(self, step_ns: tuple[int, int] | None) -> Iterator[FullestMoment]:
        """Return the moment of each phase when most was allocated, and of those alike the fullest."""
        allocated = self.used - self.ledger.row(CACHED)
        spans = self.told_apart
        if step_ns is not None:
            spans = spans.part((step_ns[0] <= spans.starts_ns) & (spans.starts_ns < step_ns[1]))
        for name, moments in self.moments_of_phases(spans).items():
            is_most = allocated[moments] == allocated[moments].max()
            (moment,) = self.moments([int(moments[np.argmax(np.where(is_most, self.used[moments], -np.inf))])], [name])
            yield FullestMoment(moment, int(self.used[moments].max()), self.is_sampled_inside(name))

    def is_sampled_inside(self, name: str) -> bool:
        """Return whether anybody looked further from both ends of a phase than a sample of these may be."""
        spans = self.told_apart.part(self.told_apart.places == self.told_apart.names.index(name))
        firsts = self.times.firsts(spans.starts_ns + CONSISTENT_NS + 1)
        return bool((firsts < self.times.behind(spans.ends_ns - CONSISTENT_NS - 1)).any())

    def moments_of_phases(self, spans: PhaseSpans) -> dict[str, Places]:
        """The moments inside of each phase and at its boundaries, in the order of a step.

        The last of a name comes first, for of moments that hold as much the first is taken.
        """
        begins, ends = self.times.nearest(spans.starts_ns), self.times.nearest(spans.ends_ns)
        # Its first sample may lie before its beginning: what a sleep frees was there when it began.
        is_near = self.times.away_ns(begins, spans.starts_ns) <= CONSISTENT_NS
        firsts = self.times.firsts(spans.starts_ns)
        many = np.maximum(self.times.behind(spans.ends_ns) - firsts, 0)
        found: dict[str, Places] = {}
        for place in np.unique(spans.places).tolist():
            own = np.flatnonzero(spans.places == place)
            last_first = own[::-1]
            inside = _ranges_and_ends(firsts[last_first], many[last_first], ends[last_first])
            found[spans.names[place]] = np.concatenate([inside, begins[own[is_near[own]]]])
        return {name: found[name] for name in sorted(found, key=lambda name: (ORDER.get(name, len(ORDER)), name))}

    def edges(self) -> _Edges:
        """Return both boundaries of every phase that is over."""
        at_ns = np.column_stack([self.spans.starts_ns, self.spans.ends_ns]).ravel()
        moments = self.times.nearest(at_ns)
        away_ns = self.times.away_ns(moments, at_ns)
        # A moment that is not near tells little of a boundary.
        return _Edges(moments, away_ns, self.ledger.is_consistent[moments] & (away_ns <= CONSISTENT_NS))

    def boundaries(self, edges: _Edges) -> Boundaries:
        """Return the same as they are shown."""
        times_ns = self.ledger.times_ns[edges.moments]
        apart_ns = self.ledger.apart_ns[edges.moments]
        is_next = np.zeros(len(self.used), np.bool_)
        is_next[edges.moments] = True
        return Boundaries(
            step=Coded(self.windows.numbers, np.repeat(self.windows.places(self.spans.starts_ns), 2)),
            phase=self.phases_of_edges(times_ns),
            is_end=np.tile([False, True], len(self.spans.places)),
            at_seconds=(times_ns - self.seen.start_ns) / 1e9,
            used_bytes=self.used_bytes[edges.moments],
            owners=list(self.ledger.owners),
            owned_bytes=self.owned_bytes[is_next],
            moment=(np.cumsum(is_next) - 1)[edges.moments],
            apart_seconds=apart_ns / 1e9,
            is_consistent=edges.is_consistent,
            away_seconds=edges.away_ns / 1e9,
        )

    def phases_of_edges(self, times_ns: NDArray[np.int64]) -> Coded:
        """Return the phase of each boundary; of one without a name that of its moment."""
        names: list[str | None] = [*self.spans.names]
        places = np.repeat(self.spans.places, 2)
        nameless = np.flatnonzero(np.isin(places, [place for place, name in enumerate(names) if not name]))
        for edge in nameless.tolist():
            places[edge] = len(names)
            names.append(self.phase_at(int(times_ns[edge])))
        return Coded(names, places)

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
        found = most_held(self.processes)
        phases = self.phases_at(np.array([most.at_ns for most in found.values()], np.int64))
        return {
            owner: OwnerPeak(most.bytes, (most.at_ns - self.seen.start_ns) / 1e9, phase)
            for (owner, most), phase in zip(found.items(), phases, strict=True)
        }

    def residual(self, edges: _Edges) -> Residual:
        """Return the bytes without an owner at the phase boundaries that are consistent."""
        is_judged = edges.is_consistent & np.isfinite(self.ledger.apart_ns[edges.moments])
        consistent = np.flatnonzero(is_judged)
        moments = edges.moments[consistent]
        ownerless, limits = self.ownerless_bytes()[moments], self.limit_bytes(moments)
        worst = int(np.argmax(ownerless)) if len(consistent) else None
        return Residual(
            boundaries=len(edges.moments),
            inconsistent_boundaries=len(edges.moments) - len(consistent),
            boundaries_over_limit=int((ownerless > limits).sum()),
            worst_bytes=0 if worst is None else int(ownerless[worst]),
            worst_limit_bytes=0 if worst is None else int(limits[worst]),
            worst_phase=None if worst is None else self.phase_of_edge(int(consistent[worst]), int(moments[worst])),
            sample_seconds=float(np.median(self.ledger.cost_ns)) / 1e9,
            sample_share=self.sample_share(),
        )

    def phase_of_edge(self, edge: int, moment: int) -> str | None:
        """Return the phase that a boundary is of."""
        name = self.spans.names[self.spans.places[edge // 2]]
        return self.named([name], self.ledger.times_ns[[moment]])[0]

    def ownerless_bytes(self) -> NDArray[np.int64]:
        """Return the unaccounted bytes of each moment, whatever their sign, plus the unattributed ones."""
        rows = (self.ledger.row(owner).astype(np.int64) for owner in (UNACCOUNTED, UNATTRIBUTED))
        return sum(map(np.abs, rows), np.zeros(len(self.used), np.int64))

    def limit_bytes(self, moments: Places) -> NDArray[np.int64]:
        """Return how many bytes may have no owner at some moments."""
        on_cpu = (self.lane.device or "").startswith("cpu")
        share = (ALLOWED_SHARE * self.used_bytes[moments]).astype(np.int64)
        return np.maximum(share, ALLOWED_CPU_BYTES if on_cpu else ALLOWED_GPU_BYTES)

    def counted_peaks(self) -> Iterator[tuple[str, Peak, list[Peak]]]:
        """By torch's own count, of each process by name: the peak of the run, and that of each step."""
        for process in self.processes:
            if len(process.allocated_peak.values):
                peaks = AllocatedPeaks(process)
                if (most := peaks.most()) is not None:
                    yield process.process.name, most, list(of_steps(peaks, self.windows))

    def allocated_peaks(self, name: str, peaks: list[Peak]) -> list[AllocatedPeak]:
        """Those of a process with this name."""
        phases = self.phases_by(np.array([peak.told_ns for peak in peaks], np.int64))
        return [
            AllocatedPeak(
                process=name,
                bytes=peak.bytes,
                at_most_bytes=peak.at_most_bytes,
                at_seconds=(peak.told_ns - self.seen.start_ns) / 1e9,
                step=None if phase is None else self.windows.step_at(peak.began_ns),
                phase=phase,
                at_peak_bytes=peak.by_owner,
            )
            for peak, phase in zip(peaks, phases, strict=True)
        ]

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
        held = self.ledger.held_bytes.without(frozenset(str(pid) for host in hosts for pid in self.seen.pids[host]))
        most = int(np.argmax(held.sums()))
        of_most = np.flatnonzero((held.looks == most) & (held.values != 0))
        if not len(of_most):
            return None
        sizes = [(held.names[held.places[row]], int(held.values[row])) for row in of_most.tolist()]
        return Others(
            at_seconds=(int(self.ledger.times_ns[most]) - self.seen.start_ns) / 1e9,
            unaccounted_bytes=int(self.ledger.row(UNACCOUNTED)[most]),
            held_bytes=dict(sorted(sizes, key=lambda one: -one[1])),
        )

    def sample_share(self) -> float | None:
        """Return the share of the finished steps' time that all samples of all processes took."""
        steps = self.windows.windows[1:][np.array(self.windows.finished[1:], bool)]
        samples = [looks(process) for process in self.processes]
        ends_ns = np.concatenate([one.ends_ns for one in samples])
        if not len(steps) or not len(ends_ns):
            return None
        inside = holding(steps, ends_ns) >= 0
        took_ns = ends_ns - np.concatenate([one.starts_ns for one in samples])
        return float(took_ns[inside].sum() / (steps[:, 1] - steps[:, 0]).sum())


def _fullest(used: NDArray[np.float64], firsts: Places, behind: Places) -> Places:
    """Return the first of the fullest moments of each range; none is empty."""
    edges = np.column_stack([firsts, behind]).ravel()
    most = np.maximum.reduceat(np.append(used, 0.0), edges)[::2]  # the other ones are those between two ranges
    many = behind - firsts
    of = np.repeat(np.arange(len(many)), many)
    inside = np.arange(len(of)) + np.repeat(behind - np.cumsum(many), many)
    is_most = np.flatnonzero(used[inside] == most[of])
    return inside[is_most[np.searchsorted(of[is_most], np.arange(len(many)))]]


def _ranges_and_ends(firsts: Places, many: Places, ends: Places) -> Places:
    """Return places that follow a first one, and behind each range one more."""
    behind = np.cumsum(many + 1)
    found = np.arange(behind[-1]) + np.repeat(firsts - behind + many + 1, many + 1)
    found[behind - 1] = ends
    return found


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
        first, behind = device.times.firsts(np.array([until_ns - LAST_NS])), device.times.behind(np.array([until_ns]))
        before = device.moments(np.arange(int(first[0]), int(behind[0])))
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
