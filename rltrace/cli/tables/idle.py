"""Between which phases the ranks were idle, and what went on meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from rltrace.analysis.idle import STEADY_STEP, IdleGap
from rltrace.analysis.summary import Summary
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, titled, words

SLIGHT_SECONDS = 0.001
"""What is shorter has no row."""
NOTABLE, MOST = 0.1, 2
"""Of what went on meanwhile: which share of the gap it has to take, and how many are named of each."""
NOTABLE_IDLE = 0.05
"""Of a step, from which on the first screen says where it is."""
CAPTION = (
    "of it others: another rank was in a phase; meanwhile: the span, or the actor's method, that each had opened last"
)


class _Row:
    """A mean over the lanes."""

    def __init__(self, items: Sequence[IdleGap], lanes: int) -> None:
        self.after, self.before = items[0].after, items[0].before
        self.seconds = sum(item.seconds for item in items) / lanes
        self.others_seconds = sum(item.others_seconds for item in items) / lanes
        self._lanes = lanes
        self._meanwhile = {
            "driver": [item.driver_seconds for item in items],
            "rank" if items[0].rank is not None else "itself": [item.own_seconds for item in items],
            "elsewhere": [item.elsewhere_seconds for item in items],
        }

    def meanwhile(self) -> str:
        """What took most, of each."""
        said = {who: ", ".join(self._longest(each)) for who, each in self._meanwhile.items()}
        return "; ".join(f"{who} {names}" for who, names in said.items() if names)

    def _longest(self, each: Sequence[Mapping[str, float]]) -> list[str]:
        seconds: defaultdict[str, float] = defaultdict(float)
        for name, length in (item for named in each for item in named.items()):
            seconds[name] += length / self._lanes
        longest = sorted(seconds.items(), key=lambda item: -item[1])[:MOST]
        return [f"{name} {figures.seconds(length)}" for name, length in longest if length >= NOTABLE * self.seconds]


def idle_tables(steps: str, of: str, found: Sequence[IdleGap]) -> Iterator[RenderableType]:
    """One, what took most first; none where nothing took a millisecond.

    Args:
        steps: How to call them.
        of: Which ones, as of `IdleGap`.
        found: Of all steps and lanes.
    """
    chosen = [gap for gap in found if gap.of == of]
    rows = sorted(_rows(chosen), key=lambda row: -row.seconds)
    shown = [row for row in rows if row.seconds >= SLIGHT_SECONDS]
    if not shown:
        return
    table = Figures("idle between", "seconds", Column("of it others", 5), words("meanwhile", 7))
    for row in shown:
        others = figures.seconds(row.others_seconds) if row.others_seconds >= SLIGHT_SECONDS else ""
        between = f"{row.after or 'begin'} → {row.before or 'end'}"
        table.add_row(between, figures.seconds(row.seconds), others, row.meanwhile())
    if slight := rows[len(shown) :]:
        table.add_row(f"{len(slight)} shorter", figures.seconds(sum(row.seconds for row in slight)), style="dim")
    table.add_row("idle", figures.seconds(sum(row.seconds for row in rows)), style="bold")
    lanes = {gap.lane: gap.rank for gap in chosen}
    of_whom = figures.count(len(lanes), "process" if None in lanes.values() else "rank")
    yield titled(f"Idle{', ' if steps else ''}{steps}: mean of {of_whom}", table, CAPTION)


def idle_line(summary: Summary) -> Text | None:
    """One line, where most of it is; None where it is no notable part of a step."""
    rows = _rows([gap for gap in summary.idle if gap.of == STEADY_STEP])
    seconds = sum(row.seconds for row in rows)
    if summary.steady is None or not rows or seconds < NOTABLE_IDLE * summary.steady.seconds.mean_seconds:
        return None
    longest = max(rows, key=lambda row: row.seconds)
    parts = figures.with_unit(f"{figures.seconds(longest.seconds)} of {figures.seconds(seconds)}")
    where = f"from {longest.after or 'its begin'} to {longest.before or 'its end'}"
    return Text.assemble(("Idle", "bold"), f" in a step {parts} {where}")


def _rows(found: Sequence[IdleGap]) -> list[_Row]:
    alike: dict[tuple[str | None, str | None], list[IdleGap]] = {}
    for gap in found:
        alike.setdefault((gap.after, gap.before), []).append(gap)
    lanes = len({gap.lane for gap in found})
    return [_Row(items, lanes) for items in alike.values()]
