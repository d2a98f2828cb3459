"""Puts a page together: the title, and every section of one run or of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rltrace.analysis.difference import Difference, difference, same_program, settings
from rltrace_exporters.report.blocks import Bars, Findings
from rltrace_exporters.report.chart import Chart, sharing_axes
from rltrace_exporters.report.difference import changes
from rltrace_exporters.report.found import findings
from rltrace_exporters.report.gpu_time import gpu_time
from rltrace_exporters.report.headline import key_figures, title_line
from rltrace_exporters.report.memory_by_phase import memory_by_phase
from rltrace_exporters.report.one_step import one_step
from rltrace_exporters.report.redaction import Redaction
from rltrace_exporters.report.rollout import rollout
from rltrace_exporters.report.sections import Block, Section
from rltrace_exporters.report.steps_over_time import steps_over_time
from rltrace_exporters.report.trust import trust
from rltrace_exporters.report.values import Missing, RunValues
from rltrace_exporters.report.weight_sync import weight_sync
from rltrace_exporters.report.where_a_step_goes import where_a_step_goes

SECTIONS = (
    Section("findings", "Findings", "What bounds a step, what it costs, and what to change.", findings),
    Section("step", "One step", "What every rank did, and who held the memory at the same moment.", one_step),
    Section("steps", "Steps over time", "Whether steps are alike, and which phase made one longer.", steps_over_time),
    Section("phases", "Where a step goes", "Seconds by phase, and how ranks and steps differ.", where_a_step_goes),
    Section("sync", "Weight sync", "What the way of the weights to the engine takes.", weight_sync),
    Section("memory", "Memory by phase", "True peaks, who holds them, and what is left of the card.", memory_by_phase),
    Section("rollout", "Rollout", "How long requests take, how long answers are, and how they queue.", rollout),
    Section("gpus", "GPU time", "Busy, communicating, and communicating with nothing beside it.", gpu_time),
    Section("trust", "Trust", "What these figures rest on, and what they lack.", trust),
)
"""In the order of the page."""

SIDES = ("A", "B")


class Panel(NamedTuple):
    """A section of one run."""

    side: str
    """`A` or `B` if the page has two runs."""
    missing: str
    """Why there is nothing to show; empty if there is."""
    blocks: list[Block]


class Part(NamedTuple):
    """A section of all runs of the page."""

    id: str
    title: str
    question: str
    panels: list[Panel]


class Head(NamedTuple):
    """One run of the page."""

    side: str
    name: str
    line: str
    command: str
    """Its command line; empty if nobody knows it, or it is not to be shared."""
    blocks: list[Block]


class Page(NamedTuple):
    """All that the template writes."""

    title: str
    heads: list[Head]
    parts: list[Part]
    is_shared: bool


def page(runs: Sequence[RunValues], *, is_shared: bool = False) -> Page:
    """Return the page of one run, or of two side by side.

    Args:
        runs: One run or two.
        is_shared: Leave out the command line, and host and user names.
    """
    sides = SIDES if len(runs) > 1 else ("",)
    parts = [_part(section, runs, sides) for section in SECTIONS]
    if len(runs) > 1:
        parts.insert(0, _changes(runs))
    names = [values.name for values in runs]
    made = Page(
        title=" and ".join(names),
        heads=[_head(values, side, is_shared=is_shared) for values, side in zip(runs, sides, strict=True)],
        parts=parts,
        is_shared=is_shared,
    )
    return Redaction(runs).of(made) if is_shared else made


def _head(values: RunValues, side: str, *, is_shared: bool) -> Head:
    command = "" if is_shared else " ".join(values.summary.run.command)
    return Head(side, values.name, title_line(values), command, key_figures(values))


def _part(section: Section, runs: Sequence[RunValues], sides: Sequence[str]) -> Part:
    panels = [_panel(section, values, side) for values, side in zip(runs, sides, strict=True)]
    return Part(section.id, section.title, section.question, _side_by_side(panels))


def _panel(section: Section, values: RunValues, side: str) -> Panel:
    try:
        return Panel(side, "", section.make(values))
    except Missing as missing:
        return Panel(side, str(missing), [])


def _changes(runs: Sequence[RunValues]) -> Part:
    """Return what differs between two runs."""
    return Part("changes", "What changed", "From A to B.", [Panel("", "", changes(_difference(*runs)))])


def _difference(a: RunValues, b: RunValues) -> Difference:
    made = a.manifest, b.manifest
    return difference(
        a.summary, b.summary, settings(*made), same_program=same_program(*made), whys=(a.why, b.why)
    )  # fmt: skip


def _side_by_side(panels: list[Panel]) -> list[Panel]:
    """Return panels of two runs with findings folded, and with the same axes for charts of one place."""
    if len(panels) < 2:
        return panels
    blocks = [[_folded(block) for block in panel.blocks] for panel in panels]
    for kind in (Chart, Bars):
        places = [[place for place, block in enumerate(of) if isinstance(block, kind)] for of in blocks]
        for pair in zip(*places, strict=False):
            alike = _alike([of[place] for of, place in zip(blocks, pair, strict=True)])
            for of, place, block in zip(blocks, pair, alike, strict=True):
                of[place] = block
    return [panel._replace(blocks=of) for panel, of in zip(panels, blocks, strict=True)]


def _folded(block: Block) -> Block:
    if not isinstance(block, Findings):
        return block
    return Findings([one._replace(is_open=False) for one in block.findings])


def _alike(blocks: list[Block]) -> list[Block]:
    charts = [block for block in blocks if isinstance(block, Chart)]
    if len(charts) == len(blocks):
        return [*sharing_axes(charts)]
    bars = [block for block in blocks if isinstance(block, Bars)]
    if len(bars) == len(blocks) and len({block.unit for block in bars}) == 1:
        return [block._replace(to=max(one.to for one in bars)) for block in bars]
    return blocks
