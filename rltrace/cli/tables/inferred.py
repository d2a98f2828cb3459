"""What was inferred of a loop that marks no steps and no phases, and how much of a step that explains."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from rltrace.analysis.summary import Summary
from rltrace.cli.tables.fit import Figures, titled
from rltrace.events import STEP


def inferred_line(summary: Summary) -> Text | None:
    """Return one line: what was inferred, and how much of a step is covered; None if nothing was."""
    if not summary.inferred:
        return None
    step = next((found.reason for found in summary.inferred if found.name == STEP), None)
    what = f" from what ran: steps {step}, and phases" if step else " from what ran: phases"
    return Text.assemble(("Inferred", "bold"), what, _covered(summary))


def _covered(summary: Summary) -> str:
    coverage = summary.steady.coverage if summary.steady is not None else None
    if coverage is None:
        return ""
    rest = f"{coverage.unlabelled:.0%} unlabelled, {coverage.idle:.0%} idle"
    return f"; of a step {coverage.phases:.0%} is in phases, {rest}"


def inferred_table(summary: Summary) -> RenderableType:
    """Draw one row per name and reason."""
    table = Figures("name", "inferred from")
    for found in summary.inferred:
        table.add_row(found.name, found.reason)
    return titled("Inferred steps and phases", table)
