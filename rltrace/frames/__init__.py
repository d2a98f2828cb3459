"""A Recording as tables: what SQL asks, what Python gets as frames, what is written as Parquet.

In: a Recording. Out: tables of Arrow. `schema.py` says which tables there are, and what each column means. Spans,
samples and arrows are made of the reader's columns (`recorded.py`), figures by the functions of `analysis` that make
the JSON (`figures.py`); `moments.py` says in which step and phase an instant is. A table is made as it is read, and of
it only the columns and the rows that are asked for (`arrow.py`). `tables.py` is what `rltrace.open` returns,
`cell.py` how a notebook shows it, `database.py` asks DuckDB.

To add a table, describe it in `schema.py` and make it in `figures.py`; then `make docs`. A figure that is a list of the
JSON needs one line in each.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rltrace.errors import MissingExtraError, SelectionError
from rltrace.limits import LIMITS, Limits
from rltrace.read.selection import Selection

if TYPE_CHECKING:
    from rltrace.frames.tables import Tables
    from rltrace.read.recording import Recording


def open(
    run: str | os.PathLike[str],
    *,
    steps: str | None = None,
    ranks: str | None = None,
    time: str | None = None,
    limits: Limits = LIMITS,
) -> Tables:
    """Return the tables of a Recording, and what a notebook shows of it.

    Args:
        run: The folder of a Recording, or an archive of it.
        steps: Only these steps: `3`, `100-110` or `1,5-7`.
        ranks: Only these ranks: `0,8-15`.
        time: Only from one second of the run to another: `10:20`.
        limits: What is read without a question; `NO_LIMITS` of `rltrace.limits` for any size.

    Raises:
        RecordingError: there is no Recording, or it cannot be read.
        SelectionError: there is no such step, rank or time.
    """
    from rltrace.read import selection
    from rltrace.read.recording import Recording

    try:
        chosen = Selection(
            None if steps is None else selection.numbers(steps),
            None if ranks is None else selection.numbers(ranks),
            None if time is None else selection.seconds(time),
        )
    except ValueError as error:
        raise SelectionError(str(error)) from None
    return tables_of(Recording.open(run, limits), chosen)


def tables_of(recording: Recording, chosen: Selection) -> Tables:
    """Return the tables of a part of a Recording.

    Raises:
        SelectionError: there is no such step, rank or time.
    """
    from rltrace.frames.tables import Tables

    return Tables(recording, chosen)


def missing(error: ImportError) -> MissingExtraError:
    """Return what to say about a package that is not installed."""
    package = (error.name or "").partition(".")[0]
    return MissingExtraError(f"SQL and frames need {package}, which is not installed here", "sql")
