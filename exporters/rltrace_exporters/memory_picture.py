"""What a picture of memory shows, whoever draws it: numbers, colours, words."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.allocated_peaks import AllocatedPeak
from rltrace.analysis.allocations import NOT_ALLOCATED, AllocationTimeline, allocation_timelines
from rltrace.analysis.lanes import Lane, order
from rltrace.analysis.ledger import FREE, UNACCOUNTED, Ledger, ledgers
from rltrace.analysis.memory import (
    CACHED,
    DeviceMemory,
    Residual,
    device_memory,
    fullest_moments,
)
from rltrace.analysis.observations import Observations
from rltrace.analysis.steps import StepWindows
from rltrace.events import OWNER_COLORS, OWNERS
from rltrace.read.recording import Recording
from rltrace_exporters.timeline_colors import slice_color

MOST_DEVICES = 8

AT_THE_BOTTOM = ("interpreter", "library.kernels", "cuda.context", "nccl", "driver.reserved")
"""What never moves, so that what does can be followed above it."""

COLUMNS = 1_200
"""Of a step with every allocation: in each, the fullest moment and the last."""

WHOLE = 0.02
"""Of a step: where less of it is missing, it is all there for who looks at a picture."""

ALIKE = 0.1
"""Of what a device has in all: so much may an owner hold more or less on a device that is alike."""

ENDS_ONLY = "*"
"""Behind the name of a phase in which nobody looked but at its ends."""

CUT_FROM = 0.5
ABOVE = 0.12
"""Of the areas' height, for the names of the phases."""

_GIB, _MIB = 1 << 30, 1 << 20


class Layer(NamedTuple):
    """One owner."""

    owner: str
    color: str
    area: NDArray[np.float64]
    """At each of the step's times, in the picture's unit; what is below 0 is drawn as 0."""
    bars: list[float]
    """Of each phase."""


class Band(NamedTuple):
    """A phase of the step, in seconds from its beginning."""

    name: str
    start: float
    end: float

    @property
    def color(self) -> str:
        """The timeline's."""
        return slice_color(self.name)

    def label(self, letters: float) -> str:
        """As much of the name as there is room for: all of it, what is done, or nothing; the bars have all names."""
        action = self.name.partition(".")[2]
        return next((name for name in (self.name, action) if len(name) <= letters), "")


class Area(NamedTuple):
    """What owners had through a step, in bytes; what is said holds until something else is."""

    times_ns: NDArray[np.int64]
    rows: dict[str, NDArray[np.float64]]
    """By owner."""
    used: NDArray[np.float64]
    """In all."""


class Device(NamedTuple):
    """One device."""

    name: str
    moments: str
    """Which ones the areas show: a step, the one that failed, the start-up or the whole Recording."""
    axis: str
    """What its seconds are counted from."""
    unit: str
    seconds: NDArray[np.float64]
    layers: list[Layer]
    """From the bottom."""
    used: NDArray[np.float64]
    others: NDArray[np.float64] | None
    """Shape (2, times): the least and the most that devices which are alike had in all; None of one without."""
    capacity: float | None
    """All that the device has; None where nobody knows."""
    failures: list[float]
    """When a process of the device ran out of memory."""
    floor: float
    """Where the vertical axis begins: what lies below it belongs to the lowest layer throughout."""
    top: float
    """The most that anything in it is, the capacity among them."""
    height: float
    """Where the axis ends; between it and the top are the phases' names."""
    bands: list[Band]
    phases: list[str]
    """The bars' names, in the order of a step."""
    tops: list[float]
    """Of each phase the most in all, which may have been at another moment than what its bar shows."""
    note: str
    """How much has no owner, or why that is unknown."""


class Picture(NamedTuple):
    """Of a Recording."""

    title: str
    command: str
    devices: list[Device]
    left_out: int
    """Pictures beyond `MOST_DEVICES`, of devices that are not alike."""


class _Window(NamedTuple):
    """What part of a run the areas show."""

    moments: str
    axis: str
    start_ns: int
    end_ns: int
    step: int | None
    failed: bool = False


def picture(recording: Recording) -> Picture:
    """Read a Recording once and work out what to draw: a step, and the fullest moment of each phase.

    The step is the last finished one of which every process of the device kept its allocations, else the last finished
    one, boundary by boundary; and beside it the last one, if it failed. Devices that are alike are one picture, of the
    fullest.
    """
    seen = Observations(recording)
    windows = StepWindows(seen)
    found = ledgers(seen)
    lanes = sorted(found, key=order)
    figures = device_memory(seen, windows)
    exact = {kept.lane: kept for kept in allocation_timelines(seen, windows) if _is_whole(kept, seen)}
    drawn: list[Device] = []
    for choose in (_window, _failed_window):
        devices = []
        for lane, memory in zip(lanes, figures, strict=True):
            kept = exact.get(lane) if choose is _window else None
            window = choose(windows.of(lane), kept)
            if window is not None:
                devices.append(_device(lane, found[lane], kept, memory, seen, windows.of(lane), window))
        drawn += _one_of_alike(devices)
    command = " ".join(str(word) for word in recording.manifest.get("command") or ())
    title = f"Who holds every byte · {recording.name}"
    return Picture(title, command, drawn[:MOST_DEVICES], max(0, len(drawn) - MOST_DEVICES))


def device_at(
    lane: Lane,
    ledger: Ledger,
    exact: AllocationTimeline | None,
    memory: DeviceMemory,
    seen: Observations,
    windows: StepWindows,
    step: int | None,
    window_ns: tuple[int, int],
) -> Device:
    """Return one device in one window of time.

    Args:
        lane: Of the device.
        ledger: Of the device.
        exact: Every allocation in the window, if they were kept.
        memory: Figures of the device.
        seen: The whole Recording.
        windows: The steps of the lane.
        step: The step that the window is; None if it is none.
        window_ns: Its beginning and end.
    """
    start_ns, end_ns = window_ns
    moments = "the whole Recording" if step is None else _moments(step, exact, start_ns, end_ns)
    axis = OF_RECORDING if step is None else OF_STEP
    return _device(lane, ledger, exact, memory, seen, windows, _Window(moments, axis, start_ns, end_ns, step))


def resolution(unit: str) -> int:
    """Return the bytes of a picture's unit."""
    return _GIB if unit == "GiB" else _MIB


def _one_of_alike(devices: list[Device]) -> list[Device]:
    """Of devices that are alike the fullest, with what the others had in all."""
    groups: list[list[Device]] = []
    for device in devices:
        group = next((group for group in groups if _are_alike(group[0], device)), None)
        if group is None:
            groups.append([device])
        else:
            group.append(device)
    return [_fullest_device(group) for group in groups]


def _are_alike(one: Device, other: Device) -> bool:
    """Whether they went through the same phases, with the same owners to within a share of what there was in all."""
    if (one.unit, one.moments) != (other.unit, other.moments):
        return False
    if {band.name for band in one.bands} != {band.name for band in other.bands} or one.failures != other.failures:
        return False
    most, others_most = ({layer.owner: float(layer.area.max(initial=0)) for layer in of.layers} for of in (one, other))
    allowed = ALIKE * max([*one.used, *other.used], default=0.0)
    return all(abs(most.get(owner, 0) - others_most.get(owner, 0)) <= allowed for owner in {*most, *others_most})


def _fullest_device(alike: list[Device]) -> Device:
    worst = max(alike, key=lambda device: max(device.used, default=0.0))
    others = [device for device in alike if device is not worst]
    if not others:
        return worst
    seconds = np.unique(np.concatenate([device.seconds for device in alike]))
    levels = np.array([device.used[_last_at(device.seconds, seconds)] for device in others])
    at = _last_at(worst.seconds, seconds)
    return worst._replace(
        name=f"{worst.name}, the fullest of {len(alike)} that are alike",
        seconds=seconds,
        layers=[layer._replace(area=layer.area[at]) for layer in worst.layers],
        used=worst.used[at],
        others=np.array([levels.min(axis=0), levels.max(axis=0)]),
    )


def _last_at(times: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.int64]:
    """Of each wanted time, which of `times` holds there."""
    return np.clip(np.searchsorted(times, wanted, side="right") - 1, 0, None)


def _device(
    lane: Lane,
    ledger: Ledger,
    exact: AllocationTimeline | None,
    memory: DeviceMemory,
    seen: Observations,
    windows: StepWindows,
    window: _Window,
) -> Device:
    start_ns, end_ns = window.start_ns, window.end_ns
    unit, divisor = ("GiB", _GIB) if memory.peak_bytes >= 4 * _GIB else ("MiB", _MIB)
    area = _area(ledger, start_ns, end_ns)
    if exact is not None:
        area = _spliced(area, exact, ledger, start_ns, end_ns)
    fullest = fullest_moments(lane, ledger, seen, windows, (start_ns, end_ns) if window.failed else None)
    fullest = [one for one in fullest if one.moment.step is not None] or fullest
    moments = [one.moment for one in fullest]
    layers = [
        Layer(
            owner,
            OWNER_COLORS[owner],
            np.maximum(area.rows.get(owner, np.zeros(len(area.times_ns))), 0.0) / divisor,
            [max(moment.bytes.get(owner, 0), 0) / divisor for moment in moments],
        )
        for owner in sorted({*ledger.owners, *area.rows}, key=_from_the_bottom)
        if owner != FREE
    ]
    layers = [layer for layer in layers if layer.area.any() or any(layer.bars)]
    used = area.used / divisor
    floor = _floor(layers, used)
    tops = [one.used_bytes / divisor for one in fullest]
    top = max([*used, *tops, *(sum(bars) for bars in zip(*(layer.bars for layer in layers), strict=True))], default=1.0)
    is_free_known = ledger.row(FREE).any()
    capacity = float((ledger.used + ledger.row(FREE)).max()) / divisor if is_free_known else None
    if capacity is not None:
        top = max(top, capacity)
    return Device(
        name=" · ".join(filter(None, (memory.lane, memory.device))),
        moments=window.moments,
        axis=window.axis,
        unit=unit,
        seconds=(area.times_ns - start_ns) / 1e9,
        layers=layers,
        used=used,
        others=None,
        capacity=capacity,
        failures=_failures(lane, seen, start_ns, end_ns),
        floor=floor,
        top=top,
        height=top + ABOVE * (top - floor),
        bands=_bands(memory, seen, start_ns, end_ns),
        phases=[f"{one.moment.phase}{'' if one.is_sampled_inside else ENDS_ONLY}" for one in fullest],
        tops=tops,
        note=_note(memory, exact)
        + (f"; {ENDS_ONLY} sampled at its ends only" if not all(one.is_sampled_inside for one in fullest) else "")
        + (f"; the axis begins at {floor:,.0f} {unit}, all of it {layers[0].owner}" if floor else ""),
    )


def _failures(lane: Lane, seen: Observations, start_ns: int, end_ns: int) -> list[float]:
    """Seconds at which processes of a lane ran out of memory."""
    spans = [span for process in seen.processes if process.lane == lane for span in process.out_of_memory]
    return sorted((span.start_ns - start_ns) / 1e9 for span in spans if start_ns <= span.start_ns <= end_ns)


def _moments(step: int | None, exact: AllocationTimeline | None, start_ns: int, end_ns: int) -> str:
    """In words; of which part every allocation is there, if that is not nearly all of it."""
    if exact is None:
        return f"step {step}"
    known_ns, until_ns = exact.known()
    late, early = max(0, known_ns - start_ns), max(0, end_ns - until_ns)
    is_part = late + early > WHOLE * (end_ns - start_ns)
    part = f" from {late / 1e9:.1f} to {(end_ns - early - start_ns) / 1e9:.1f} s" if is_part else ""
    return f"step {step}, every allocation{part}"


def _is_whole(kept: AllocationTimeline, seen: Observations) -> bool:
    """Whether a step that is over has the allocations of every process that had any then."""
    if kept.window is None or not kept.is_over:
        return False
    start_ns, end_ns = kept.window
    others = (one for one in seen.processes if one.lane == kept.lane and one.process.key not in kept.keys)
    return not any(
        one.first_ns < end_ns and one.last_ns > start_ns and not one.owners.keys() <= NOT_ALLOCATED for one in others
    )


def _area(ledger: Ledger, start_ns: int, end_ns: int) -> Area:
    """Return the ledger's moments. What was held when the step began was said before, and holds until its end."""
    inside = np.flatnonzero((start_ns <= ledger.times_ns) & (ledger.times_ns < end_ns))
    first = int(np.searchsorted(ledger.times_ns, start_ns, side="right")) - 1
    chosen = np.array([*([first] if first >= 0 else []), *inside, *inside[-1:]], np.int64)
    times_ns = np.clip(ledger.times_ns[chosen], start_ns, None)
    if len(inside):
        times_ns[-1] = end_ns
    return Area(times_ns, {owner: ledger.row(owner)[chosen] for owner in ledger.owners}, ledger.used[chosen])


def _spliced(edges: Area, exact: AllocationTimeline, ledger: Ledger, start_ns: int, end_ns: int) -> Area:
    """Return each allocation while all processes kept theirs, and the ledger's moments before and after that."""
    known_ns, until_ns = np.clip(exact.known(), start_ns, end_ns).tolist()
    parts = [_part(edges, start_ns, known_ns), _exact_area(exact, ledger, known_ns, until_ns)]
    parts.append(_part(edges, until_ns, end_ns))
    return Area(
        np.concatenate([part.times_ns for part in parts]),
        {owner: _row(owner, parts) for owner in dict.fromkeys(owner for part in parts for owner in part.rows)},
        np.concatenate([part.used for part in parts]),
    )


def _part(area: Area, start_ns: int, end_ns: int) -> Area:
    """What lies between two instants; what was said before it holds where it begins."""
    if start_ns >= end_ns or not len(area.times_ns):
        return Area(np.empty(0, np.int64), {}, np.empty(0))
    first = max(0, int(np.searchsorted(area.times_ns, start_ns, side="right")) - 1)
    inside = np.flatnonzero((start_ns < area.times_ns) & (area.times_ns <= end_ns))
    chosen = np.unique([first, *inside])
    times_ns = np.clip(area.times_ns[chosen], start_ns, None)
    return Area(times_ns, {owner: row[chosen] for owner, row in area.rows.items()}, area.used[chosen])


def _row(owner: str, parts: list[Area]) -> NDArray[np.float64]:
    """One owner's bytes through all parts; 0 in those that do not know it."""
    return np.concatenate([part.rows.get(owner, np.zeros(len(part.times_ns))) for part in parts])


def _exact_area(exact: AllocationTimeline, ledger: Ledger, start_ns: int, end_ns: int) -> Area:
    """Return each allocation, and in between what only the ledger's moments tell, as of the last moment before.

    If nobody said what the allocators have from the driver, their caches are not known between moments.
    """
    total = exact.allocated_bytes()
    chosen = _fullest(exact.times_ns, total, start_ns, end_ns)
    chosen = np.append(chosen, chosen[-1:])  # it holds until the end
    times_ns = np.clip(exact.times_ns[chosen], start_ns, None)
    times_ns[-1:] = end_ns
    edges = np.clip(np.searchsorted(ledger.times_ns, times_ns, side="right") - 1, 0, None)
    at_looks = [owner for owner in ledger.owners if owner in NOT_ALLOCATED and owner not in (CACHED, UNACCOUNTED, FREE)]
    rows = {owner: ledger.row(owner)[edges] for owner in at_looks}
    allocated = total[chosen].astype(float)
    reserved = allocated if exact.reserved_bytes is None else exact.reserved_bytes[chosen].astype(float)
    used = sum(rows.values(), reserved)
    rows |= {owner: level[chosen].astype(float) for owner, level in exact.bytes_by_owner.items()}
    return Area(times_ns, rows | {CACHED: reserved - allocated}, used)


def _fullest(moments_ns: NDArray[np.int64], total: NDArray[np.int64], start_ns: int, end_ns: int) -> NDArray[np.int64]:
    """Of each column, where most is allocated and where it ends: of a step's hundred thousand moments, what shows.

    Before them, what holds at the start: where the last process begins, that is more than a moment earlier.
    """
    column_ns = (end_ns - start_ns) / COLUMNS
    inside = np.flatnonzero((start_ns < moments_ns) & (moments_ns < end_ns))
    before = np.flatnonzero(moments_ns <= start_ns)[-1:]
    columns = ((moments_ns[inside] - start_ns) / column_ns).astype(np.int64)
    by_column = inside[np.lexsort((total[inside], columns))]
    ends = np.flatnonzero(np.diff(columns, append=COLUMNS))
    fullest = by_column[ends]
    return np.concatenate([before, np.unique([*fullest, *inside[ends]]).astype(np.int64)])


def _floor(layers: list[Layer], used: NDArray[np.float64]) -> float:
    """0; but if the lowest layer alone is more than half of all, most of it is cut off, or nothing else would show."""
    if not layers or not len(used):
        return 0.0
    least = float(min([*layers[0].area, *layers[0].bars]))
    if layers[0].owner not in AT_THE_BOTTOM or least < CUT_FROM * float(used.max()):
        return 0.0
    return float(np.floor(0.95 * least / 10) * 10)


OF_STEP, OF_RECORDING = "seconds from the step's beginning", "seconds from the beginning of the Recording"


def _window(windows: StepWindows, exact: AllocationTimeline | None) -> _Window | None:
    """The step that is there exactly, else the last one that is over, else what was before the first, or all."""
    if exact is not None and exact.window is not None:
        step, (start_ns, end_ns) = exact.step, exact.window
    else:
        last = max(index for index, is_over in enumerate(windows.finished) if is_over)
        step, (start_ns, end_ns) = windows.numbers[last], windows.windows[last].tolist()
    end_ns = max(end_ns, start_ns + 1)
    if step is not None:
        return _Window(_moments(step, exact, start_ns, end_ns), OF_STEP, start_ns, end_ns, step)
    moments = "start-up, before the first step" if windows.spans else "the whole Recording"
    return _Window(moments, OF_RECORDING, start_ns, end_ns, None)


def _failed_window(windows: StepWindows, _exact: AllocationTimeline | None) -> _Window | None:
    """The last step, if an exception or the death of its process ended it."""
    if windows.finished[-1] or windows.owner is None:
        return None
    step, (start_ns, end_ns) = windows.numbers[-1], windows.windows[-1].tolist()
    error = windows.spans[-1].args.get("error")
    if error is None and windows.owner.process.is_alive:
        return None  # it goes on
    why = "which did not end" if error is None else f"which failed: {error}"
    return _Window(f"step {step}, {why}", OF_STEP, start_ns, max(end_ns, start_ns + 1), step, failed=True)


def _from_the_bottom(owner: str) -> tuple[int, int]:
    if owner in AT_THE_BOTTOM:
        return 0, AT_THE_BOTTOM.index(owner)
    return 1, OWNERS.index(owner)


def _bands(memory: DeviceMemory, seen: Observations, start_ns: int, end_ns: int) -> list[Band]:
    spans = [
        (int(first_ns), int(last_ns), name)
        for process in seen.processes
        if (process.lane.name, process.lane.device) == (memory.lane, memory.device)
        for name, kept in process.phases.items()
        for first_ns, last_ns in kept.rows(seen.end_ns)
    ]
    return [
        Band(name, (max(first_ns, start_ns) - start_ns) / 1e9, (min(last_ns, end_ns) - start_ns) / 1e9)
        for first_ns, last_ns, name in _joined(spans)
        if first_ns < end_ns and last_ns > start_ns
    ]


def _joined(spans: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """In order of time; those of one name that overlap are one, for several engines of a device may run at once."""
    joined: list[tuple[int, int, str]] = []
    latest: dict[str, int] = {}
    for first_ns, last_ns, name in sorted(spans):
        before = latest.get(name)
        if before is not None and first_ns < joined[before][1]:
            joined[before] = (joined[before][0], max(joined[before][1], last_ns), name)
        else:
            latest[name] = len(joined)
            joined.append((first_ns, last_ns, name))
    return joined


def _note(memory: DeviceMemory, exact: AllocationTimeline | None = None) -> str:
    uncached = (
        ""
        if exact is None or exact.reserved_bytes is not None
        else "caches are not drawn: they are known at phase boundaries only"
    )
    unknown = f"unknown here, so not drawn: {', '.join(memory.unknown)}" if memory.unknown else ""
    between = [] if exact is not None else [_between_samples(peak) for peak in memory.allocated_peaks]
    return "; ".join(filter(None, (_ownerless(memory.residual), unknown, uncached, *between)))


def _between_samples(peak: AllocatedPeak) -> str:
    """What torch counted, of which nobody knows whose it was."""
    where = f" in {peak.phase}" if peak.phase is not None else ""
    return f"by torch's own count {peak.process} had {peak.bytes / _GIB:,.2f} GiB at once{where}, between samples too"


def _ownerless(found: Residual | None) -> str:
    if found is None:
        return ""
    return (
        f"Unaccounted: ≤ {found.worst_bytes / _MIB:.1f} MiB at {found.boundaries - found.inconsistent_boundaries} of "
        f"{found.boundaries} phase boundaries; the limit is {found.worst_limit_bytes / _MIB:.1f} MiB where it is most"
    )
