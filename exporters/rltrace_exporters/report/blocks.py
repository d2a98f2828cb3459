"""What a section consists of, besides charts: values that the template writes."""

from __future__ import annotations

from typing import NamedTuple

LONG = 24
"""Letters from which on a cell of a table is a sentence."""


class Note(NamedTuple):
    """A sentence."""

    text: str


class Command(NamedTuple):
    """A command that shows more."""

    words: str
    """What it shows."""
    command: str


class Figure(NamedTuple):
    """One large number."""

    name: str
    value: str
    note: str


class Figures(NamedTuple):
    """The numbers that a reader looks for first."""

    figures: list[Figure]


class Finding(NamedTuple):
    """One finding."""

    title: str
    price: str
    share: float | None
    """Of a step, 0 to 1."""
    facts: list[str]
    settings: list[str]
    bound: str
    confidence: str
    command: str
    """Where it shows in the timeline; empty if nowhere."""
    is_open: bool


class Findings(NamedTuple):
    """Findings, what costs most first."""

    findings: list[Finding]


class Change(NamedTuple):
    """A finding that two runs do not share."""

    kind: str
    """`gone`, `new`, `more` or `less`."""
    costs: str
    title: str


class Changes(NamedTuple):
    """What is better and what is worse in the second run."""

    changes: list[Change]


class Trust(NamedTuple):
    """One thing that says how far figures can be trusted."""

    state: str
    """`good`, `look` or `unknown`."""
    name: str
    value: str
    why: str


class Trusts(NamedTuple):
    """All of them."""

    rows: list[Trust]


class Table(NamedTuple):
    """Figures in columns; the first column has names."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    is_folded: bool = True
    """Whether only its title shows until it is opened."""

    def is_text(self, column: int) -> bool:
        """Return whether a column has sentences, and not figures."""
        return any(len(row[column]) > LONG for row in self.rows)


class Legend(NamedTuple):
    """What a colour stands for."""

    name: str
    color: str


class Part(NamedTuple):
    """A coloured part of a bar, in the unit of its axis."""

    start: float
    end: float
    color: str
    tip: str


class Range(NamedTuple):
    """From the least to the most of something, drawn over a bar."""

    least: float
    most: float
    kind: str
    """`ranks` or `steps`."""
    tip: str


class Mark(NamedTuple):
    """One value, drawn as a line across a bar."""

    at: float
    tip: str


class Row(NamedTuple):
    """A bar with its name and what is written behind it."""

    name: str
    parts: list[Part]
    value: str
    note: str = ""
    ranges: tuple[Range, ...] = ()
    marks: tuple[Mark, ...] = ()
    room: float = 0.0
    """How far a bar could reach: what lies behind it is free."""


class Bars(NamedTuple):
    """Bars on one axis, from 0."""

    title: str
    rows: list[Row]
    to: float
    """Where the axis ends."""
    unit: str
    legend: list[Legend] = []  # noqa: RUF012 - a NamedTuple's default, which nobody changes
    note: str = ""
    value_name: str = ""
    note_name: str = ""

    def at(self, value: float) -> str:
        """Return a place on the axis in percent."""
        return percent(value / self.to if self.to else 0.0)


def percent(share: float) -> str:
    """Return a share of a width as SVG takes it; what lies outside is put to the edge."""
    return f"{min(max(share, 0.0), 1.0) * 100:.3f}".rstrip("0").rstrip(".") + "%"
