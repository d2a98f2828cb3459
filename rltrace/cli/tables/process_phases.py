"""Phases of a program whose processes have no rank: each may do something else, so none stands for another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from rltrace.analysis.phases import OF_NOBODY, RankStep, Share, in_order
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, bars

CAPTION = "seconds: mean over the processes that were in the phase, in the steps in which they were; idle: the rest"


def is_without_ranks(rows: Sequence[RankStep]) -> bool:
    """Return whether several processes have phases, and none of them is a rank's."""
    return all(row.rank is None for row in rows) and len({row.lane for row in rows}) > 1


def process_phases(
    rows: Sequence[RankStep], first: Sequence[RankStep] = (), held: Mapping[str, int] | None = None
) -> Figures:
    """Draw each phase over the processes that were in it, with their names or their number.

    Args:
        rows: Rows of the steps that the figures describe.
        first: Rows of the first step.
        held: The most bytes by phase.
    """
    table = Figures(
        "phase", "seconds", Column("share", 5), bars(1), Column("who", 6, is_left=True), Column("least-most", 4),
        Column("first step", 7), Column("most held", 8),
    )  # fmt: skip
    for name in in_order(name for row in [*first, *rows] for name in _inside(row)):
        of_first = (
            figures.seconds(fmean(share.seconds for _, share in in_first)) if (in_first := _of(name, first)) else ""
        )
        most = figures.size(held[name]) if held and name in held else ""
        style = "dim" if name in OF_NOBODY else None
        table.add_row(name, *_cells(_of(name, rows)), of_first, most, style=style)
    whole = "step" if any(row.step is not None for row in rows) else "total"
    table.add_row(whole, _whole(rows), "", "", "", _spread([row.seconds for row in rows]), _whole(first), style="bold")
    return table


def _whole(rows: Sequence[RankStep]) -> str:
    return figures.seconds(fmean(row.seconds for row in rows)) if rows else ""


def _inside(row: RankStep) -> list[str]:
    """Return a process's time in phases during a step; nothing if it was in none, because it may not have existed."""
    inside = [name for name, share in row.phases.items() if share.seconds > 0]
    return inside if any(name not in OF_NOBODY for name in inside) else []


def _of(name: str, rows: Sequence[RankStep]) -> list[tuple[str, Share]]:
    """Return the steps in which a process was in a phase, each with the process."""
    return [(row.lane, row.phases[name]) for row in rows if name in _inside(row)]


def _cells(of: Sequence[tuple[str, Share]]) -> tuple[str, ...]:
    if not of:
        return "", "", "", "", ""
    lengths = [share.seconds for _, share in of]
    share = fmean(share.share for _, share in of)
    who = list(dict.fromkeys(lane for lane, _ in of))
    said = who[0] if len(who) == 1 else figures.count(len(who), "process")
    return figures.seconds(fmean(lengths)), f"{share:.0%}", figures.bar(share), said, _spread(lengths)


def _spread(lengths: Sequence[float]) -> str:
    """Write a range from the least to the most; nothing if they are alike."""
    said = figures.spread(lengths) if lengths else ""
    return said if "-" in said else ""
