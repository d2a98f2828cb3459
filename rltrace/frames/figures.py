"""The tables of figures: made by the functions of `analysis` that make the JSON, so that both say the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from rltrace.analysis.hooks import hooks
from rltrace.analysis.lanes import Lane
from rltrace.analysis.memory import moments_of_devices, phase_boundaries
from rltrace.analysis.observations import Observations
from rltrace.analysis.phases import lane_phases, rank_steps
from rltrace.analysis.processes import processes
from rltrace.analysis.requests import REASONS, STAGES, Way, ways
from rltrace.analysis.steps import StepWindows, steps
from rltrace.analysis.weight_sync import rank_syncs
from rltrace.frames import arrow
from rltrace.frames.moments import PhaseMoments
from rltrace.frames.schema import (
    BOUNDARIES,
    HOOKS,
    MEMORY,
    PHASES,
    PROCESSES,
    REQUESTS,
    STEPS,
    WEIGHT_SYNC,
    WEIGHT_SYNC_STAGES,
    Table,
)
from rltrace.host.garbage_collector import without_collection
from rltrace.read.recording import Recording


class Figures:
    """The figures of a Recording, each made when it is first asked for, and once."""

    def __init__(self, recording: Recording, alone: Callable[[], AbstractContextManager[None]]) -> None:
        """Args:
        recording: The Recording.
        alone: Keeps others from reading it meanwhile.
        """
        self.recording = recording
        self._alone = alone
        self._made: dict[str, Any] = {}

    @functools.cached_property
    def seen(self) -> Observations:
        with without_collection():
            return Observations(self.recording)

    @functools.cached_property
    def windows(self) -> StepWindows:
        return StepWindows(self.seen)

    @functools.cached_property
    def phase_moments(self) -> PhaseMoments:
        return PhaseMoments(lane_phases(self.seen))

    def table(self, table: Table) -> Any:
        """Return a table of figures."""
        with self._alone():
            if table.name not in self._made:
                self._made[table.name] = _MADE[table.name](self)
            return self._made[table.name]

    def batches(self, table: Table, wanted: Sequence[str], filter: Any) -> Iterator[Any]:
        """Yield rows of a table of figures; see `Recorded.batches`."""
        made = self.table(table)
        held = made if filter is None else made.filter(filter)
        yield from held.select(list(wanted)).to_batches()


# ---- rows of the JSON -------------------------------------------------------------------------------------------


def _table(table: Table, rows: Sequence[Callable[[str], Any]]) -> Any:
    """Return a table.

    Args:
        table: Which it is.
        rows: Each gives its value in a column.
    """
    made = {column.name: [row(column.name) for row in rows] for column in table.columns}
    for column in table.columns:
        if column.kind == "json":
            made[column.name] = [arrow.as_json(value) for value in made[column.name]]
        if column.kind == "text":
            made[column.name] = [None if value is None else arrow.sound(value) for value in made[column.name]]
    return pa.table(made, schema=arrow.schema(table))


def _of(struct: Any, **more: Any) -> Callable[[str], Any]:
    """Return what gives the fields of a value of the JSON, and more besides."""
    return lambda name: more[name] if name in more else getattr(struct, name)


def _steps(figures: Figures) -> Any:
    return _table(STEPS, [*map(_of, steps(figures.seen, figures.windows))])


def _phases(figures: Figures) -> Any:
    rows = [
        _of(
            row, phase=name, seconds=share.seconds, share=share.share, inferred=share.inferred, step_seconds=row.seconds
        )
        for row in rank_steps(figures.seen, figures.windows)
        for name, share in row.phases.items()
    ]
    return _table(PHASES, rows)


def _weight_sync(figures: Figures) -> Any:
    return _table(WEIGHT_SYNC, [*map(_of, rank_syncs(figures.seen, figures.windows))])


def _weight_sync_stages(figures: Figures) -> Any:
    rows = [
        _of(stage, step=sync.step, lane=sync.lane, rank=sync.rank, stage=name)
        for sync in rank_syncs(figures.seen, figures.windows)
        for name, stage in sync.stages.items()
    ]
    return _table(WEIGHT_SYNC_STAGES, rows)


def _processes(figures: Figures) -> Any:
    lanes = {seen.process.key: seen.lane.name for seen in figures.seen.processes}
    return _table(PROCESSES, [_of(process, lane=lanes[process.key]) for process in processes(figures.seen)])


def _hooks(figures: Figures) -> Any:
    return _table(HOOKS, [*map(_of, hooks(figures.seen))])


# ---- the ledger -------------------------------------------------------------------------------------------------


def _memory(figures: Figures) -> Any:
    found = []
    for lane, device in moments_of_devices(figures.seen, figures.windows):
        ledger = device.ledger
        moments, owners = len(ledger.times_ns), len(ledger.owners)
        is_known = np.isfinite(ledger.apart_ns)
        of_moments = {
            "moment": pa.array(np.arange(moments)),
            "step": pa.array(device.steps, pa.int64()),
            "phase": pa.array(device.phases, pa.string()),
            "at_seconds": pa.array((ledger.times_ns - figures.seen.start_ns) / 1e9),
            "used_bytes": pa.array(ledger.used.astype(np.int64)),
            "apart_seconds": arrow.numbers(ledger.apart_ns / 1e9, ~is_known),
            "is_consistent": arrow.numbers(ledger.is_consistent, ~is_known),
        }
        of_owners = {
            "owner": pa.array(ledger.owners * moments),
            "bytes": pa.array(ledger.bytes.astype(np.int64).ravel()),
        }
        found.append(_of_device(MEMORY, lane, of_moments, np.repeat(np.arange(moments), owners), of_owners))
    return _together(MEMORY, found)


def _boundaries(figures: Figures) -> Any:
    found = []
    for lane, boundaries in phase_boundaries(figures.seen, figures.windows):
        fields = [column.name for column in BOUNDARIES.columns if column.field is not None]
        of_boundaries = {name: pa.array(boundaries.column(name)) for name in fields}
        of_boundaries["boundary"] = pa.array(np.arange(len(boundaries)))
        of_owners = {
            "owner": pa.array(boundaries.owners * len(boundaries), pa.string()),
            "bytes": pa.array(boundaries.owned_bytes[boundaries.numbers["moment"]].ravel()),
        }
        places = np.repeat(np.arange(len(boundaries)), len(boundaries.owners))
        found.append(_of_device(BOUNDARIES, lane, of_boundaries, places, of_owners))
    return _together(BOUNDARIES, found)


def _of_device(table: Table, lane: Lane, of_moments: dict[str, Any], place: Any, of_owners: dict[str, Any]) -> Any:
    """Return the rows of a device.

    Args:
        table: Which it is.
        lane: Of the device.
        of_moments: Columns with a row for each moment.
        place: The moment of each row.
        of_owners: Columns with the rows themselves.
    """
    of_lane = {
        name: pa.repeat(pa.scalar(getattr(lane, name), _plain(table, name)), len(place))
        for name in ("rank", "host", "device")
    }
    of_lane["lane"] = pa.repeat(pa.scalar(lane.name), len(place))
    repeated = {name: column.take(pa.array(place)) for name, column in of_moments.items()}
    made = of_lane | repeated | of_owners
    kinds = arrow.schema(table)
    return pa.table({name: made[name].cast(kinds.field(name).type) for name in table.names()}, schema=kinds)


def _plain(table: Table, name: str) -> Any:
    kind = arrow.schema(table).field(name).type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _together(table: Table, parts: Sequence[Any]) -> Any:
    return pa.concat_tables(parts).unify_dictionaries() if parts else arrow.schema(table).empty_table()


# ---- requests ---------------------------------------------------------------------------------------------------


def _requests(figures: Figures) -> Any:
    return _together(REQUESTS, [_of_way(way, figures) for way in ways(figures.seen)])


def _of_way(way: Way, figures: Figures) -> Any:
    """Return a row for each request whose outermost span has one name."""
    many, is_unjoined = len(way.reason), way.reason >= 0
    numbers = figures.windows.numbers
    made = {
        "name": arrow.same_text(way.name, many),
        "step": pa.array([numbers[place] for place in way.places(figures.windows).tolist()], pa.int64()),
        "start_ns": pa.array(way.edges[0] - figures.seen.start_ns),
        "seconds": arrow.numbers((way.edges[-1] - way.edges[0]) / 1e9, is_unjoined),
        "unjoined": arrow.texts(way.reason, REASONS),
    }
    for stage, (start_ns, end_ns) in zip(way.stages, pairwise(way.edges), strict=True):
        made[f"{stage}_seconds"] = arrow.numbers((end_ns - start_ns) / 1e9, is_unjoined)
    for stage in STAGES:
        made.setdefault(f"{stage}_seconds", pa.nulls(many, pa.float64()))
    return pa.table(made).select(REQUESTS.names()).cast(arrow.schema(REQUESTS))


_MADE: dict[str, Callable[[Figures], Any]] = {
    STEPS.name: _steps,
    PHASES.name: _phases,
    MEMORY.name: _memory,
    BOUNDARIES.name: _boundaries,
    REQUESTS.name: _requests,
    WEIGHT_SYNC.name: _weight_sync,
    WEIGHT_SYNC_STAGES.name: _weight_sync_stages,
    PROCESSES.name: _processes,
    HOOKS.name: _hooks,
}
