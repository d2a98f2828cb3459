"""What stands out among many ranks and steps, and what is left out because it is like the rest."""

from __future__ import annotations

from rich.text import Text

from rltrace.analysis.folding import APART, MOST_RANKS, MOST_STEPS, STEP_LENGTH, Apart, ranks_apart, steps_apart
from rltrace.analysis.summary import Folded, Summary
from rltrace.cli.tables import figures

MOST_NAMED = 5
"""So many ranks or steps are named in a line."""


def apart_line(summary: Summary) -> Text | None:
    """Return which of many ranks and steps stand out, and in what; None if there are few."""
    ranks = {process.rank for process in summary.processes if process.rank is not None}
    steps = {step.step for step in summary.steps}
    said = []
    if len(ranks) > MOST_RANKS:
        said.append(_said("rank", ranks_apart(summary), len(ranks)))
    if len(steps) > MOST_STEPS:
        said.append(_said("step", steps_apart(summary), len(steps)))
    return (
        Text.assemble(
            ("What stands out", "bold"), f", {APART:.0f} deviations or more from the median: ", "; ".join(said)
        )
        if said
        else None
    )


def _said(what: str, apart: list[Apart], there: int) -> str:
    if not apart:
        return f"none of {there:,} {what}s"
    named = ", ".join(f"{what} {one.number} ({_value(one)})" for one in apart[:MOST_NAMED])
    more = len(apart) - MOST_NAMED
    return named + (f" and {more:,} more {what}s" if more > 0 else "")


def _value(one: Apart) -> str:
    show = figures.size if one.is_bytes else lambda value: figures.with_unit(figures.seconds(value))
    what = "" if one.of == STEP_LENGTH else f"{one.of} "
    return f"{what}{show(one.value)}, median {show(one.median)}"


def folded_line(found: Folded) -> Text:
    """Return which ranks or steps the sections below have, and how to see another one."""
    one = found.of.removesuffix("s")
    return Text(
        f"The sections below that have something of each {one} have {len(found.kept)} of {found.there:,} {found.of} "
        f"({figures.ranges(found.kept)}): those that stand out, and the first. The others are alike; {found.option} "
        "shows one.",
        "dim",
    )
