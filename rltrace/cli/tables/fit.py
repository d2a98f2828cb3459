"""A table that fits into the terminal without cutting a figure."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rltrace.cli.tables.texts import UndeclaredError, texts_in
from rltrace.host.control_characters import visible, visible_lines

WIDTH = 100
"""Width of output to a file or a pipe, unless COLUMNS says another; a terminal has its own."""
GAP = 2
LEAST_WORDS = 20
LEAST_NAME = 32
"""Characters that the first column and a column of words keep in one line, however narrow the terminal is."""
ALWAYS = 9
DEEPEST = 32
"""Levels of nested arguments that are shown."""


def visible_figures(value: Any, depth: int = 0) -> Any:
    """Return figures in which control characters are visible in every text, before a table measures how wide each
    is."""
    if value.__class__ in _NUMBERS:
        return value
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, msgspec.Struct):
        shown = {}
        for name in value.__struct_fields__:
            item = getattr(value, name)
            if item.__class__ in _NUMBERS or (item.__class__ is str and item.isprintable()):
                continue
            if (visible_item := visible_figures(item, depth + 2)) is not item:
                shown[name] = visible_item
        return msgspec.structs.replace(value, **shown) if shown else value
    if depth > DEEPEST and isinstance(value, (dict, list, tuple)):
        return "..."
    if isinstance(value, dict):
        if _is_of_numbers(value):
            return value
        return {visible_figures(key): visible_figures(item, depth + 1) for key, item in value.items()}
    if type(value) is list and len(value) >= MANY:
        return [item for some in _parts(value) for item in _visible_part(some, depth + 1)]
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(visible_figures(item, depth + 1) for item in value)
    return value


_NUMBERS = frozenset({int, float, bool, type(None)})
MANY = 64
"""So many items of a list are looked at together."""
AT_A_TIME = 1024
"""So many at most: where one has a control character, all of these are looked at one by one."""


def _parts(items: list[Any]) -> Iterator[list[Any]]:
    for first in range(0, len(items), AT_A_TIME):
        yield items[first : first + AT_A_TIME]


def _visible_part(items: list[Any], depth: int) -> list[Any]:
    """Return some items of a list with control characters visible. A long run has a hundred thousand records without
    any, whose texts are found at once."""
    return items if _are_plain(items) else [visible_figures(item, depth) for item in items]


def _are_plain(records: list[Any]) -> bool:
    """Return whether no text in records has a control character; False too where their types do not say what they
    hold."""
    try:
        return all(map(str.isprintable, texts_in(records)))
    except (UndeclaredError, TypeError):  # or they hold something else than they say
        return False


def _is_of_numbers(value: dict[Any, Any]) -> bool:
    """Return whether a dictionary has numbers by printable names, as a large summary has a hundred thousand of."""
    if not _PRINTABLE.issuperset(value):
        if not all(name.__class__ is str and name.isprintable() for name in value):
            return False
        if len(_PRINTABLE) < MOST_PRINTABLE:
            _PRINTABLE.update(value)
    return _NUMBERS.issuperset(map(type, value.values()))


_PRINTABLE: set[str] = set()
"""Names that were seen, and are printable."""
MOST_PRINTABLE = 10_000


class _Console(Console):
    """A console that shows control characters, whatever the text comes from, and interprets no markup in it.

    It leaves a closed pipe to the caller, who knows its exit code; rich would end the program with 1.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return what is printed, with control characters shown."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible_lines(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 - called while the error is handled


def console() -> Console:
    """Return the console of standard output."""
    width = None if sys.stdout.isatty() else shutil.get_terminal_size((WIDTH, 0)).columns
    return _Console(width=width, highlight=False, markup=False, emoji=False)


@dataclass(frozen=True)
class Column:
    """A column of figures or of words."""

    heading: str = ""
    worth: int = ALWAYS
    """Its importance. Below `ALWAYS` it may be left out if there is no room, the least important first."""
    is_words: bool = False
    """Whether it holds words: they are wrapped, while a figure never is."""
    is_left: bool = False


def bars(worth: int = 0) -> Column:
    """Return a column of bars."""
    return Column("", worth, is_left=True)


def words(heading: str = "", worth: int = ALWAYS) -> Column:
    """Return a column of words."""
    return Column(heading, worth, is_words=True, is_left=True)


@dataclass(frozen=True)
class _Row:
    cells: list[Text]
    style: str | None
    is_section: bool


class Figures:
    """A table whose first column names what the others are figures of.

    If it is wider than the terminal, unimportant columns are left out, the least important first, and named below; then
    words are wrapped; what still does not fit goes into a further block below, beside the names again.
    """

    def __init__(self, *columns: str | Column) -> None:
        first, *others = columns
        named = first if isinstance(first, Column) else words(first)
        self.columns = [named, *(one if isinstance(one, Column) else Column(one) for one in others)]
        self._rows: list[_Row] = []
        self._is_section = False

    def add_row(self, *cells: str | Text, style: str | None = None) -> None:
        """Add a row; what is missing at its end is empty."""
        texts = [Text(visible(cell)) if isinstance(cell, str) else cell for cell in cells]
        texts += [Text("") for _ in range(len(self.columns) - len(texts))]
        self._rows.append(_Row(texts, style, self._is_section))
        self._is_section = False

    def add_section(self) -> None:
        """Separate the next row from those above."""
        self._is_section = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if not self._rows:
            return
        kept = self._kept(options.max_width)
        for columns in self._blocks(kept, options.max_width):
            yield self._table(columns)
        lost = dict.fromkeys(self.columns[at].heading for at in self._told() if at not in kept)
        if named := ", ".join(filter(None, lost)):  # bars have no name
            said = f"not shown at {options.max_width} columns: {named}; a wider terminal and --json have them"
            yield Text(said, "dim")

    def _told(self) -> list[int]:
        """Return the columns that have something to show."""
        return [0, *(at for at in range(1, len(self.columns)) if any(row.cells[at] for row in self._rows))]

    def _kept(self, width: int) -> list[int]:
        """Return those columns that have room, or cannot be left out."""
        kept = self._told()
        while self._least_width(kept) > width:
            losable = [at for at in kept[1:] if self.columns[at].worth < ALWAYS]
            if not losable:
                break
            kept.remove(min(losable, key=lambda at: (self.columns[at].worth, -at)))
        return kept

    def _blocks(self, kept: Sequence[int], width: int) -> Iterator[list[int]]:
        block = [kept[0]]
        for at in kept[1:]:
            if len(block) > 1 and self._least_width([*block, at]) > width:
                yield block
                block = [kept[0]]
            block.append(at)
        yield block

    def _least_width(self, columns: Sequence[int]) -> int:
        return sum(map(self._least_of, columns)) + GAP * (len(columns) - 1)

    def _least_of(self, at: int) -> int:
        column = self.columns[at]
        wide = max([len(column.heading), *(row.cells[at].cell_len for row in self._rows)])
        return min(wide, LEAST_WORDS if at else LEAST_NAME) if column.is_words else wide

    def _table(self, columns: Sequence[int]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
        for at in columns:
            column = self.columns[at]
            table.add_column(
                Text(column.heading), justify="left" if column.is_left else "right", no_wrap=not column.is_words,
                overflow="fold",
            )  # fmt: skip
        for row in self._rows:
            if row.is_section:
                table.add_section()
            table.add_row(*(row.cells[at] for at in columns), style=row.style)
        return table


def titled(title: str | Text, table: RenderableType, caption: str = "") -> RenderableType:
    """Return a table below its title, with notes about it."""
    heading = Text(title, "bold") if isinstance(title, str) else title
    return Group(heading, table, *([Text(caption, "dim")] if caption else []))
