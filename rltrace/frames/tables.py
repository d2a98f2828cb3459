"""What `rltrace.open` returns: the tables of a Recording."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rltrace.analysis.figures import figures
from rltrace.analysis.findings.finding import Finding
from rltrace.analysis.lanes import Lane
from rltrace.analysis.selected import selected
from rltrace.analysis.summary import losses
from rltrace.errors import QueryError
from rltrace.frames import cell, missing
from rltrace.frames.schema import (
    BOUNDARIES,
    COUNTERS,
    FLOWS,
    HOOKS,
    MEMORY,
    PHASES,
    PROCESSES,
    REQUESTS,
    SPANS,
    STEPS,
    TABLES,
    WEIGHT_SYNC,
    WEIGHT_SYNC_STAGES,
    Table,
)
from rltrace.read.recording import Recording
from rltrace.read.selection import ALL, Selection

if TYPE_CHECKING:
    from rltrace.frames.arrow import Streamed
    from rltrace.frames.figures import Figures
    from rltrace.frames.recorded import Recorded

_RECORDED = (SPANS, COUNTERS, FLOWS)


class Tables:
    """The tables of a Recording: each is a `pyarrow.Table`, of which `.to_pandas()` makes a frame of pandas, and
    `polars.from_arrow` one of polars. In a notebook it shows a step and the findings.

    Nothing is read before it is asked for. What was recorded is read again each time; figures are kept. Tables need the
    extra `sql`, the picture of the step `report`; findings need neither.
    """

    def __init__(self, recording: Recording, chosen: Selection = ALL) -> None:
        """Args:
        recording: The whole.
        chosen: Which part of it the tables are of.
        """
        self.recording = selected(recording, chosen)
        self._whole, self._chosen_part = recording, chosen

    def __repr__(self) -> str:
        return f"<rltrace tables of {self.recording.path}: {', '.join(TABLES)}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: one step of every rank, and the findings."""
        return self._cell

    @cached_property
    def _cell(self) -> str:
        return cell.html(selected(self._whole, self._chosen_part, whole_steps=True), self.findings)

    def findings(self) -> list[Finding]:
        """Return what bounds a step and what to change: the `findings` of `rltrace why --json`, as values."""
        return [*self._findings]

    @cached_property
    def _findings(self) -> list[Finding]:
        return figures(self._whole, self._chosen_part).why.findings

    @cached_property
    def _recorded(self) -> Recorded:
        made: Recorded = _needed("recorded").Recorded(self.recording, lambda: self._figures.phase_moments)
        return made

    @cached_property
    def _figures(self) -> Figures:
        made: Figures = _needed("figures").Figures(self.recording, self._recorded.alone)
        return made

    def spans(
        self,
        name: str | None = None,
        rank: int | None = None,
        step: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> Any:
        """Return spans, those of one name, rank or step if it is given; `columns` are all by default."""
        return self._chosen(SPANS, name, rank, step, columns)

    def counters(
        self,
        name: str | None = None,
        rank: int | None = None,
        step: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> Any:
        """Return samples of counters, chosen in the same way."""
        return self._chosen(COUNTERS, name, rank, step, columns)

    def flows(self) -> Any:
        """Return both ends of every arrow."""
        return self.table(FLOWS.name)

    def steps(self) -> Any:
        """Return the steps."""
        return self.table(STEPS.name)

    def phases(self) -> Any:
        """Return the phases of each step and rank."""
        return self.table(PHASES.name)

    def memory(self) -> Any:
        """Return the ledger of every device."""
        return self.table(MEMORY.name)

    def boundaries(self) -> Any:
        """Return the ledger at phase boundaries."""
        return self.table(BOUNDARIES.name)

    def requests(self) -> Any:
        """Return the requests, each with its stages."""
        return self.table(REQUESTS.name)

    def weight_sync(self) -> Any:
        """Return the weight sync of each step and rank."""
        return self.table(WEIGHT_SYNC.name)

    def weight_sync_stages(self) -> Any:
        """Return its stages."""
        return self.table(WEIGHT_SYNC_STAGES.name)

    def processes(self) -> Any:
        """Return the processes."""
        return self.table(PROCESSES.name)

    def hooks(self) -> Any:
        """Return the hooks."""
        return self.table(HOOKS.name)

    def table(self, name: str) -> Any:
        """Return a whole table.

        Raises:
            QueryError: there is no table of this name.
        """
        if name not in TABLES:
            raise QueryError(f"no table {name}; the tables are {', '.join(sorted(TABLES))}")
        return self.dataset(TABLES[name]).scanner().to_table()

    def sql(self, query: str) -> Any:
        """Return what a query selects, by DuckDB.

        Raises:
            QueryError: it is no query, or names what there is not.
            MissingExtraError: DuckDB is not installed.
        """
        from rltrace.frames.database import Database

        with Database(self) as database:
            return database.ask(query).table()

    def dataset(self, table: Table) -> Streamed:
        """Return a table that is read in batches, and only as much of it as is asked for."""
        streamed: Streamed = _needed("arrow").Streamed(table, partial(self._batches, table))
        return streamed

    def missing(self) -> Iterator[str]:
        """Yield what a reader should know of a Recording that is live or lacks something, one line each.

        Call it after a table was read: what is damaged is known only then.
        """
        if any(process.is_alive for process in self.recording.processes):
            yield "the run goes on; this is what it has written until now"
        lost: dict[str, int] = {}
        found = losses(self.recording)
        for one in found:
            for field in one.__struct_fields__:
                if field != "process_key" and getattr(one, field):
                    lost[field] = lost.get(field, 0) + getattr(one, field)
        if lost:
            what = ", ".join(f"{many:,} {field.replace('_', ' ')}" for field, many in lost.items())
            yield f"some of the Recording is missing ({what}); `rltrace summary` says more"

    def _batches(self, table: Table, wanted: list[str], filter: Any) -> Iterator[Any]:
        of = self._recorded if table in _RECORDED else self._figures
        return of.batches(table, wanted, filter)

    def _chosen(
        self, table: Table, name: str | None, rank: int | None, step: int | None, columns: Sequence[str] | None
    ) -> Any:
        for column in columns or ():
            if column not in table.names():
                raise QueryError(f"no column {column} in {table.name}; it has {', '.join(table.names())}")

        def is_one(lane: Lane) -> bool:
            return rank is None or lane.rank == rank

        arrow = _needed("arrow")
        filter = arrow.equal({"name": name, "step": step})
        dataset = arrow.Streamed(table, lambda wanted, filter: self._recorded.batches(table, wanted, filter, is_one))
        return dataset.scanner(columns, filter).to_table()


def _needed(module: str) -> Any:
    """Return a module of this room that tables need.

    Raises:
        MissingExtraError: pyarrow is not installed.
    """
    try:
        return import_module(f"rltrace.frames.{module}")
    except ImportError as error:
        raise missing(error) from None
