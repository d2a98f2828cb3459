"""The weight sync by stage: seconds, bytes, and bandwidth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.intervals import Intervals, added_up, covered_in, cut, paired, union
from rltrace.analysis.lanes import Lane, order
from rltrace.analysis.moments import where_known
from rltrace.analysis.observations import Observations
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.spans import Intervalled, Stages
from rltrace.analysis.steps import StepWindows
from rltrace.events import STAGES_INSIDE, SYNC_STAGES

PHASE = "weight_sync"
SEND = "weight_sync.send"
GATHER = "weight_sync.gather"
LOAD = "weight_sync.load"
COUNTED = ("weight_sync.pack", SEND)
"""Stages that may say how many tensors they took."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a rank's sync, over all its buckets."""

    spans: int
    """How many spans the stage has."""
    seconds: float
    """Time in which at least one of them was open; overlapping buckets count once."""
    summed_seconds: float
    """Sum over the spans; more than `seconds` if buckets overlap."""
    bytes: int
    """Bytes that the spans say they handled."""
    gigabytes_per_second: float | None
    """10^9 bytes per second of `seconds`; None if the spans carry no bytes."""


class RankSync(msgspec.Struct, frozen=True, kw_only=True):
    """The sync of one rank in one step."""

    step: int | None
    """Number of the step; None before the first step, or in a Recording without steps."""
    lane: str
    """The rank's lane."""
    rank: int | None
    """The rank."""
    seconds: float
    """Length of the phase `weight_sync`; without it, from the first to the last span of a stage."""
    bytes: int
    """Bytes sent; if no span says so, the most that one stage handled."""
    gigabytes_per_second: float | None
    """10^9 bytes per second of `seconds`."""
    buckets: int
    """Buckets sent; if no span says so, buckets loaded."""
    tensors: int
    """Tensors sent; if no span says so, tensors loaded, or else parameters gathered."""
    stages: dict[str, Stage]
    """By name, in the order in which a bucket passes them."""
    rest_seconds: float
    """The part of `seconds` in which no stage was open."""


class _Columns:
    """Spans of one stage on one lane."""

    def __init__(self, kept: list[Intervalled], until_ns: int) -> None:
        self.rows: Intervals = np.concatenate([columns.rows(until_ns) for columns in kept])
        self.bytes = np.concatenate([_filled("bytes", columns) for columns in kept])
        self.tensors = np.concatenate([_filled("tensors", columns) for columns in kept])

    def keep_inside(self, windows: Intervals) -> None:
        """Leave out what lies in no window; they are disjoint and in order."""
        self.rows, _, row = cut(self.rows, windows)
        self.bytes, self.tensors = self.bytes[row], self.tensors[row]


def _filled(column: str, spans: Intervalled) -> NDArray[np.int64]:
    """Return one number a span: 0 for those that were kept without."""
    return np.array(getattr(spans, column), np.int64) if isinstance(spans, Stages) else np.zeros(len(spans), np.int64)


class _Parts(NamedTuple):
    """What of one stage lies in each window: one number a window."""

    is_there: NDArray[np.bool_]
    """Whether anything does."""
    spans: NDArray[np.int64]
    covered_ns: NDArray[np.int64]
    summed_ns: NDArray[np.int64]
    bytes: NDArray[np.int64]
    tensors: NDArray[np.int64]


def rank_syncs(seen: Observations, windows: StepWindows) -> list[RankSync]:
    """Return the sync of every rank in every step that has one: by step, then by rank."""
    stages: dict[Lane, dict[str, list[Intervalled]]] = {}
    phase: dict[Lane, list[Intervals]] = {}
    for process in seen.processes:
        for name, kept in _stages_of(process):
            stages.setdefault(process.lane, {}).setdefault(name, []).append(kept)
        if PHASE in process.phases:
            phase.setdefault(process.lane, []).append(process.phases[PHASE].rows(seen.end_ns))
    found: list[tuple[int, RankSync]] = []
    for lane in sorted(stages.keys() | phase.keys(), key=order):
        in_sync = union(*phase.get(lane, []))
        columns = {name: _Columns(kept, seen.end_ns) for name, kept in stages.get(lane, {}).items()}
        for name in columns.keys() & set(STAGES_INSIDE):
            columns[name].keep_inside(in_sync)
        own = windows.of(lane)
        parts = {name: _parts(columns[name], own.windows) for name in SYNC_STAGES if name in columns}
        in_stages = union(*(of_stage.rows for of_stage in columns.values()))
        lengths_ns = _whole_and_rest_ns(_whole(in_sync, in_stages, own.windows), in_stages, own.windows)
        is_there = np.any([_has_any(in_sync, own.windows), *(part.is_there for part in parts.values())], axis=0)
        places = np.flatnonzero(is_there)
        found += zip(places.tolist(), _rank_syncs(lane, own, places, *lengths_ns, parts), strict=True)
    return [sync for _, sync in sorted(found, key=lambda item: item[0])]


def _stages_of(process: Seen) -> Iterator[tuple[str, Intervalled]]:
    """Yield the spans of a process that are stages of a sync, or are so inside of one, by name."""
    yield from process.stages.items()
    for name in STAGES_INSIDE:
        if (name, None) in process.automatic_spans:
            yield name, process.automatic_spans[name, None]


def _rank_syncs(
    lane: Lane,
    windows: StepWindows,
    places: NDArray[np.intp],
    whole_ns: NDArray[np.int64],
    rest_ns: NDArray[np.int64],
    parts: dict[str, _Parts],
) -> list[RankSync]:
    """Return the syncs of a rank in the windows at some places."""
    zeros = np.zeros(len(windows.windows), np.int64)
    nothing = _Parts(zeros > 0, zeros, zeros, zeros, zeros, zeros)
    sent, loaded, gathered = (parts.get(name, nothing) for name in (SEND, LOAD, GATHER))
    size_bytes = _first_of(sent.bytes, np.max([nothing.bytes, *(part.bytes for part in parts.values())], axis=0))
    counted = np.max([parts.get(name, nothing).tensors for name in COUNTED], axis=0)
    seconds = whole_ns / 1e9
    columns = (
        seconds,
        size_bytes,
        _first_of(sent.spans, loaded.spans),
        _first_of(counted, loaded.tensors, gathered.spans),
        rest_ns / 1e9,
    )
    rows = (column[places].tolist() for column in columns)
    rates, stages = _rates(size_bytes[places], seconds[places]), _stages(parts, len(windows.windows))
    return [
        RankSync(
            step=windows.numbers[place],
            lane=lane.name,
            rank=lane.rank,
            seconds=seconds,
            bytes=size_bytes,
            gigabytes_per_second=rate,
            buckets=buckets,
            tensors=tensors,
            stages=stages[place],
            rest_seconds=rest_seconds,
        )
        for place, rate, seconds, size_bytes, buckets, tensors, rest_seconds in zip(
            places.tolist(), rates, *rows, strict=True
        )
    ]


def _stages(parts: dict[str, _Parts], many: int) -> list[dict[str, Stage]]:
    """Return the stages of each of so many windows, by name."""
    stages: list[dict[str, Stage]] = [{} for _ in range(many)]
    for name, part in parts.items():
        there = np.flatnonzero(part.is_there)
        in_seconds = part.covered_ns[there] / 1e9
        columns = (there, part.spans[there], in_seconds, part.summed_ns[there] / 1e9, part.bytes[there])
        rates = _rates(part.bytes[there], in_seconds)
        for place, spans, seconds, summed_seconds, size_bytes, rate in zip(
            *(column.tolist() for column in columns), rates, strict=True
        ):
            stages[place][name] = Stage(
                spans=spans,
                seconds=seconds,
                summed_seconds=summed_seconds,
                bytes=size_bytes,
                gigabytes_per_second=rate,
            )
    return stages


def _first_of(*columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first number of each row that is not 0."""
    *others, found = columns
    for column in reversed(others):
        found = np.where(column, column, found)
    return found


def _has_any(rows: Intervals, windows: Intervals) -> NDArray[np.bool_]:
    """Return in which windows any of the rows lies."""
    return np.bincount(cut(rows, windows)[1], minlength=len(windows)) > 0


def _whole(in_sync: Intervals, in_stages: Intervals, windows: Intervals) -> Intervals:
    """Return when each window's sync was: in its phase, or from the first to the last of its stages."""
    pieces, of_piece, _ = cut(in_stages, windows[~_has_any(in_sync, windows)])
    is_first = np.append(True, of_piece[1:] != of_piece[:-1]) if len(of_piece) else np.empty(0, bool)
    is_last = np.append(is_first[1:], True) if len(of_piece) else is_first
    return union(cut(in_sync, windows)[0], paired(pieces[is_first, 0], pieces[is_last, 1]))


def _whole_and_rest_ns(
    whole: Intervals, in_stages: Intervals, windows: Intervals
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how long the sync of each window was, and the part of it in which no stage was open."""
    in_windows, window, _ = cut(whole, windows)
    pieces, of_whole, _ = cut(in_stages, in_windows)
    whole_ns = added_up(in_windows[:, 1] - in_windows[:, 0], window, len(windows))
    return whole_ns, whole_ns - added_up(pieces[:, 1] - pieces[:, 0], window[of_whole], len(windows))


def _parts(columns: _Columns, windows: Intervals) -> _Parts:
    pieces, window, row = cut(columns.rows, windows)
    # A span that crosses the edge of a window has its bytes where it begins.
    is_first = np.append(True, row[1:] != row[:-1]) if len(row) else np.empty(0, bool)
    begun, of_begun = row[is_first], window[is_first]
    many = len(windows)
    summed_ns = added_up(pieces[:, 1] - pieces[:, 0], window, many)
    joined = union(columns.rows)
    overlap = len(joined) < len(columns.rows)  # buckets may; else what they cover is their sum
    return _Parts(
        is_there=np.bincount(window, minlength=many) > 0,
        spans=np.bincount(of_begun, minlength=many),
        covered_ns=covered_in(joined, windows) if overlap else summed_ns,
        summed_ns=summed_ns,
        bytes=added_up(columns.bytes[begun], of_begun, many),
        tensors=added_up(columns.tensors[begun], of_begun, many),
    )


def _rates(size_bytes: NDArray[np.int64], seconds: NDArray[np.float64]) -> list[float | None]:
    """Return 10^9 bytes per second of each row; None without bytes or seconds."""
    is_known = (size_bytes != 0) & (seconds > 0)
    return where_known((size_bytes / 1e9 / np.where(is_known, seconds, 1.0)).tolist(), is_known)
