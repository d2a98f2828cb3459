"""The weight sync by stage: seconds, bytes, and bandwidth."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.intervals import Intervals, added_up, covered_in, cut, outside, paired, union
from rltrace.analysis.lanes import Lane, order
from rltrace.analysis.observations import Observations
from rltrace.analysis.seen.spans import Intervalled, Stages
from rltrace.analysis.steps import StepWindows
from rltrace.events import EMPTY_CACHE, SYNC_STAGES

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


class _Part(NamedTuple):
    """What of one stage lies in one window."""

    stage: Stage
    tensors: int


_NOTHING = _Part(Stage(spans=0, seconds=0.0, summed_seconds=0.0, bytes=0, gigabytes_per_second=None), 0)


def rank_syncs(seen: Observations, windows: StepWindows) -> list[RankSync]:
    """Return the sync of every rank in every step that has one: by step, then by rank."""
    stages: dict[Lane, dict[str, list[Intervalled]]] = {}
    emptied: dict[Lane, list[Intervalled]] = {}
    phase: dict[Lane, list[Intervals]] = {}
    for process in seen.processes:
        for name, kept in process.stages.items():
            stages.setdefault(process.lane, {}).setdefault(name, []).append(kept)
        if (EMPTY_CACHE, None) in process.automatic_spans:
            emptied.setdefault(process.lane, []).append(process.automatic_spans[EMPTY_CACHE, None])
        if PHASE in process.phases:
            phase.setdefault(process.lane, []).append(process.phases[PHASE].rows(seen.end_ns))
    found = []
    for lane in sorted(stages.keys() | phase.keys(), key=order):
        in_sync = union(*phase.get(lane, []))
        columns = {name: _Columns(kept, seen.end_ns) for name, kept in stages.get(lane, {}).items()}
        if lane in emptied:  # caches are emptied at other times too
            columns[EMPTY_CACHE] = _Columns(emptied[lane], seen.end_ns)
            columns[EMPTY_CACHE].keep_inside(in_sync)
        own = windows.of(lane)
        parts = {name: _parts(columns[name], own) for name in SYNC_STAGES if name in columns}
        in_stages = union(*(of_stage.rows for of_stage in columns.values()))
        whole = _whole(in_sync, in_stages, own.windows)
        seconds_ns, rest_ns = covered_in(whole, own.windows), _rest_ns(whole, in_stages, own.windows)
        is_in_phase = _has_any(in_sync, own.windows)
        for place, number in enumerate(own.numbers):
            inside = {name: of_stage[place] for name, of_stage in parts.items() if place in of_stage}
            if inside or is_in_phase[place]:
                found.append((place, _rank_sync(lane, number, int(seconds_ns[place]), int(rest_ns[place]), inside)))
    return [sync for _, sync in sorted(found, key=lambda item: item[0])]


def _rank_sync(lane: Lane, step: int | None, whole_ns: int, rest_ns: int, parts: dict[str, _Part]) -> RankSync:
    seconds = whole_ns / 1e9
    sent, loaded = parts.get(SEND, _NOTHING), parts.get(LOAD, _NOTHING)
    size_bytes = sent.stage.bytes or max((part.stage.bytes for part in parts.values()), default=0)
    counted = max(parts.get(name, _NOTHING).tensors for name in COUNTED)
    return RankSync(
        step=step,
        lane=lane.name,
        rank=lane.rank,
        seconds=seconds,
        bytes=size_bytes,
        gigabytes_per_second=_rate(size_bytes, seconds),
        buckets=sent.stage.spans or loaded.stage.spans,
        tensors=counted or loaded.tensors or parts.get(GATHER, _NOTHING).stage.spans,
        stages={name: part.stage for name, part in parts.items()},
        rest_seconds=rest_ns / 1e9,
    )


def _has_any(rows: Intervals, windows: Intervals) -> NDArray[np.bool_]:
    """Return in which windows any of the rows lies."""
    return np.bincount(cut(rows, windows)[1], minlength=len(windows)) > 0


def _whole(in_sync: Intervals, in_stages: Intervals, windows: Intervals) -> Intervals:
    """Return when each window's sync was: in its phase, or from the first to the last of its stages."""
    in_phase, window, _ = cut(in_sync, windows)
    pieces, of_piece, _ = cut(in_stages, windows)
    alone = ~np.isin(of_piece, window)
    pieces, of_piece = pieces[alone], of_piece[alone]
    is_first = np.append(True, of_piece[1:] != of_piece[:-1]) if len(of_piece) else np.empty(0, bool)
    is_last = np.append(is_first[1:], True) if len(of_piece) else is_first
    return union(in_phase, paired(pieces[is_first, 0], pieces[is_last, 1]))


def _rest_ns(whole: Intervals, in_stages: Intervals, windows: Intervals) -> NDArray[np.int64]:
    """Return for how long no stage was open in each window's sync."""
    return covered_in(outside(in_stages, whole)[0], windows)


def _parts(columns: _Columns, windows: StepWindows) -> dict[int, _Part]:
    pieces, window, row = cut(columns.rows, windows.windows)
    # A span that crosses the edge of a window has its bytes where it begins.
    is_first = np.append(True, row[1:] != row[:-1]) if len(row) else np.empty(0, bool)
    begun = np.flatnonzero(is_first)
    many = len(windows.windows)
    there = np.flatnonzero(np.bincount(window, minlength=many))
    columns_of = (
        np.bincount(window[begun], minlength=many),
        covered_in(columns.rows, windows.windows) / 1e9,
        added_up(pieces[:, 1] - pieces[:, 0], window, many) / 1e9,
        added_up(columns.bytes[row[begun]], window[begun], many),
        added_up(columns.tensors[row[begun]], window[begun], many),
    )
    return {
        place: _Part(
            Stage(
                spans=spans,
                seconds=seconds,
                summed_seconds=summed_seconds,
                bytes=size_bytes,
                gigabytes_per_second=_rate(size_bytes, seconds),
            ),
            tensors,
        )
        for place, spans, seconds, summed_seconds, size_bytes, tensors in zip(
            there.tolist(), *(column[there].tolist() for column in columns_of), strict=True
        )
    }


def _rate(size_bytes: int, seconds: float) -> float | None:
    return size_bytes / 1e9 / seconds if size_bytes and seconds > 0 else None
