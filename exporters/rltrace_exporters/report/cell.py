"""What a notebook shows of a run: one step of every rank, and the findings, as a piece of a page.

It brings its style along, which holds inside of it only, and no script.
"""

from __future__ import annotations

from rltrace.host.garbage_collector import without_collection
from rltrace.read.recording import Recording
from rltrace_exporters.report.blocks import Findings, Note
from rltrace_exporters.report.chart import Chart
from rltrace_exporters.report.found import findings
from rltrace_exporters.report.headline import title_line
from rltrace_exporters.report.one_step import one_step
from rltrace_exporters.report.sections import Block
from rltrace_exporters.report.values import Missing, RunValues, read
from rltrace_exporters.report.writing import Source, environment, source

SHOWN = (Chart, Findings, Note)
"""Kinds of blocks that a cell has room for."""


def html(recording: Recording) -> str:
    """Return the cell of a Recording."""
    with without_collection():
        return written(read(recording))


def written(values: RunValues) -> str:
    """Return the cell of a run."""
    made, missing = _blocks(values)
    template = environment(is_still=True).get_template("cell.html")
    style = Source(source("blocks.css").replace(":root", "&") + source("cell.css"))
    return template.render(style=style, name=values.name, line=title_line(values), made=made, missing=missing).lstrip()


def _blocks(values: RunValues) -> tuple[list[Block], list[str]]:
    """Return what the run has of a step and of findings, and what is said in place of what it lacks."""
    made: list[Block] = []
    missing: list[str] = []
    for section in (one_step, findings):
        try:
            made += [block for block in section(values) if isinstance(block, SHOWN)]
        except Missing as lacking:
            missing.append(str(lacking))
    return [*made, *(Note(f"Doubt: {doubt}") for doubt in values.why.doubts)], missing
