"""`rltrace sql` asks a question that no table of `summary` answers."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rltrace.cli.as_json import echo_json_list
from rltrace.cli.completion import recordings
from rltrace.cli.echo import echo
from rltrace.cli.runs import LIMITS_OPTION, open_run
from rltrace.cli.selection import of_tables
from rltrace.host.control_characters import visible
from rltrace.limits import Limits
from rltrace.read.selection import Numbers, Seconds, Selection

if TYPE_CHECKING:
    from rich.text import Text

    from rltrace.frames.database import Answer

STDIN = "-"

FORMS = ("table", "csv", "json")

MOST_ROWS = 500
"""Rows that a table on the screen has."""


@click.command()
@click.argument("words", metavar="[RUN] QUERY", nargs=-1, shell_complete=recordings)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMS),
    default="table",
    show_default=True,
    help=f"How rows are printed; a table has the first {MOST_ROWS}.",
)
@click.option("--read-files", "reads_files", is_flag=True, help="Let QUERY read files of yours, too: from 'mine.csv'.")
@of_tables
@LIMITS_OPTION
def sql(
    words: tuple[str, ...],
    form: str,
    reads_files: bool,
    steps: Numbers | None,
    ranks: Numbers | None,
    time: Seconds | None,
    limits: Limits,
) -> None:
    """Ask RUN a question in SQL.

    QUERY is one SELECT in DuckDB's SQL, or - to read it from standard input. Its tables are spans, counters, flows,
    steps, phases, memory, boundaries, requests, weight_sync, weight_sync_stages, processes and hooks: "show tables" and
    "describe spans" are queries too. docs/sql.md has every column and fifteen questions. RUN is the folder of a
    Recording or an archive of it, by default the newest in ./rltrace-runs.
    """
    run, query = _parted(words)
    from rltrace.frames import tables_of

    tables = tables_of(open_run(run, limits), Selection(steps, ranks, time))
    from rltrace.frames.database import Database

    with Database(tables, reads_files=reads_files) as database:
        _PRINTED[form](database.ask(sys.stdin.read() if query == STDIN else query))
        for line in (*database.empty(), *tables.missing()):
            echo(f"rltrace: {line}", err=True)


def _parted(words: tuple[str, ...]) -> tuple[str | None, str]:
    """Return the run, if it is named, and the query."""
    if len(words) == 2:
        return words[0], words[1]
    if len(words) > 2:
        raise click.UsageError(f"{words[2]!r} is too much behind RUN and QUERY; put the query in quotes")
    if not words or Path(words[0]).exists():
        raise click.UsageError('no query; write one such as "select * from phases"')
    return None, words[0]


def _rows(answer: Answer) -> Iterator[tuple[Any, ...]]:
    for batch in answer.batches():
        yield from zip(*(map(_plain, column.to_pylist()) for column in batch.columns), strict=True)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value if value is None or isinstance(value, (bool, int, float, str, list, dict)) else str(value)


def _print_table(answer: Answer) -> None:
    from rltrace.cli.tables import console
    from rltrace.cli.tables.fit import Column, Figures

    shown: list[tuple[Any, ...]] = []
    more = 0
    for row in _rows(answer):
        if len(shown) < MOST_ROWS:
            shown.append(row)
        else:
            more += 1
    columns = [[row[place] for row in shown] for place in range(len(answer.columns))]
    is_left = [any(isinstance(value, (str, list, dict)) for value in column) for column in columns]
    table = Figures(*(Column(visible(name), is_left=left) for name, left in zip(answer.columns, is_left, strict=True)))
    for row in shown:
        table.add_row(*map(_cell, row))
    console().print(table)
    if not shown:
        echo(f"no rows of {', '.join(answer.columns)}")
    if more:
        echo(f"{more:,} more rows; --format csv and json have them")


def _cell(value: Any) -> str | Text:
    """Return a value as a cell; numbers are those of the query, to six places."""
    if value is None:
        from rich.text import Text

        return Text("null", "dim")
    if isinstance(value, float) and value == value and abs(value) < 1e15:
        return f"{value:.6g}" if 0 < abs(value) < 1e-3 else f"{value:.6f}".rstrip("0").rstrip(".")
    return _text(value)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, dict)):
        from rltrace.frames.arrow import as_json

        return as_json(value)
    return str(value)


def _print_csv(answer: Answer) -> None:
    lines = csv.writer(sys.stdout, lineterminator="\n")
    lines.writerow([visible(name) for name in answer.columns])
    for row in _rows(answer):
        lines.writerow([visible(_text(value)) for value in row])


def _print_json(answer: Answer) -> None:
    """Print a list with an object per row, a line each."""
    from rltrace.frames.arrow import as_json

    echo_json_list(as_json(dict(zip(answer.columns, row, strict=True))) for row in _rows(answer))


_PRINTED: dict[str, Callable[[Answer], None]] = {"table": _print_table, "csv": _print_csv, "json": _print_json}
