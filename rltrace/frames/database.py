"""Asks DuckDB about the tables of a Recording. It reads no file unless it is told to, and changes nothing: names in a
Recording may be anybody's."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from rltrace.errors import QueryError
from rltrace.frames import missing
from rltrace.frames.schema import TABLES

try:
    import duckdb
    import pyarrow as pa

    from rltrace.frames.arrow import Streamed
except ImportError as error:
    raise missing(error) from None

if TYPE_CHECKING:
    from rltrace.frames.tables import Tables

_SETTINGS = {
    "temp_directory": "''",
    "autoload_known_extensions": "false",
    "autoinstall_known_extensions": "false",
    "python_enable_replacements": "false",
}
_NO_FILES = {"enable_external_access": "false"}
_LOCK = {"lock_configuration": "true"}

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
        """The names of the columns, each once: `lane` and `lane_1`."""
        found: dict[str, None] = {}
        for name in self._selected.columns:
            numbered = (name if not n else f"{name}_{n}" for n in itertools.count())
            found[next(one for one in numbered if one not in found)] = None
        return [*found]

    def batches(self) -> Iterator[Any]:
        """Yield the rows as batches of Arrow.

        Raises:
            QueryError: they cannot be computed.
        """
        with self._database.wording(self._query):
            batches = iter(self._database.wait(self._selected.to_arrow_reader, _ROWS))
            while (batch := self._database.wait(next, batches, None)) is not None:
                yield _sound(batch, self.columns)

    def table(self) -> Any:
        """Return the rows as a table of Arrow; see `batches`."""
        with self._database.wording(self._query):
            return _sound(self._database.wait(self._selected.to_arrow_table), self.columns)


class Database:
    """The tables of a Recording in DuckDB."""

    def __init__(self, tables: Tables, *, reads_files: bool = False) -> None:
        """Args:
        tables: Of the Recording.
        reads_files: Queries may read files, too.
        """
        self.rows_read: dict[str, int] = {}
        """How many rows of each table queries have read."""
        self._tables = tables
        self._worker = ThreadPoolExecutor(1)
        self._connection = duckdb.connect()
        for table in TABLES.values():
            dataset = Streamed(table, partial(self._watched, tables.dataset(table)))
            self._connection.register(table.name, dataset)
        for name, value in (_SETTINGS | ({} if reads_files else _NO_FILES) | _LOCK).items():
            self._connection.execute(f"set {name} = {value}")

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.shutdown()
        self._connection.close()

    def wait(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a call returns that may take long; ^C ends it, which DuckDB itself does not see."""
        called = self._worker.submit(call, *arguments)
        try:
            return called.result()
        except KeyboardInterrupt:
            self._connection.interrupt()
            raise

    def ask(self, query: str) -> Answer:
        """Ask one query.

        Raises:
            QueryError: it is no query, or names what there is not.
        """
        with self.wording(query):
            statements = self._connection.extract_statements(query)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise QueryError(f"the query is no single SELECT: {' '.join(query.split())!r}; {_tables()}")
            return Answer(self, query, self._connection.sql(statements[0]))

    @contextlib.contextmanager
    def wording(self, query: str) -> Iterator[None]:
        """Say in our words what is wrong with a query, while DuckDB is asked."""
        try:
            yield
        except (duckdb.Error, OSError, pa.ArrowException) as error:
            raise self._said(error, query) from None

    def _said(self, error: Exception, query: str) -> QueryError:
        """Return in one line what is wrong with a query, and what there is."""
        said = str(error)
        if found := _NO_TABLE.search(said):
            return QueryError(f"no table {found['name']}; {_tables()}")
        if found := _NO_COLUMN.search(said):
            words = set(re.findall(r"\w+", query.lower()))
            named = [table for table in TABLES.values() if table.name in words]
            there = "; ".join(f"{table.name} has {', '.join(table.names())}" for table in named)
            return QueryError(f"no column {found['name'] or found['of_table']}; {there or _tables()}")
        if isinstance(error, duckdb.PermissionException):
            return QueryError("a query reads and writes no file; --read-files of `rltrace sql` lets it read yours")
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


def _sound(rows: Any, names: list[str]) -> Any:
    """Return rows with these names, of which sums of whole numbers are of 64 bits, as all others are, where they
    fit."""
    columns = list(rows.columns)
    for place, field in enumerate(rows.schema):
        if pa.types.is_decimal(field.type) and field.type.scale == 0:
            with contextlib.suppress(pa.ArrowInvalid):
                columns[place] = rows.column(place).cast(pa.int64())
    return type(rows).from_arrays(columns, names=names)


def _tables() -> str:
    return f"the tables are {', '.join(sorted(TABLES))}"
