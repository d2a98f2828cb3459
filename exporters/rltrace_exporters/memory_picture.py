"""What a picture of memory shows, whoever draws it: numbers, colours, words."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.allocations import NOT_ALLOCATED, AllocationTimeline, allocation_timelines
from rltrace.analysis.lanes import order
from rltrace.analysis.ledger import FREE, UNACCOUNTED, Ledger, ledgers
from rltrace.analysis.memory import DeviceMemory, Residual, device_memory
from rltrace.analysis.observations import Observations
from rltrace.analysis.steps import StepWindows
from rltrace.events import OWNER_COLORS, OWNERS
from rltrace.read.recording import Recording

MOST_DEVICES = 8

AT_THE_BOTTOM = ("interpreter", "library.kernels", "cuda.context", "nccl", "driver.reserved")
"""What never moves, so that what does can be followed above it."""

CACHED = "allocator.cached"

COLUMNS = 1_200
"""Of a step with every allocation: in each, the fullest moment and the last."""

WHOLE = 0.02
"""Of a step: where less of it is missing, it is all there for who looks at a picture."""

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
    """Which ones the areas show: a step, or the whole of a Recording that has no finished one."""
    unit: str
    seconds: NDArray[np.float64]
    layers: list[Layer]
    """From the bottom."""
    used: NDArray[np.float64]
    floor: float
    """Where the vertical axis begins: what lies below it belongs to the lowest layer throughout."""
    top: float
    """Where it ends; the phases' names are above the areas."""
    bands: list[Band]
    phases: list[str]
    """The bars' names, in the order of a step."""
    note: str
    """How much has no owner, or why that is unknown."""


class Picture(NamedTuple):
    """Of a Recording."""

    title: str
    command: str
    devices: list[Device]
    left_out: int
    """Devices beyond `MOST_DEVICES`."""


def picture(recording: Recording) -> Picture:
    """Read a Recording once and work out what to draw: a step, and the fullest moment of each phase.

    The step is the last finished one of which every process of the device kept its allocations, else the last finished
    one, edge by edge.
    """
    seen = Observations(recording)
    windows = StepWindows(seen)
    found = ledgers(seen)
    lanes = sorted(found, key=order)
    figures = device_memory(seen, windows)
    exact = {kept.lane: kept for kept in allocation_timelines(seen, windows) if _is_whole(kept, seen)}
    devices = [
        _device(found[lane], exact.get(lane), memory, seen, windows.of(lane))
        for lane, memory in list(zip(lanes, figures, strict=True))[:MOST_DEVICES]
    ]
    command = " ".join(str(word) for word in recording.manifest.get("command") or ())
    title = f"Who holds every byte · {recording.name}"
    return Picture(title, command, devices, max(0, len(lanes) - MOST_DEVICES))


def _device(
    ledger: Ledger, exact: AllocationTimeline | None, memory: DeviceMemory, seen: Observations, windows: StepWindows
) -> Device:
    step, start_ns, end_ns = _window(windows, exact)
    unit, divisor = ("GiB", _GIB) if memory.peak_bytes >= 4 * _GIB else ("MiB", _MIB)
    area = _area(ledger, start_ns, end_ns)
    if exact is not None:
        area = _spliced(area, exact, ledger, start_ns, end_ns)
    moments = [moment for moment in memory.phases if moment.step is not None] or memory.phases
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
    top = max([*used, *(sum(bars) for bars in zip(*(layer.bars for layer in layers), strict=True))], default=1.0)
    return Device(
        name=" · ".join(filter(None, (memory.lane, memory.device))),
        moments=_moments(step, exact, start_ns, end_ns),
        unit=unit,
        seconds=(area.times_ns - start_ns) / 1e9,
        layers=layers,
        used=used,
        floor=floor,
        top=top + ABOVE * (top - floor),
        bands=_bands(memory, seen, start_ns, end_ns),
        phases=[moment.phase or "" for moment in moments],
        note=_note(memory, exact)
        + (f"; the axis begins at {floor:,.0f} {unit}, all of it {layers[0].owner}" if floor else ""),
    )


def _moments(step: int | None, exact: AllocationTimeline | None, start_ns: int, end_ns: int) -> str:
    """In words; of which part every allocation is there, if that is not nearly all of it."""
    if step is None or exact is None:
        return "the whole Recording" if step is None else f"step {step}"
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
    """The ledger's edges; what was held when the step began was said before it, and holds until its end."""
    inside = np.flatnonzero((start_ns <= ledger.times_ns) & (ledger.times_ns < end_ns))
    first = int(np.searchsorted(ledger.times_ns, start_ns, side="right")) - 1
    chosen = np.array([*([first] if first >= 0 else []), *inside, *inside[-1:]], np.int64)
    times_ns = np.clip(ledger.times_ns[chosen], start_ns, None)
    if len(inside):
        times_ns[-1] = end_ns
    return Area(times_ns, {owner: ledger.row(owner)[chosen] for owner in ledger.owners}, ledger.used[chosen])


def _spliced(edges: Area, exact: AllocationTimeline, ledger: Ledger, start_ns: int, end_ns: int) -> Area:
    """Every allocation from when to when all processes kept theirs, the edges before and behind that."""
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
    """Every allocation, and between them what only edges tell, as the last edge before has it.

    Where nobody said what the allocators have from the driver, their caches are not known between edges.
    """
    total = exact.allocated_bytes()
    chosen = _fullest(exact.times_ns, total, start_ns, end_ns)
    chosen = np.append(chosen, chosen[-1:])  # it holds until the end
    times_ns = np.clip(exact.times_ns[chosen], start_ns, None)
    times_ns[-1:] = end_ns
    edges = np.clip(np.searchsorted(ledger.times_ns, times_ns, side="right") - 1, 0, None)
    at_edges = [owner for owner in ledger.owners if owner in NOT_ALLOCATED and owner not in (CACHED, UNACCOUNTED, FREE)]
    rows = {owner: ledger.row(owner)[edges] for owner in at_edges}
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


def _window(windows: StepWindows, exact: AllocationTimeline | None) -> tuple[int | None, int, int]:
    """The step that is there exactly, else the last one that is over, else the whole Recording."""
    if exact is not None and exact.window is not None:
        step, (start_ns, end_ns) = exact.step, exact.window
    else:
        last = max(index for index, is_over in enumerate(windows.finished) if is_over)
        step, (start_ns, end_ns) = windows.numbers[last], windows.windows[last].tolist()
    return step, start_ns, max(end_ns, start_ns + 1)


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
    return "; ".join(filter(None, (_ownerless(memory.residual), unknown, uncached)))


def _ownerless(found: Residual | None) -> str:
    if found is None:
        return ""
    return (
        f"Unaccounted: ≤ {found.worst_bytes / _MIB:.1f} MiB (limit {found.worst_limit_bytes / _MIB:.1f} MiB) at "
        f"{found.boundaries - found.inconsistent_boundaries} of {found.boundaries} phase boundaries"
    )
