"""Asks DuckDB about the tables of a Recording. It reads no file and changes nothing: names in a Recording may be
anybody's."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from rltrace.errors import QueryError
from rltrace.frames import missing
from rltrace.frames.arrow import Streamed
from rltrace.frames.schema import TABLES

try:
    import duckdb
    import pyarrow as pa
except ImportError as error:
    raise missing(error) from None

if TYPE_CHECKING:
    from rltrace.frames.tables import Tables

_SETTINGS = {
    "temp_directory": "''",
    "enable_external_access": "false",
    "autoload_known_extensions": "false",
    "autoinstall_known_extensions": "false",
    "python_enable_replacements": "false",
    "lock_configuration": "true",
}

_ROWS = 1 << 16
"""Rows of a result that are fetched at once."""

_NO_TABLE = re.compile(r"Table with name (?P<name>.+) does not exist")
_NO_COLUMN = re.compile(
    r'Referenced column "(?P<name>.+)" not found'
    r'|(?:Table|Values list) "\w+" does not have a column named "(?P<of_table>.+)"'
)


class Answer:
    """What a query selects; it can be read once."""

    def __init__(self, database: Database, query: str, selected: Any) -> None:
        self._database, self._query, self._selected = database, query, selected

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self._selected.columns)

    def batches(self) -> Iterator[Any]:
        """Yield the rows as batches of Arrow.

        Raises:
            QueryError: they cannot be computed.
        """
        try:
            for batch in self._selected.to_arrow_reader(_ROWS):
                yield with_whole_sums(batch)
        except (duckdb.Error, OSError, pa.ArrowException) as error:
            raise self._database.said(error, self._query) from None

    def table(self) -> Any:
        """Return the rows as a table of Arrow; see `batches`."""
        try:
            return with_whole_sums(self._selected.to_arrow_table())
        except (duckdb.Error, OSError, pa.ArrowException) as error:
            raise self._database.said(error, self._query) from None


class Database:
    """The tables of a Recording in DuckDB."""

    def __init__(self, tables: Tables) -> None:
        self.rows_read: dict[str, int] = {}
        """How many rows of each table queries have read."""
        self._tables = tables
        self._connection = duckdb.connect()
        for table in TABLES.values():
            dataset = Streamed(table, partial(self._watched, tables.dataset(table)))
            self._connection.register(table.name, dataset)
        for name, value in _SETTINGS.items():
            self._connection.execute(f"set {name} = {value}")

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self, query: str) -> Answer:
        """Ask one query.

        Raises:
            QueryError: it is no query, or names what there is not.
        """
        try:
            statements = self._connection.extract_statements(query)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise QueryError(f"the query is no single SELECT: {' '.join(query.split())!r}; {_tables()}")
            return Answer(self, query, self._connection.sql(statements[0]))
        except duckdb.Error as error:
            raise self.said(error, query) from None

    def said(self, error: Exception, query: str) -> QueryError:
        """Return in one line what is wrong with a query, and what there is."""
        said = str(error)
        if found := _NO_TABLE.search(said):
            return QueryError(f"no table {found['name']}; {_tables()}")
        if found := _NO_COLUMN.search(said):
            words = set(re.findall(r"\w+", query.lower()))
            named = [table for table in TABLES.values() if table.name in words]
            there = "; ".join(f"{table.name} has {', '.join(table.names())}" for table in named)
            return QueryError(f"no column {found['name'] or found['of_table']}; {there or _tables()}")
        first = said.partition("\n\nLINE ")[0].partition("\n\tCandidate")[0]
        return QueryError(f"{' '.join(first.split())}; the tables and columns are in docs/sql.md")

    def empty(self) -> Iterator[str]:
        """Yield the tables that queries have read and that have no rows at all, with the reason."""
        for name, rows in self.rows_read.items():
            if not rows and self._tables.dataset(TABLES[name]).is_empty():
                yield f"the table {name} has no rows: {TABLES[name].without_rows}"

    def _watched(self, dataset: Streamed, wanted: list[str], filter: Any) -> Iterator[Any]:
        name = dataset.table.name
        self.rows_read.setdefault(name, 0)
        for batch in dataset.batches(wanted, filter):
            self.rows_read[name] += batch.num_rows
            yield batch


def with_whole_sums(rows: Any) -> Any:
    """Return rows of which sums of whole numbers are of 64 bits, where they fit, as in all other columns."""
    columns = list(rows.columns)
    for place, field in enumerate(rows.schema):
        if pa.types.is_decimal(field.type) and field.type.scale == 0:
            with contextlib.suppress(pa.ArrowInvalid):
                columns[place] = rows.column(place).cast(pa.int64())
    return type(rows).from_arrays(columns, names=rows.schema.names)


def _tables() -> str:
    return f"the tables are {', '.join(sorted(TABLES))}"
