"""Where the seconds of a step went, phase by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from rich.console import RenderableType

from rltrace.analysis.folding import steps_apart
from rltrace.analysis.lanes import DRIVER_ROLE
from rltrace.analysis.memory import DeviceMemory
from rltrace.analysis.phases import IDLE, OF_NOBODY, RankStep, in_order
from rltrace.analysis.steady import LaneSteps, Steady, lanes, together
from rltrace.analysis.summary import Summary
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, bars, titled
from rltrace.cli.tables.process_phases import CAPTION, is_without_ranks, process_phases
from rltrace.cli.tables.steps import brief_words, by_lane, in_short, of_processes
from rltrace.events import DRIVER_PHASES, WAIT_DRIVER

SLIGHT = 0.001
"""Share of a step below which a phase has no row on the first screen."""
STARTUP_IDLE = "start-up: before the first phase, while processes start and import"
MOST_LANES = 4
"""More ranks than this are shown as their mean, fastest and slowest."""


def steady_table(summary: Summary, *, whole: bool = False) -> RenderableType | None:
    """Draw a steady step, the ranks together, with the first step and the peak bytes beside it; None without any phase.

    Args:
        summary: Figures of the Recording.
        whole: Show the slowest rank of each phase, and a row for the slightest phase too.
    """
    rows = [row for row in summary.phases if row.step is not None]
    found = summary.steady
    shown = found.lanes if found is not None else lanes(rows)
    if not shown:
        return None
    of_first = [row for row in rows if row.finished and not row.steady]
    of_steady = [row for row in rows if row.steady or found is None]
    title, wrong = steady_title(summary, found), "; ".join(filter(None, [_overlapping(summary), _caption(of_steady)]))
    if is_without_ranks(of_steady):
        processes = process_phases(of_steady, of_first, most_held(summary.memory))
        return titled(title, processes, "; ".join(filter(None, [CAPTION, wrong])))
    ranks = together(shown)
    table, slight = _rank_table(shown, lanes(of_first), most_held(summary.memory), whole=whole)
    others = [lane.lane for lane in shown if lane not in ranks and lane.lane != DRIVER_ROLE]
    also = f"{', '.join(others)} also had phases: see --all" if others else ""
    less = f"Below {SLIGHT:.1%}: {', '.join(slight)}" if slight else ""
    return titled(title, table, "; ".join(filter(None, [less, wrong, also])))


def _rank_table(
    shown: Sequence[LaneSteps], first: Sequence[LaneSteps], held: Mapping[str, int], *, whole: bool
) -> tuple[Figures, list[str]]:
    """Draw the ranks together and what the driver did while they waited; also return the seconds of phases without a
    row."""
    ranks = together(shown)
    slowest = [Column("slowest", 2)] if whole else []
    table = Figures(
        "phase", "seconds", Column("share", 5), bars(1), Column(figures.count(len(ranks), "rank"), 6), *slowest,
        Column("first step", 7), Column("most held", 8),
    )  # fmt: skip
    slight = []
    for name, of, of_first, is_of_driver in _named_rows(shown, first):
        if not whole and _share(name, of) < SLIGHT:
            slight.append(f"{name} {figures.with_unit(figures.seconds(_mean(name, of)))}")
            continue
        spread = ("", "") if is_of_driver else _spread_cells(name, ranks)
        most = figures.size(held[name]) if name in held and not is_of_driver else ""
        table.add_row(
            f"  {name}" if is_of_driver else name, *_cells(name, of), *spread[: 1 + len(slowest)],
            _seconds(_mean(name, of_first)), most, style="dim" if is_of_driver else _style(name),
        )  # fmt: skip
    of_step = "", "", "", *[""] * len(slowest)
    table.add_row("step", _whole(ranks), *of_step, _whole(together(first)), style="bold")
    return table, slight


def _named_rows(
    shown: Sequence[LaneSteps], first: Sequence[LaneSteps]
) -> Iterator[tuple[str, Sequence[LaneSteps], Sequence[LaneSteps], bool]]:
    """Return phases in their order, whose they are, and the first step's; what the driver did is below the waiting."""
    ranks, first_ranks = together(shown), together(first)
    driver = [lane for lane in shown if lane.lane == DRIVER_ROLE]
    for name in _names(ranks):
        yield name, ranks, first_ranks, False
        if name == WAIT_DRIVER:
            for own in (own for lane in driver for own in lane.phases if own in DRIVER_PHASES):
                yield own, driver, [lane for lane in first if lane.lane == DRIVER_ROLE], True


def _whole(shown: Sequence[LaneSteps]) -> str:
    return figures.seconds(fmean(lane.seconds.mean_seconds for lane in shown)) if shown else ""


def steady_title(summary: Summary, found: Steady | None) -> str:
    """Return which steps the figures describe, and which are left out."""
    if found is None:
        unfinished = sum(not row.finished for row in summary.phases if row.lane == summary.phases[0].lane)
        return f"Unfinished step{'' if unfinished == 1 else 's'} ({unfinished:,}): none has ended yet"
    numbers, excluded = figures.ranges(found.steps).replace("-", "–"), []
    if any(step.inferred for step in summary.steps):
        excluded.append("inferred")
    if found.first_step is not None:
        excluded.append(f"step {found.first_step} excluded as warm-up")
    elif found.has_first:
        excluded.append("the first, which includes warm-up" if len(found.steps) == 1 else "warm-up included")
    if summary.earlier_steps_lost:
        excluded.append("earlier steps may be gone")
    excluded += [*_left_out(summary), *_in_brief(summary)]
    if len(found.steps) == 1:
        said = f" ({'; '.join(excluded)})" if excluded else ""
        return f"Step {numbers}{of_processes(summary.steps)}{said}"
    return f"Mean step{of_processes(summary.steps)} ({'; '.join([numbers, *excluded])})"


def _left_out(summary: Summary) -> list[str]:
    """Return how many steps are excluded because they did not end well."""
    counts = {
        "aborted": sum(step.error is not None for step in summary.steps),
        "unfinished": sum(step.error is None and step.end_seconds is None for step in summary.steps),
    }
    said = " and ".join(f"{count} {how}" for how, count in counts.items() if count)
    return [f"{said} excluded"] if said else []


def _in_brief(summary: Summary) -> list[str]:
    """Return how many steps are excluded because they are in brief, or what that means if those are all there are."""
    if counted := [step for step in summary.steps if step.steady and step.brief]:
        return [f"{brief_words(counted)}: other spans were not kept, so idle may be work"]
    first = summary.steady.first_step if summary.steady is not None else None
    brief = [step for step in summary.steps if step.brief and step.step != first]
    return [f"{len(brief):,} {brief_words(brief)}, excluded"] if brief else []


def steady_words(found: Steady) -> str:
    """Return how a table's title calls those steps."""
    if not found.has_first:
        return "steady steps"
    return f"{'step' if len(found.steps) == 1 else 'steps'} {figures.ranges(found.steps)}"


def has_phases_by_step(summary: Summary) -> bool:
    """Whether there are several steps to compare, all of them the run's."""
    return len(_compared_steps(summary)) >= 2 and len(by_lane(summary.steps)) <= 1


def _compared_steps(summary: Summary) -> list[list[RankStep]]:
    """The steps that are over, of the ranks, else of all but the driver, else of the driver."""
    over = [row for row in summary.phases if row.step is not None and row.finished]
    ranks = [row for row in over if row.rank is not None]
    return _by_step(ranks or [row for row in over if row.lane != DRIVER_ROLE] or over)


def phases_by_step(summary: Summary) -> RenderableType | None:
    """Draw one row per finished step, with its phases as means over the ranks.

    None for a single step, which the mean shows as well, and if processes have steps of their own.
    """
    if not has_phases_by_step(summary):
        return None
    steps = _compared_steps(summary)
    ranks = [row for rows in steps for row in rows if row.rank is not None]
    names = in_order(name for rows in steps for row in rows for name, own in row.phases.items() if own.seconds)
    table = Figures("step", "seconds", *(str(number) for number in range(1, len(names) + 1)))
    apart = {one.number for one in steps_apart(summary)}
    for part in in_short(steps, [rows[0].step or 0 for rows in steps], apart):
        if part.begins_part:
            table.add_section()
        rows = [row for of_step in part.items for row in of_step]
        seconds = (fmean(row.phases[name].seconds if name in row.phases else 0.0 for row in rows) for name in names)
        whole = figures.seconds(fmean(row.seconds for row in rows))
        table.add_row(part.label, whole, *(figures.seconds(length) if length else "·" for length in seconds))
    many = len({_whose(row) for rows in steps for row in rows})
    whose = figures.count(many, "rank" if ranks else "process")
    legend = "  ".join(f"{number} {name}" for number, name in enumerate(names, 1))
    return titled(f"Phases of each step: mean of {whose}", table, legend)


def _by_step(rows: Sequence[RankStep]) -> list[list[RankStep]]:
    """Return for each step a row per lane; a number that occurs twice belongs to two steps."""
    met: Counter[tuple[object, ...]] = Counter()
    steps: dict[tuple[int | None, int], list[RankStep]] = {}
    for row in rows:
        own = (*_whose(row), row.step)
        steps.setdefault((row.step, met[own]), []).append(row)
        met[own] += 1
    return list(steps.values())


def _whose(row: RankStep) -> tuple[str, str | None, str | None]:
    return row.lane, row.host, row.device


def most_held(devices: Sequence[DeviceMemory]) -> dict[str, int]:
    """Return by phase the most bytes that any device held in a step."""
    held: dict[str, int] = {}
    for moment in (moment for device in devices for moment in device.phases):
        if moment.phase is not None and moment.step is not None:
            held[moment.phase] = max(held.get(moment.phase, 0), moment.used_bytes)
    return held


def lane_tables(title: str, rows: Sequence[RankStep], also: str = "") -> Iterator[RenderableType]:
    """Draw seconds and share of each phase, one column per rank, as a mean over the steps given; `also` is said below
    it."""
    found = lanes(rows)
    if not found:
        return
    if len(found) <= MOST_LANES:
        yield titled(title, _side_by_side(found), _whole_caption(found, rows, also))
        return
    if is_without_ranks(rows):
        yield titled(title, process_phases(rows), "; ".join(filter(None, [CAPTION, _caption(rows), also])))
        return
    ranks = together(found)
    yield titled(title, _extremes(ranks), _whole_caption(ranks, rows, also))
    others = [lane for lane in found if lane not in ranks and any(any(_lane_cells(name, lane)) for name in lane.phases)]
    if others:
        yield titled(f"{title}: the others", _side_by_side(others))


def _whole_caption(found: Sequence[LaneSteps], rows: Sequence[RankStep], also: str) -> str:
    whole = figures.spread([lane.seconds.mean_seconds for lane in found])
    return "; ".join(filter(None, [f"total: {figures.with_unit(whole)}", _caption(rows), also]))


def _side_by_side(found: Sequence[LaneSteps]) -> Figures:
    table = Figures("phase", *(column for lane in found for column in (lane.lane, Column("share", 5), bars())))
    for name in _names(found):
        cells = [cell for lane in found for cell in _lane_cells(name, lane)]
        if any(cells):
            table.add_row(name, *cells, style=_style(name))
    return table


def _extremes(ranks: Sequence[LaneSteps]) -> Figures:
    table = Figures(
        "phase", f"mean of {len(ranks)}", Column("share", 5), bars(1), "fastest", Column("", 3, is_left=True),
        "slowest", Column("", 3, is_left=True),
    )  # fmt: skip
    for name in _names(ranks):
        (fast, fastest), (slow, slowest) = _least_and_most(name, ranks)
        cells = *_cells(name, ranks), figures.seconds(fast), fastest, figures.seconds(slow), slowest
        table.add_row(name, *cells, style=_style(name))
    return table


def _least_and_most(name: str, shown: Sequence[LaneSteps]) -> tuple[tuple[float, str], tuple[float, str]]:
    """Return least and most of a phase, each with its lane."""
    of_lane = sorted((_mean(name, [lane]), lane.lane) for lane in shown)
    return of_lane[0], of_lane[-1]


def _names(shown: Sequence[LaneSteps]) -> list[str]:
    """Return phases in their order; waiting for the driver only if somebody waits."""
    names = in_order(name for lane in shown for name in lane.phases)
    return [name for name in names if name == IDLE or _mean(name, shown)]


def _mean(name: str, shown: Sequence[LaneSteps]) -> float:
    """Return the mean over the lanes; 0 if none has it."""
    return fmean(lane.phases[name].mean_seconds if name in lane.phases else 0.0 for lane in shown) if shown else 0.0


def _share(name: str, shown: Sequence[LaneSteps]) -> float:
    return fmean(lane.phases[name].share if name in lane.phases else 0.0 for lane in shown)


def _cells(name: str, shown: Sequence[LaneSteps]) -> tuple[str, str, str]:
    share = _share(name, shown)
    return figures.seconds(_mean(name, shown)), f"{share:.0%}", figures.bar(share)


def _spread_cells(name: str, ranks: Sequence[LaneSteps]) -> tuple[str, str]:
    """Return fastest and slowest, and which lane that is if they differ."""
    (least, _), (most, slowest) = _least_and_most(name, ranks)
    if len(ranks) == 1:
        return "", ""
    said = figures.between_seconds(least, most)
    return said, slowest if "-" in said else ""


def _lane_cells(name: str, lane: LaneSteps) -> tuple[str, str, str]:
    found = lane.phases.get(name)
    waits_for_workers = lane.lane == DRIVER_ROLE and name == IDLE
    if found is None or found.mean_seconds <= 0 or waits_for_workers:
        return "", "", ""
    return figures.seconds(found.mean_seconds), f"{found.share:.0%}", figures.bar(found.share)


def _seconds(length: float) -> str:
    return figures.seconds(length) if length > 0 else ""


def _style(phase: str) -> str | None:
    return "dim" if phase in OF_NOBODY else None


def _overlapping(summary: Summary) -> str:
    """Return whether steps overlap, as in several threads or a pipeline."""
    for steps in by_lane(summary.steps).values():
        for one, following in pairwise(steps):
            if one.end_seconds is not None and one.end_seconds > following.start_seconds:
                return "steps overlap: each is counted until the next one begins"
    return ""


def _caption(rows: Sequence[RankStep]) -> str:
    """Return what is wrong with the rows: phases that overlap, clocks that nobody read."""
    parts = []
    if overlap := sum(row.overlap_seconds for row in rows):
        pairs = sorted({" + ".join(pair.phases) for row in rows for pair in row.overlaps})
        parts.append(
            f"{figures.with_unit(figures.seconds(overlap))} counted twice because phases overlap: {', '.join(pairs)}"
        )
    if astray := list(dict.fromkeys(row.lane for row in rows if not row.clock_aligned)):
        parts.append(f"the clock of {', '.join(astray)} is not aligned: the error of its times is unknown")
    return "; ".join(parts)
