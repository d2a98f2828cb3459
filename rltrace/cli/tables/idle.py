"""Between which phases the ranks were idle, and what went on meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from rltrace.analysis.idle import RUN, STARTUP, STEADY_STEP, IdleGap
from rltrace.analysis.lanes import DRIVER_ROLE
from rltrace.analysis.phases import RankStep
from rltrace.analysis.summary import Summary
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, titled, words

SLIGHT_SECONDS = 0.001
"""Shorter gaps have no row."""
NOTABLE, MOST = 0.1, 2
"""Which share of the gap something must take to be named, and how many of each are named."""
NOTABLE_IDLE = 0.05
"""Share of a step from which on the first screen says where the idle time is."""
COMPUTED = "unlabelled: it computed, but in no phase"
OTHERS = "others busy: another rank was in a phase"
ENDS = {STARTUP: ("run begins", "first step begins"), RUN: ("run begins", "run ends")}
"""What is before and after the first and the last gap; elsewhere a step begins and ends."""
MEANWHILE = "meanwhile: the span, or the actor's method, that each had opened last in the step"


class _Row:
    """A mean over the lanes; those that have no such gap count as 0."""

    def __init__(self, items: Sequence[IdleGap], lanes: int) -> None:
        self.after, self.before = items[0].after, items[0].before
        self.seconds = sum(item.seconds for item in items) / lanes
        self.unlabelled_seconds = sum(item.unlabelled_seconds for item in items) / lanes
        self.others_seconds = sum(item.others_seconds for item in items) / lanes
        self._lanes = lanes
        self._ends = ENDS.get(items[0].of, ("step begins", "step ends"))
        self._meanwhile = {
            "driver": [item.driver_seconds for item in items],
            "rank" if items[0].rank is not None else "itself": [item.own_seconds for item in items],
            "elsewhere": [item.elsewhere_seconds for item in items],
        }

    @property
    def idle_seconds(self) -> float:
        """Return the part in which nothing computed."""
        return self.seconds - self.unlabelled_seconds

    def cells(self) -> list[str]:
        parts = (self.unlabelled_seconds, self.others_seconds)
        unlabelled, others = (figures.seconds(part) if part >= SLIGHT_SECONDS else "" for part in parts)
        between = f"{self.after or self._ends[0]} → {self.before or self._ends[1]}"
        return [between, figures.seconds(self.seconds), unlabelled, others, self._said()]

    def _said(self) -> str:
        """Return what took most, of each."""
        said = {who: ", ".join(self._longest(each)) for who, each in self._meanwhile.items()}
        return "; ".join(f"{who} {names}" for who, names in said.items() if names)

    def _longest(self, each: Sequence[Mapping[str, float]]) -> list[str]:
        seconds: defaultdict[str, float] = defaultdict(float)
        for name, length in (item for named in each for item in named.items()):
            seconds[name] += length / self._lanes
        longest = sorted(seconds.items(), key=lambda item: -item[1])[:MOST]
        return [f"{name} {figures.seconds(length)}" for name, length in longest if length >= NOTABLE * self.seconds]


def idle_tables(steps: str, of: str, summary: Summary) -> Iterator[RenderableType]:
    """Draw a table with the longest gaps first; none if nothing took a millisecond.

    Args:
        steps: What the steps are called.
        of: Which gaps, as in `IdleGap`.
        summary: Figures of the Recording.
    """
    rows = _rows(summary, of)
    shown = [row for row in rows if row.seconds >= SLIGHT_SECONDS]
    if not shown:
        return
    table = Figures(
        "in no phase between", "seconds", Column("unlabelled", 6), Column("others busy", 5), words("meanwhile", 7)
    )
    cells = [row.cells() for row in shown]
    for of_row in cells:
        table.add_row(*of_row)
    if slight := rows[len(shown) :]:
        table.add_row(f"{len(slight)} shorter", figures.seconds(sum(row.seconds for row in slight)), style="dim")
    unlabelled = sum(row.unlabelled_seconds for row in rows)
    said = figures.seconds(unlabelled) if unlabelled >= SLIGHT_SECONDS else ""
    table.add_row("in no phase", figures.seconds(sum(row.seconds for row in rows)), said, style="bold")
    captions = zip((COMPUTED, OTHERS, MEANWHILE), zip(*(of_row[2:] for of_row in cells), strict=True), strict=True)
    lanes = _lanes(summary)
    whose = (
        f"mean of {figures.count(len(lanes), 'rank' if all(lane.rank is not None for lane in lanes) else 'process')}"
    )
    title = ", ".join(filter(None, ["Idle and unlabelled", steps]))
    yield titled(f"{title}: {whose}", table, "; ".join(caption for caption, said in captions if any(said)))


def idle_line(summary: Summary) -> Text | None:
    """Return one line that says where most idle time is; None if it is no notable part of a step."""
    rows = _rows(summary, STEADY_STEP)
    seconds = sum(row.idle_seconds for row in rows)
    if summary.steady is None or not rows or seconds < NOTABLE_IDLE * summary.steady.seconds.mean_seconds:
        return None
    longest = max(rows, key=lambda row: row.idle_seconds)
    parts = figures.with_unit(f"{figures.seconds(longest.idle_seconds)} of {figures.seconds(seconds)}")
    begin, end = longest.after or "the step's beginning", longest.before or "the step's end"
    return Text.assemble(("Idle", "bold"), f" in a step {parts} from {begin} to {end}")


def _rows(summary: Summary, of: str) -> list[_Row]:
    """Return the rows, the longest first."""
    alike: dict[tuple[str | None, str | None], list[IdleGap]] = {}
    for gap in summary.idle:
        if gap.of == of:
            alike.setdefault((gap.after, gap.before), []).append(gap)
    lanes = len(_lanes(summary))
    return sorted((_Row(items, lanes) for items in alike.values()), key=lambda row: -row.seconds)


def _lanes(summary: Summary) -> list[RankStep]:
    """Return a row of each lane that has gaps, or could have."""
    of_lane = {(row.lane, row.host, row.device): row for row in summary.phases}
    ranks = [row for row in of_lane.values() if row.rank is not None]
    return ranks or [row for row in of_lane.values() if row.lane != DRIVER_ROLE] or list(of_lane.values())
