"""What a section is, and what of it is the same in all."""

from __future__ import annotations

from collections.abc import Callable
from shlex import quote
from typing import NamedTuple, TypeAlias

from rltrace.analysis.lanes import Lane
from rltrace.analysis.phases import IDLE, STARTING, UNLABELLED
from rltrace.events import WAIT_DRIVER
from rltrace_exporters.report.blocks import Bars, Changes, Command, Figures, Findings, Note, Table, Trusts
from rltrace_exporters.report.chart import Chart
from rltrace_exporters.report.values import RunValues
from rltrace_exporters.timeline_colors import slice_color

Block: TypeAlias = Note | Command | Figures | Findings | Changes | Trusts | Table | Bars | Chart

OF_NOBODY = {WAIT_DRIVER: "#8b919c", STARTING: "#c9c2ae", UNLABELLED: "#5f6670", IDLE: "#b4bac4"}
"""Colours of the time in no phase."""

MOST_ROWS = 16
"""So many ranks are drawn one by one; of more, the distribution and some by name."""


class Section(NamedTuple):
    """A part of the page."""

    id: str
    title: str
    question: str
    """What it answers."""
    make: Callable[[RunValues], list[Block]]
    """Makes its blocks of a run, or raises `Missing`."""


def color_of(phase: str) -> str:
    """Return the colour of a phase, as the timeline has it."""
    return OF_NOBODY.get(phase) or slice_color(phase)


def view(values: RunValues, *, step: int | None = None, ranks: str = "") -> str:
    """Return the command that shows a part of the timeline."""
    words = ["rltrace", "view", quote(values.path)]
    if step is not None:
        words += ["--steps", str(step)]
    if ranks:
        words += ["--ranks", ranks]
    return " ".join(words)


def named(lanes: list[Lane], most: int = 3) -> str:
    """Name some lanes, and say how many more there are."""
    more = len(lanes) - most
    return ", ".join(lane.name for lane in lanes[:most]) + (f" and {more:,} more" if more > 0 else "")
