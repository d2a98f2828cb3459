"""The plan of a run: who holds what in each phase, how far each setting can go, and what is not known."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from rltrace.analysis.plan.plan import Plan
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, titled, visible_figures, words


def show_plan(found: Plan, console: Console) -> None:
    """Print a plan."""
    found = visible_figures(found)
    console.print(Text("\n".join(_headline(found))))
    console.print()
    console.print(titled("One GPU's memory by owner", _owner_table(found)))
    console.print()
    console.print(titled("By phase, each at its peak", _phase_table(found)))
    console.print()
    console.print(titled("How far each setting can go while the others stay", _ceiling_table(found)))
    console.print(Text("\n".join(_remarks(found)), "dim"))


def _headline(found: Plan) -> Iterator[str]:
    ranks = figures.count(found.ranks, "GPU")
    yield (
        f"{found.framework} · {found.parameters:,} parameters · {ranks} · {found.card}, "
        f"{figures.size(found.card_bytes)}"
    )
    yield (
        f"{found.verdict}: peak {figures.size(found.peak_bytes)} ± {figures.size(found.uncertainty_bytes)} in "
        f"{found.peak_phase}, {figures.size(found.headroom_bytes)} left on each GPU"
    )


def _owner_table(found: Plan) -> Figures:
    table = Figures(
        Column("owner", is_left=True),
        "at the peak",
        Column("", is_left=True, worth=3),
        "±",
        "own peak",
        Column("in", is_left=True),
    )
    for name, owner in found.owners.items():
        table.add_row(
            name,
            figures.size(owner.bytes),
            figures.bar(owner.bytes / found.card_bytes),
            figures.size(owner.uncertainty_bytes),
            figures.size(owner.peak_bytes),
            owner.peak_phase,
        )
    return table


def _phase_table(found: Plan) -> Figures:
    table = Figures(
        Column("phase", is_left=True),
        "used",
        "±",
        "at least",
        "left",
        Column("", is_left=True, worth=3),
        Column("seconds", worth=2),
    )
    lasting = {one.phase: figures.between_seconds(one.least_seconds, one.most_seconds) for one in found.durations}
    for phase in found.phases:
        table.add_row(
            phase.phase,
            figures.size(phase.used_bytes),
            figures.size(phase.uncertainty_bytes),
            figures.size(phase.least_bytes),
            figures.size(phase.free_bytes),
            figures.bar(phase.used_bytes / found.card_bytes),
            lasting.get(phase.phase, ""),
        )
    return table


def _ceiling_table(found: Plan) -> Figures:
    table = Figures(
        Column("setting", is_left=True),
        "now",
        "largest",
        "recommended",
        words("then full", worth=1),
    )
    for one in found.ceilings:
        unit = f" {one.unit}" if one.unit and one.unit != "tokens" else ""
        written = [
            f"{figures.number(value)}{unit}" if value is not None else "none"
            for value in (one.now, one.largest, one.recommended)
        ]
        table.add_row(one.setting, *written, one.limited_by)
    return table


def _remarks(found: Plan) -> Iterator[str]:
    margin = max((one.margin_bytes for one in found.ceilings), default=0)
    yield (
        f"largest: without a margin; recommended: {figures.size(margin)} stay free, which is how far the peak may be "
        "off, and at least 2 % of the card"
    )
    yield "at least: what stays if torch gives back its cache, as it does before memory runs out"
    if found.recording is not None:
        yield f"taken from {found.recording}: what does not follow from shapes"
    for one in found.unknown:
        yield f"not known: {one}"
