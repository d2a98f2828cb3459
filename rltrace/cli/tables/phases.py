"""Where the seconds of a step went, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.console import RenderableType

from rltrace.analysis.memory import DeviceMemory
from rltrace.analysis.phases import IDLE, RankStep, when
from rltrace.analysis.steady import LaneSteps, Steady, lanes
from rltrace.analysis.summary import Summary
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, bars, titled
from rltrace.events import DRIVER_PHASES, WAIT_DRIVER

DRIVER = "driver"
MOST_LANES = 4
"""More ranks are shown as their mean, fastest and slowest."""


def steady_table(summary: Summary) -> RenderableType | None:
    """A steady step, the ranks together, the first step and the most bytes beside it; None without any phase."""
    rows = [row for row in summary.phases if row.step is not None]
    found = summary.steady
    shown = found.lanes if found is not None else lanes(rows)
    if not shown:
        return None
    first = lanes([row for row in rows if found is not None and row.step == found.first_step])
    ranks = together(shown)
    first_ranks = {lane.lane: lane for lane in first}
    held = most_held(summary.memory)
    table = Figures(
        "phase", "seconds", Column("share", 5), bars(1),
        Column(figures.count(len(ranks), "rank"), 6), Column("slowest", 2),
        Column("first step", 7), Column("most held", 8),
    )  # fmt: skip
    for name in _names(ranks):
        by_lane = sorted((lane.phases[name].mean_seconds, lane.lane) for lane in ranks if name in lane.phases)
        first_mean = _mean(name, [first_ranks[lane.lane] for lane in ranks if lane.lane in first_ranks])
        (least, _), (most, slowest) = by_lane[0], by_lane[-1]
        table.add_row(
            name, *_cells(name, ranks), *_spread_cells(least, most, slowest, len(ranks)), _seconds(first_mean),
            figures.size(held[name]) if name in held else "", style=_style(name),
        )  # fmt: skip
        if name == WAIT_DRIVER:
            _add_driver(table, shown, first_ranks.get(DRIVER))
    table.add_section()
    whole = fmean(lane.seconds.mean_seconds for lane in ranks)
    first_whole = [first_ranks[lane.lane].seconds.mean_seconds for lane in ranks if lane.lane in first_ranks]
    table.add_row(
        "step", figures.seconds(whole), "", "", "", "", figures.seconds(fmean(first_whole)) if first_whole else "",
        style="bold",
    )  # fmt: skip
    return titled(steady_title(summary, found), table, _caption(rows, found))


def steady_title(summary: Summary, found: Steady | None) -> str:
    """Which steps the figures are of, and which they leave out."""
    unfinished = sum(not row.finished for row in summary.phases if row.lane == summary.phases[0].lane)
    if found is None:
        return f"A step: {figures.count(unfinished, 'step')}, none of them over"
    left_out = f"; {found.unfinished_steps} not over, left out" if found.unfinished_steps else ""
    numbers = f"{'step' if len(found.steps) == 1 else 'mean of steps'} {figures.ranges(found.steps)}"
    apart = (
        f", the first one (step {found.first_step}) apart" if found.first_step is not None else ", the first with it"
    )
    return f"A step: {numbers}{apart}{left_out}"


def together(shown: Sequence[LaneSteps]) -> list[LaneSteps]:
    """The lanes that one row can stand for: the ranks; without any, the other processes."""
    ranks = [lane for lane in shown if lane.rank is not None]
    return ranks or [lane for lane in shown if lane.lane != DRIVER] or list(shown)


def most_held(devices: Sequence[DeviceMemory]) -> dict[str, int]:
    """By phase, the most bytes that any device held in a step."""
    held: dict[str, int] = {}
    for moment in (moment for device in devices for moment in device.phases):
        if moment.phase is not None and moment.step is not None:
            held[moment.phase] = max(held.get(moment.phase, 0), moment.used_bytes)
    return held


def lane_table(title: str, rows: Sequence[RankStep]) -> RenderableType:
    """Seconds and share of each phase, one column a rank: a mean over the steps given."""
    found = lanes(rows)
    if len(found) <= MOST_LANES:
        table = Figures("phase", *(column for lane in found for column in (lane.lane, Column("share", 5), bars())))
        for name in _names(found):
            cells = [cell for lane in found for cell in _lane_cells(name, lane)]
            table.add_row(name, *cells, style=_style(name))
    else:
        table = _extremes(together(found))
    whole = f"whole: {figures.seconds(fmean(lane.seconds.mean_seconds for lane in found))} s"
    return titled(title, table, "; ".join(filter(None, [whole, _caption(rows, None)])))


def _extremes(ranks: Sequence[LaneSteps]) -> Figures:
    table = Figures(
        "phase", f"mean of {len(ranks)}", Column("share", 5), bars(1), "fastest", Column("", 3, is_left=True),
        "slowest", Column("", 3, is_left=True),
    )  # fmt: skip
    for name in _names(ranks):
        of_rank = sorted((lane.phases[name].mean_seconds, lane.lane) for lane in ranks if name in lane.phases)
        (fast, fastest), (slow, slowest) = of_rank[0], of_rank[-1]
        table.add_row(
            name, *_cells(name, ranks), figures.seconds(fast), fastest, figures.seconds(slow), slowest,
            style=_style(name),
        )  # fmt: skip
    return table


def _names(shown: Sequence[LaneSteps]) -> list[str]:
    """Phases in their order; waiting for the driver only where somebody does."""
    names = sorted({name for lane in shown for name in lane.phases}, key=when)
    return [name for name in names if name == IDLE or _mean(name, shown)]


def _mean(name: str, shown: Sequence[LaneSteps]) -> float:
    """Over the lanes; 0 where none has it."""
    return fmean(lane.phases[name].mean_seconds if name in lane.phases else 0.0 for lane in shown) if shown else 0.0


def _cells(name: str, shown: Sequence[LaneSteps]) -> tuple[str, str, str]:
    share = fmean(lane.phases[name].share if name in lane.phases else 0.0 for lane in shown)
    return figures.seconds(_mean(name, shown)), f"{share:.0%}", figures.bar(share)


def _spread_cells(least: float, most: float, slowest: str, ranks: int) -> tuple[str, str]:
    if ranks == 1:
        return "", ""
    said = figures.between(figures.seconds(least), figures.seconds(most))
    return said, slowest if "-" in said else ""


def _lane_cells(name: str, lane: LaneSteps) -> tuple[str, str, str]:
    found = lane.phases.get(name)
    if found is None or found.mean_seconds <= 0 or (lane.lane == DRIVER and name == IDLE):  # it waits for its workers
        return "", "", ""
    return figures.seconds(found.mean_seconds), f"{found.share:.0%}", figures.bar(found.share)


def _add_driver(table: Figures, shown: Sequence[LaneSteps], first: LaneSteps | None) -> None:
    """What the driver did while its ranks waited."""
    for driver in (lane for lane in shown if lane.lane == DRIVER):
        for name in (name for name in driver.phases if name in DRIVER_PHASES):
            in_first = _seconds(first.phases[name].mean_seconds) if first is not None and name in first.phases else ""
            table.add_row(f"  {name}", *_lane_cells(name, driver), "", "", in_first, style="dim")


def _seconds(length: float) -> str:
    return figures.seconds(length) if length > 0 else ""


def _style(phase: str) -> str | None:
    return "dim" if phase in (WAIT_DRIVER, IDLE) else None


def _caption(rows: Sequence[RankStep], found: Steady | None) -> str:
    """What is wrong with the rows: phases that overlap, clocks that nobody read."""
    counted = [row for row in rows if found is None or row.step in found.steps]
    parts = []
    if overlap := sum(row.overlap_seconds for row in counted):
        pairs = sorted({" + ".join(pair.phases) for row in counted for pair in row.overlaps})
        parts.append(f"{figures.seconds(overlap)} s counted twice, phases overlap: {', '.join(pairs)}")
    if astray := list(dict.fromkeys(row.lane for row in counted if not row.clock_aligned)):
        parts.append(f"clock of {', '.join(astray)} not aligned: its figures are by real time, error unknown")
    return "; ".join(parts)
