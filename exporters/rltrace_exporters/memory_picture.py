"""What a picture of memory shows, whoever draws it: numbers, colours, words."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.lanes import order
from rltrace.analysis.ledger import FREE, Ledger, ledgers
from rltrace.analysis.memory import DeviceMemory, Residual, device_memory
from rltrace.analysis.observations import Observations
from rltrace.analysis.steps import StepWindows
from rltrace.events import OWNER_COLORS, OWNERS
from rltrace.recording import Recording

MOST_DEVICES = 8

AT_THE_BOTTOM = ("interpreter", "library.kernels", "cuda.context", "nccl", "driver.reserved")
"""What never moves, so that what does can be followed above it."""

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


class Device(NamedTuple):
    """One device."""

    name: str
    step: int | None
    """None: the Recording has no finished step, and the picture is of all of it."""
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
    """Read a Recording once and work out what to draw: its last finished step, the fullest moment of each phase."""
    seen = Observations(recording)
    windows = StepWindows(seen)
    found = ledgers(seen)
    lanes = sorted(found, key=order)
    figures = device_memory(seen, windows)
    devices = [
        _device(found[lane], memory, seen, windows.of(lane))
        for lane, memory in list(zip(lanes, figures, strict=True))[:MOST_DEVICES]
    ]
    command = " ".join(str(word) for word in recording.manifest.get("command") or ())
    title = f"Who holds every byte · {recording.name}"
    return Picture(title, command, devices, max(0, len(lanes) - MOST_DEVICES))


def _device(ledger: Ledger, memory: DeviceMemory, seen: Observations, windows: StepWindows) -> Device:
    step, start_ns, end_ns = _window(windows)
    unit, divisor = ("GiB", _GIB) if memory.peak_bytes >= 4 * _GIB else ("MiB", _MIB)
    inside = np.flatnonzero((start_ns <= ledger.times_ns) & (ledger.times_ns < end_ns))
    # What was held when the step began was said before it, and holds until its end.
    first = int(np.searchsorted(ledger.times_ns, start_ns, side="right")) - 1
    chosen = np.array([*([first] if first >= 0 else []), *inside, *inside[-1:]], np.int64)
    times_ns = np.clip(ledger.times_ns[chosen], start_ns, None)
    if len(inside):
        times_ns[-1] = end_ns
    moments = [moment for moment in memory.phases if moment.step is not None] or memory.phases
    layers = [
        Layer(
            owner,
            OWNER_COLORS[owner],
            np.maximum(ledger.row(owner)[chosen], 0.0) / divisor,
            [max(moment.bytes.get(owner, 0), 0) / divisor for moment in moments],
        )
        for owner in sorted(ledger.owners, key=_from_the_bottom)
        if owner != FREE
    ]
    layers = [layer for layer in layers if layer.area.any() or any(layer.bars)]
    used = ledger.used[chosen] / divisor
    floor = _floor(layers, used)
    top = max([*used, *(sum(bars) for bars in zip(*(layer.bars for layer in layers), strict=True))], default=1.0)
    return Device(
        name=" · ".join(filter(None, (memory.lane, memory.device))),
        step=step,
        unit=unit,
        seconds=(times_ns - start_ns) / 1e9,
        layers=layers,
        used=used,
        floor=floor,
        top=top + ABOVE * (top - floor),
        bands=_bands(memory, seen, start_ns, end_ns),
        phases=[moment.phase or "" for moment in moments],
        note=_note(memory)
        + (f"; the axis begins at {floor:,.0f} {unit}, all of it {layers[0].owner}" if floor else ""),
    )


def _floor(layers: list[Layer], used: NDArray[np.float64]) -> float:
    """0; but if the lowest layer alone is more than half of all, most of it is cut off, or nothing else would show."""
    if not layers or not len(used):
        return 0.0
    least = float(min([*layers[0].area, *layers[0].bars]))
    if layers[0].owner not in AT_THE_BOTTOM or least < CUT_FROM * float(used.max()):
        return 0.0
    return float(np.floor(0.95 * least / 10) * 10)


def _window(windows: StepWindows) -> tuple[int | None, int, int]:
    """The last step that is over, else the whole Recording."""
    finished = [index for index in range(1, len(windows.numbers)) if windows.finished[index]]
    index = finished[-1] if finished else 0
    start_ns, end_ns = map(int, windows.windows[index])
    return (windows.numbers[index] if finished else None), start_ns, max(end_ns, start_ns + 1)


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


def _note(memory: DeviceMemory) -> str:
    unknown = f"not known here, so not drawn: {', '.join(memory.unknown)}" if memory.unknown else ""
    return "; ".join(filter(None, (_ownerless(memory.residual), unknown)))


def _ownerless(found: Residual | None) -> str:
    if found is None:
        return ""
    return (
        f"at {found.edges - found.unsettled_edges} settled phase edges of the run at most "
        f"{found.worst_bytes / _MIB:.1f} MiB have no owner ({found.worst_allowed_bytes / _MIB:.1f} MiB allowed)"
    )
