"""One step: what every rank did when, and who held the memory of the fullest card at the same moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.allocations import AllocationTimeline
from rltrace.analysis.findings.critical_path import CriticalPath
from rltrace.analysis.intervals import Intervals, cut, union
from rltrace.analysis.lanes import DRIVER_ROLE, Lane
from rltrace.analysis.phases import in_order, lane_phases
from rltrace.analysis.used_memory import used_memory
from rltrace_exporters.memory_picture import Device, device_at, resolution
from rltrace_exporters.report.amounts import as_text, gibibytes
from rltrace_exporters.report.blocks import Command, Legend, Note
from rltrace_exporters.report.chart import Bar, Chart, Dot, Layer, Level, Plot
from rltrace_exporters.report.sections import MOST_ROWS, Block, color_of, view
from rltrace_exporters.report.ticks import end_of_axis
from rltrace_exporters.report.values import Missing, RunValues, Window

ROW, SHARES, MEMORY = 22, 120, 220
"""Heights in pixels."""

MOST_BARS = 300
"""Of one phase in one row."""

WAITED_FOR = "waited for"

COLUMNS = 240
"""Of the plot that has the shares of many ranks."""

FINEST = 2000
"""Parts of the window: gaps and bars that are shorter are drawn together."""

NAMED_PHASES = 4
"""Of so many phases, the longest ones, the slowest of many ranks is drawn by name."""

DOTS = 400
"""So many samples of NVML are drawn at most: of those side by side the largest."""

Phases = dict[str, Intervals]


def one_step(values: RunValues) -> list[Block]:
    """Return the step's chart, and the command that shows it in the timeline."""
    window = values.window
    phases = {lane: of for lane, of in _inside(values, window).items() if any(map(len, of.values()))}
    if not phases:
        raise Missing(
            "No phase was recorded, so nobody knows what the ranks did when: "
            '`with rltrace.phase("reward")` in a program, or a hook of its trainer, marks them.'
        )
    plots = [*_waited_for(values, window), *_rows(values, phases, window)]
    names = in_order(name for of in phases.values() for name, rows in of.items() if len(rows))
    legend = [Legend(name, color_of(name)) for name in names]
    owners: list[Legend] = []
    memory, why = _memory(values, window)
    if memory is not None:
        plots.append(memory)
        owners = [Legend(layer.name, layer.color) for layer in reversed(memory.layers)]
    chart = Chart(f"What every rank did: {window.title}", window.seconds, "s", plots, legend, owners)
    blocks: list[Block] = [chart]
    if why:
        blocks.append(Note(why))
    if values.unaligned:
        blocks.append(Note(values.unaligned))
    return [*blocks, Command("In the timeline", view(values, step=window.step))]


def _inside(values: RunValues, window: Window) -> dict[Lane, Phases]:
    """Return the phases of each lane in the window, the driver first."""
    limits = np.array([[window.start_ns, window.end_ns]], np.int64)
    found = {
        lane: {name: cut(rows, limits)[0] for name, rows in of.items()} for lane, of in lane_phases(values.seen).items()
    }
    return dict(sorted(found.items(), key=lambda item: not item[0].is_driver))


def _waited_for(values: RunValues, window: Window) -> Iterator[Plot]:
    """Yield what the step waited for, if that is known of this step."""
    path = values.why.critical_path
    if path is None or path.typical_step != window.step:
        return
    from_s = values.seconds(window.start_ns)
    bars = []
    for segment in path.segments:
        if segment.phase is not None and segment.lane is not None:
            start, end = segment.start_seconds - from_s, segment.end_seconds - from_s
            tip = f"waited for {segment.lane}: {segment.phase}, {as_text(end - start)}"
            bars.append(Bar(start, end, color_of(segment.phase), tip, segment.lane))
    yield Plot(WAITED_FOR, ROW, "what the step waited for, from its beginning to its end", bars=bars)


# ---- ranks ------------------------------------------------------------------------------------------------------


def _rows(values: RunValues, phases: dict[Lane, Phases], window: Window) -> Iterator[Plot]:
    if len(phases) <= MOST_ROWS:
        for lane, of in phases.items():
            yield _row(lane, of, window)
        return
    for lane, of in phases.items():
        if lane.is_driver:
            yield _row(lane, of, window)
    ranks = {lane: of for lane, of in phases.items() if not lane.is_driver}
    kind = "ranks" if all(lane.rank is not None for lane in ranks) else "processes"
    yield _shares(list(ranks.values()), f"{len(ranks):,} {kind}", window)
    for lane, said in _of_interest(ranks, values.why.critical_path).items():
        yield _row(lane, ranks[lane], window, said)


def _row(lane: Lane, phases: Phases, window: Window, said: str = "") -> Plot:
    finest_ns = (window.end_ns - window.start_ns) // FINEST
    bars = []
    for name, rows in phases.items():
        color = color_of(name)
        for start_ns, end_ns in joined(rows, finest_ns).tolist():
            start, end = ((at_ns - window.start_ns) / 1e9 for at_ns in (start_ns, end_ns))
            tip = f"{lane.name}: {name}, {as_text(end - start)}, from {start:.2f} to {end:.2f} s"
            bars.append(Bar(start, end, color, tip, name))
    tip = f"{lane.name}, {said}" if said else ""
    return Plot(lane.name, ROW, tip, bars=sorted(bars, key=lambda bar: bar.start))


def joined(rows: Intervals, finest_ns: int) -> Intervals:
    """Return intervals with those joined that are so close that nobody sees the gap; of very many, close ones too."""
    together = union(rows)
    while len(together) > 1:
        grown = union(np.column_stack([together[:, 0], together[:, 1] + finest_ns]))
        if len(grown) <= MOST_BARS:
            return np.column_stack([grown[:, 0], grown[:, 1] - finest_ns])
        finest_ns = 2 * finest_ns + 1
    return together


def _shares(ranks: Sequence[Phases], what: str, window: Window) -> Plot:
    """Return how many ranks are in which phase, moment by moment."""
    edges_ns = np.linspace(window.start_ns, window.end_ns, COLUMNS + 1)
    xs = (edges_ns - window.start_ns) / 1e9
    names = in_order(name for of in ranks for name in of)
    layers = []
    for name in names:
        rows = np.concatenate([of[name] for of in ranks if name in of])
        share = np.diff(_covered_until(rows, edges_ns)) / np.diff(edges_ns) / len(ranks)
        layers.append(Layer(name, color_of(name), np.append(share, share[-1:]) * 100))
    return Plot(
        what, SHARES, f"Share of {what} that is in each phase", y_to=100, y_unit="%",
        xs=xs, layers=layers, are_values_shown=True,
    )  # fmt: skip


def _covered_until(rows: Intervals, at_ns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how much of all intervals lies before each moment."""
    before = np.zeros(len(at_ns))
    for side, sign in ((0, 1.0), (1, -1.0)):
        ordered = np.sort(rows[:, side]).astype(float)
        sums = np.append(0.0, np.cumsum(ordered))
        many = np.searchsorted(ordered, at_ns)
        before += sign * (many * at_ns - sums[many])
    return before


class _Slowest(NamedTuple):
    lane: Lane
    name: str
    seconds: float
    median: float


def _of_interest(ranks: dict[Lane, Phases], path: CriticalPath | None) -> dict[Lane, str]:
    """Return the slowest rank of each long phase, those that the step waited for, and one in the middle."""
    found: dict[Lane, list[str]] = {}
    by_name = {lane.name: lane for lane in ranks}
    for one in sorted(_slowest(ranks), key=lambda one: -one.seconds)[:NAMED_PHASES]:
        said = f"slowest in {one.name}: {as_text(one.seconds)}, the median rank {as_text(one.median)}"
        found.setdefault(one.lane, []).append(said)
    waited_for = [] if path is None else [segment.lane for segment in path.segments if segment.lane != DRIVER_ROLE]
    for name in dict.fromkeys(name for name in waited_for if name in by_name):
        if len(found) < NAMED_PHASES * 2:
            found.setdefault(by_name[name], []).append("on the critical path")
    busy = {lane: sum(int((rows[:, 1] - rows[:, 0]).sum()) for rows in of.values()) for lane, of in ranks.items()}
    middle = sorted(busy, key=lambda lane: busy[lane])[len(busy) // 2]
    found.setdefault(middle, []).append("the rank with the median time in phases")
    return {lane: "; ".join(found[lane]) for lane in ranks if lane in found}


def _slowest(ranks: dict[Lane, Phases]) -> Iterator[_Slowest]:
    for name in dict.fromkeys(name for of in ranks.values() for name in of):
        seconds = {lane: int((of[name][:, 1] - of[name][:, 0]).sum()) / 1e9 for lane, of in ranks.items() if name in of}
        most = max(seconds, key=lambda lane: seconds[lane])
        yield _Slowest(most, name, seconds[most], float(np.median([*seconds.values()])))


# ---- memory -----------------------------------------------------------------------------------------------------


def _memory(values: RunValues, window: Window) -> tuple[Plot | None, str]:
    """Return who held the bytes of the fullest card, or why nobody knows."""
    card = values.fullest
    if card is None:
        return None, "Who held the memory is not drawn: no process sampled what it holds."
    lane, ledger = values.ledger(card)
    kept = next((one for one in values.timelines if one.lane == lane and one.step == window.step), None)
    device = device_at(
        lane, ledger, kept, card, values.seen, values.windows.of(lane), window.step,
        (window.start_ns, window.end_ns),
    )  # fmt: skip
    if len(device.seconds) < 2 or not len(device.layers):
        return None, f"Who held the memory is not drawn: {card.lane} was not sampled in this time."
    plot = _plot(values, device, lane, window)
    return plot, _how(device, kept, has_dots=bool(plot.dots))


def _plot(values: RunValues, device: Device, lane: Lane, window: Window) -> Plot:
    size = resolution(device.unit)
    dots = [
        Dot(at, value / size, f"NVML at {at:.2f} s: {gibibytes(value)} used")
        for at, value in _sampled(values, lane, window)
    ]
    most = max([float(device.used.max(initial=0)), device.capacity or 0.0, *(dot.y for dot in dots)])
    levels = (
        [Level(device.capacity, f"all of the card: {device.capacity:,.1f} {device.unit}")] if device.capacity else []
    )
    return Plot(
        label=lane.name if lane.rank is not None else "memory",
        tip=f"Memory of {device.name}" + (", the fullest" if len(values.summary.memory) > 1 else ""),
        height=MEMORY,
        y_to=end_of_axis(most),
        y_unit=device.unit,
        xs=device.seconds,
        layers=[Layer(layer.owner, layer.color, layer.area) for layer in device.layers if layer.area.any()],
        dots=dots,
        levels=levels,
        are_values_shown=True,
    )


def _sampled(values: RunValues, lane: Lane, window: Window) -> list[tuple[float, float]]:
    """Return what NVML said in the window: of samples that would be drawn over each other, the largest."""
    line = used_memory(values.seen, lane)
    chosen = line.is_sampled & (line.times_ns >= window.start_ns) & (line.times_ns <= window.end_ns)
    largest: dict[int, tuple[float, float]] = {}
    for at_ns, value in zip(line.times_ns[chosen].tolist(), line.bytes[chosen].tolist(), strict=True):
        at = (at_ns - window.start_ns) / 1e9
        column = int(at / window.seconds * DOTS)
        largest[column] = max(largest.get(column, (at, value)), (at, value), key=lambda point: point[1])
    return list(largest.values())


def _how(device: Device, kept: AllocationTimeline | None, *, has_dots: bool) -> str:
    """Say what the areas rest on."""
    if kept is None:
        return (
            f"Memory is what was held at phase boundaries{'; dots are what NVML saw in between' if has_dots else ''}."
        )
    uncached = "" if kept.reserved_bytes is not None else " Caches are not drawn: they are known at boundaries only."
    return f"Memory of {device.moments}{'; dots are what NVML saw' if has_dots else ''}.{uncached}"
