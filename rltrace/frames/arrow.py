"""Arrow's side of the tables: types, arrays of texts and numbers, and tables that are made only as far as asked for."""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
from numpy.typing import NDArray

from rltrace.frames.schema import Kind, Table

PLACE = "row of the batch"
"""Name of a column that no table has."""

_TYPES: dict[Kind, Any] = {
    "text": pa.dictionary(pa.int32(), pa.string()),
    "integer": pa.int64(),
    "decimal": pa.float64(),
    "boolean": pa.bool_(),
    "json": pa.string(),
}

_encode = msgspec.json.Encoder().encode


def schema(table: Table, columns: Sequence[str] | None = None) -> Any:
    """Return the schema of some columns of a table, by default of all."""
    kinds = {column.name: column.kind for column in table.columns}
    return pa.schema([(name, _TYPES[kinds[name]]) for name in (kinds if columns is None else columns)])


def equal(wanted: Mapping[str, Any]) -> Any:
    """Return the filter of rows in which columns have these values, None where any will do; None if all rows pass."""
    held = [pc.field(name) == value for name, value in wanted.items() if value is not None]
    return functools.reduce(operator.and_, held) if held else None


def same_text(text: str, many: int) -> Any:
    """Return a column that has one text in every row."""
    return pa.DictionaryArray.from_arrays(np.zeros(many, np.int32), [sound(text)])


def same_number(number: int | None, many: int) -> Any:
    """Return a column that has one whole number in every row, or nothing."""
    return pa.nulls(many, pa.int64()) if number is None else pa.array(np.full(many, number, np.int64))


def texts(places: NDArray[Any], known: Sequence[str]) -> Any:
    """Return a column of texts, by their places among those that are known; none below 0."""
    there = places >= 0
    is_used = np.zeros(len(known), np.bool_)
    is_used[places[there]] = True
    codes = (np.cumsum(is_used) - 1).astype(np.int32)
    used = [sound(known[place]) for place in np.flatnonzero(is_used).tolist()]
    indices = codes[np.where(there, places, 0)] if len(known) else np.zeros(len(places), np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(indices, mask=~there), pa.array(used, pa.string()))


def numbers(values: NDArray[Any], missing: NDArray[np.bool_]) -> Any:
    """Return a column of numbers without those that are missing."""
    return pa.array(values, mask=missing)


def sound(text: str) -> str:
    """Return a text without what is none, as the name of a folder may contain."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def as_json(value: Any) -> str:
    """Return a value as JSON, whatever it is."""
    try:
        return _encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return json.dumps(_said(value, 50))


def _said(value: Any, depth: int) -> Any:
    """Return a value of which everything can be JSON; what is too deep, or of no kind that JSON has, as a text."""
    if depth and isinstance(value, dict):
        return {str(key): _said(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, (list, tuple)):
        return [_said(item, depth - 1) for item in value]
    return value if value is None or isinstance(value, (str, bool, int)) else str(value)


class Streamed(pyarrow.dataset.Dataset):  # type: ignore[misc]
    """A table that is made as it is read, anew each time: only the rows and the columns that are asked for.

    DuckDB tells a dataset of Arrow which these are before it reads.
    """

    def __init__(self, table: Table, batches: Callable[[list[str], Any], Iterator[Any]]) -> None:
        """Args:
        table: Which it is.
        batches: Makes batches of some columns, of the rows that an expression holds for, or of all.
        """
        self.table = table
        self.batches = batches

    @property
    def schema(self) -> Any:
        return schema(self.table)

    def is_empty(self) -> bool:
        """Return whether it has no rows at all."""
        return not any(batch.num_rows for batch in self.batches(self.table.names()[:1], None))

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **_: Any) -> Scan:
        """Return what reads these columns of the rows that an expression holds for."""
        return Scan(self, self.table.names() if columns is None else list(columns), filter)


class Scan:
    """Reads some of a table, in the thread that asks: Arrow's own scanners read ahead, and go on when nobody asks any
    more."""

    def __init__(self, of: Streamed, columns: list[str], filter: Any) -> None:
        self._of, self._columns, self._filter = of, columns, filter

    @property
    def projected_schema(self) -> Any:
        """The schema of what is read."""
        return schema(self._of.table, self._columns)

    def to_reader(self) -> Any:
        """Return it as batches."""
        return pa.RecordBatchReader.from_batches(self.projected_schema, self._of.batches(self._columns, self._filter))

    def to_table(self) -> Any:
        """Return it as one table."""
        return self.to_reader().read_all().unify_dictionaries()


def named_in(expression: Any, names: Iterable[str]) -> list[str]:
    """Return the columns that an expression may name: at least those that it does."""
    words = set(re.findall(r"\w+", str(expression)))
    return [name for name in names if name in words]


def may_hold(filter: Any, table: Table, known: Mapping[str, Any]) -> bool:
    """Return whether an expression may hold for rows of which some columns are known.

    Args:
        filter: The expression; None holds for all.
        table: Whose rows they are.
        known: A column of one row for each of these.
    """
    if filter is None or _ASKS_FOR_NOTHING.search(str(filter)):
        return True
    # What is not known is null: an expression that is false all the same is false whatever it is.
    columns = [known.get(field.name, pa.nulls(1, field.type)) for field in schema(table)]
    is_false: bool = pa.Table.from_arrays(columns, schema=schema(table)).filter(~filter).num_rows == 1
    return not is_false


_ASKS_FOR_NOTHING = re.compile("is_valid|is_null|is_in|if_else|coalesce|case_when|choose")
"""Functions that are not null where what they are given is."""


def rows_of(filter: Any, table: Table, many: int, column: Callable[[str], Any]) -> NDArray[np.int64] | None:
    """Return the rows that an expression holds for; None for all.

    Args:
        filter: The expression; None holds for all.
        table: Whose rows they are.
        many: How many there are.
        column: Makes a column of all of them.
    """
    if filter is None:
        return None
    made = {name: column(name) for name in named_in(filter, table.names())}
    held = pa.table({**made, PLACE: np.arange(many)}).filter(filter)
    found: NDArray[np.int64] = held.column(PLACE).to_numpy()
    return None if len(found) == many else found
