"""Limits of a run: one line each, those that broke first."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rltrace.analysis.checks import BROKEN, OK, UNJUDGED, Checked
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import visible_figures

STYLES = {BROKEN: "bold red", UNJUDGED: "yellow", OK: "green"}


def show_checks(found: Checked, screen: Console) -> None:
    """Print the limits, and how many of them are broken."""
    found = visible_figures(found)
    against = f" · compared with {found.baseline}" if found.baseline is not None else ""
    screen.print(Text.assemble((found.path, "bold"), against, overflow="fold"))
    table = Table(box=None, pad_edge=False, show_header=False)
    for one in sorted(found.checks, key=lambda one: list(STYLES).index(one.state)):
        state = Text(one.state, STYLES[one.state])
        table.add_row(state, Text(one.name, "bold", no_wrap=True), Text(one.said, overflow="fold"))
    screen.print(table)
    for note in found.notes:
        screen.print(Text(note, "dim"))
    screen.print(verdict(found))


def verdict(found: Checked) -> Text:
    """Say in one line how it ended."""
    many = {state: sum(one.state == state for one in found.checks) for state in STYLES}
    if many[BROKEN]:
        return Text(f"{figures.count(many[BROKEN], 'limit')} broken, of {len(found.checks)}", STYLES[BROKEN])
    if many[UNJUDGED]:
        said = f"{many[UNJUDGED]} of {len(found.checks)} cannot be judged; no limit is broken"
        return Text(said, STYLES[UNJUDGED])
    return Text("no limit is broken", STYLES[OK])
