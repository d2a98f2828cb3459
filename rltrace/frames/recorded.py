"""The tables of what was recorded: spans, samples and ends of arrows, some ten thousand rows at a time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from threading import RLock
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rltrace.analysis.clocks import TimeLine
from rltrace.analysis.lanes import Lane, lanes
from rltrace.frames import arrow
from rltrace.frames.moments import PhaseMoments, StepMoments
from rltrace.frames.schema import COUNTERS, FLOWS, SPANS, Table
from rltrace.read import columns, cores
from rltrace.read.columns import MISSING, NO_LANE, OPEN, Columns
from rltrace.read.recording import Process, Recording

NO_RANK = -(2**63)
"""A rank that nobody has."""

Rows = NDArray[np.int64]
Numbers = NDArray[np.int64]

_TEXTS = ("error", "method", "request_id")
_WHOLE = (
    "bytes", "tensors", "ranks", "tokens", "running", "waiting", "preempted", "rows", "columns", "queued_ns",
    "error_ns", "behind_host_ns",
)  # fmt: skip


class Recorded:
    """What a Recording has, and what its rows are told apart by."""

    def __init__(self, recording: Recording, phase_moments: Callable[[], PhaseMoments]) -> None:
        """Args:
        recording: The Recording.
        phase_moments: Finds the phases of all lanes; it is asked if somebody asks for the phase of a span.
        """
        self.recording = recording
        self.lanes = lanes(recording.processes)
        self.time_line = TimeLine(recording)
        shifted = [process.start_ns + self.time_line.shift_ns(process) for process in recording.processes]
        self.start_ns = min(shifted, default=0)
        self._reading = {process.key: RLock() for process in recording.processes}
        """A process is read once at a time: what it lost is counted meanwhile. A query may ask for it twice."""
        self._phase_moments = phase_moments

    @functools.cached_property
    def steps(self) -> StepMoments:
        with self.alone():
            return StepMoments(self.recording)

    @functools.cached_property
    def phases(self) -> PhaseMoments:
        with self.alone():
            return self._phase_moments()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep others from reading any process."""
        with contextlib.ExitStack() as held:
            for lock in self._reading.values():
                held.enter_context(lock)
            yield

    def batches(
        self, table: Table, wanted: Sequence[str], filter: Any, is_one: Callable[[Lane], bool] = lambda lane: True
    ) -> Iterator[Any]:
        """Yield rows of a table.

        Args:
            table: `SPANS`, `COUNTERS` or `FLOWS`.
            wanted: The columns.
            filter: An expression that holds for the rows; None for all.
            is_one: Whether the rows of a lane count.
        """
        for column in {*wanted, *arrow.named_in(filter, table.names())} & {"step", "phase"}:
            self._find(column)
        chosen = [process for process in self.recording.processes if is_one(self.lanes[process.key])]
        readers = [_Who(self, process, self.lanes[process.key]) for process in chosen]
        readers = [who for who in readers if arrow.may_hold(filter, table, who.known())]
        rows_of = functools.partial(self._rows_of, table, wanted, filter)
        # Python makes the JSON of arguments, row by row: threads would only wait for each other.
        for made in map(rows_of, readers) if "args" in wanted else cores.ahead(rows_of, readers):
            yield from made

    def _find(self, column: str) -> None:
        """Find what a column of all processes is made of, while no process is being read."""
        _ = self.steps if column == "step" else self.phases

    def _rows_of(self, table: Table, wanted: Sequence[str], filter: Any, who: _Who) -> list[Any]:
        """Return the rows of one process, as batches."""
        rows_of = _ROWS[table.name]

        def add(kept: _Kept, rows: Columns) -> None:
            kept.add(rows_of(who, rows, kept.passed), table, wanted, filter, len(rows))

        with self._reading[who.process.key]:
            return columns.fold(who.process, _Kept, add).batches


class _Kept:
    """What is kept of a process while its rows go by."""

    def __init__(self) -> None:
        self.passed = 0
        """How many spans have gone by."""
        self.batches: list[Any] = []

    def add(self, rows: _Rows, table: Table, wanted: Sequence[str], filter: Any, spans: int) -> None:
        """Add the rows that an expression holds for; what it does not name is made of these alone."""
        self.passed += spans
        everything = np.arange(len(rows))
        chosen = arrow.rows_of(filter, table, len(rows), lambda name: rows.column(name, everything))
        chosen = everything if chosen is None else chosen
        if len(chosen):
            made = [rows.column(name, chosen) for name in wanted]
            self.batches.append(pa.RecordBatch.from_arrays(made, schema=arrow.schema(table, wanted)))


class _Who:
    """The process of some rows, and the columns that are about it."""

    def __init__(self, recorded: Recorded, process: Process, lane: Lane) -> None:
        self.recorded = recorded
        self.process = process
        self.lane = lane
        self.from_start_ns = recorded.time_line.shift_ns(process) - recorded.start_ns
        """What to add to its times to count them from the beginning of the Recording."""
        self._texts = {"process": process.key, "role": process.role, "lane": lane.name}

    def known(self) -> dict[str, Any]:
        """Return what is known of all its rows, as columns of one row.

        Null stands for what is not known, so a lane without a rank has one that no rank is: a condition on it may seem
        to hold where it does not, and never the other way round.
        """
        texts = {name: arrow.same_text(text, 1) for name, text in self._texts.items()}
        return texts | {"rank": arrow.same_number(NO_RANK if self.lane.rank is None else self.lane.rank, 1)}

    def column(self, name: str, times_ns: Callable[[], Numbers], many: int) -> Any:
        """Return a column that rows of every table have.

        Args:
            name: Of the column.
            times_ns: Gives when the rows were, counted from the beginning of the Recording.
            many: How many rows there are.
        """
        if name in self._texts:
            return arrow.same_text(self._texts[name], many)
        if name == "rank":
            return arrow.same_number(self.lane.rank, many)
        if name == "step":
            return self.recorded.steps.column(self.lane, times_ns() + self.recorded.start_ns)
        if name == "phase":
            return self.recorded.phases.column(self.lane, times_ns() + self.recorded.start_ns)
        raise LookupError(name)


class _Rows(Protocol):
    """Rows of a table."""

    def __len__(self) -> int: ...

    def column(self, name: str, chosen: Rows) -> Any:
        """Return a column of some of them."""


class _Spans:
    """Rows of `SPANS`."""

    def __init__(self, who: _Who, rows: Columns, first: int) -> None:
        self.who, self.rows, self.first = who, rows, first

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str, chosen: Rows) -> Any:
        rows = self.rows
        if name in _TEXTS:
            return arrow.texts(rows.arguments[name][chosen], rows.texts)
        if name in _WHOLE:
            values = rows.arguments[name][chosen].astype(np.int64)
            return arrow.numbers(values, values == MISSING)
        if name == "name":
            return arrow.texts(rows.name[chosen], rows.texts)
        if name == "span":
            return pa.array(chosen + self.first)
        if name == "args":
            return pa.array([*map(arrow.as_json, rows.all_args(chosen))], pa.string())
        if name == "kv_usage":
            usage = rows.arguments[name][chosen]
            return arrow.numbers(usage, np.isnan(usage))
        if name in ("thread", "task"):
            return pa.array(getattr(rows, name)[chosen])
        if name == "thread_lane":
            found = rows.lane[chosen].astype(np.int64)
            return arrow.numbers(found, found == NO_LANE)
        if name == "automatic":
            return pa.array(rows.is_automatic[chosen])
        return self._of_time(name, chosen)

    def _of_time(self, name: str, chosen: Rows) -> Any:
        starts_ns, ends_ns = self.rows.start_ns[chosen], self.rows.end_ns[chosen]
        is_open = ends_ns == OPEN
        if name == "start_ns":
            return pa.array(starts_ns + self.who.from_start_ns)
        if name == "end_ns":
            return arrow.numbers(ends_ns + self.who.from_start_ns, is_open)
        if name == "seconds":
            return arrow.numbers((ends_ns - starts_ns) / 1e9, is_open)
        return self.who.column(name, lambda: starts_ns + self.who.from_start_ns, len(chosen))


class _Counters:
    """Rows of `COUNTERS`."""

    def __init__(self, who: _Who, rows: Columns, _: int) -> None:
        self.who, self.samples, self.texts = who, rows.samples, rows.texts

    def __len__(self) -> int:
        return len(self.samples.name)

    def column(self, name: str, chosen: Rows) -> Any:
        at_ns = self.samples.ts_ns[chosen] + self.who.from_start_ns
        if name == "name":
            return arrow.texts(self.samples.name[chosen], self.texts)
        if name == "at_ns":
            return pa.array(at_ns)
        if name in ("value", "thread"):
            return pa.array(getattr(self.samples, name)[chosen])
        return self.who.column(name, lambda: at_ns, len(chosen))


class _Flows:
    """Rows of `FLOWS`."""

    def __init__(self, who: _Who, rows: Columns, first: int) -> None:
        self.flows, self.spans = rows.flows, _Spans(who, rows, first)

    def __len__(self) -> int:
        return len(self.flows.row)

    def column(self, name: str, chosen: Rows) -> Any:
        if name == "key":
            keys, of_row = np.unique(self.flows.key[chosen], return_inverse=True)
            return arrow.texts(of_row, self.flows.keys(keys))
        if name == "direction":
            return arrow.texts(self.flows.is_out[chosen].astype(np.int64), ("in", "out"))
        return self.spans.column(name, self.flows.row[chosen])


_ROWS: dict[str, Callable[[_Who, Columns, int], _Rows]] = {
    SPANS.name: _Spans,
    COUNTERS.name: _Counters,
    FLOWS.name: _Flows,
}
