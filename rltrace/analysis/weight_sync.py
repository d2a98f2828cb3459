"""The weight sync by stage: seconds, bytes, and bandwidth."""

from __future__ import annotations

from array import array

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.intervals import EMPTY, Intervals, covered_ns, cut, outside, total_ns, union
from rltrace.analysis.lanes import Lane, order
from rltrace.analysis.observations import Intervalled, Observations
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
        self.bytes = np.concatenate([_filled(columns.bytes, columns) for columns in kept])
        self.tensors = np.concatenate([_filled(columns.tensors, columns) for columns in kept])

    def keep_inside(self, windows: Intervals) -> None:
        """Leave out what lies in no window; they are disjoint and in order."""
        self.rows, _, row = cut(self.rows, windows)
        self.bytes, self.tensors = self.bytes[row], self.tensors[row]


def _filled(column: array[int], spans: Intervalled) -> NDArray[np.int64]:
    """Return one number a span: 0 for those that were kept without."""
    return np.array(column, np.int64) if column else np.zeros(len(spans.starts), np.int64)


class _Part:
    """What of one stage lies in one window."""

    def __init__(self, rows: Intervals, size_bytes: int, tensors: int, spans: int) -> None:
        self.rows = rows
        self.bytes = size_bytes
        self.tensors = tensors
        self.spans = spans

    def figures(self) -> Stage:
        seconds = covered_ns(self.rows) / 1e9
        return Stage(
            spans=self.spans,
            seconds=seconds,
            summed_seconds=total_ns(self.rows) / 1e9,
            bytes=self.bytes,
            gigabytes_per_second=_rate(self.bytes, seconds),
        )


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
        parts = {name: _parts(of_stage, own) for name, of_stage in columns.items()}
        pieces, window, _ = cut(in_sync, own.windows)
        for place, number in enumerate(own.numbers):
            inside = {name: parts[name][place] for name in SYNC_STAGES if place in parts.get(name, {})}
            in_phase = pieces[window == place]
            if inside or len(in_phase):
                found.append((place, _rank_sync(lane, number, in_phase, inside)))
    return [sync for _, sync in sorted(found, key=lambda item: item[0])]


def _rank_sync(lane: Lane, step: int | None, in_phase: Intervals, parts: dict[str, _Part]) -> RankSync:
    in_stages = union(*(part.rows for part in parts.values()))
    whole = in_phase if len(in_phase) else _reach(in_stages)
    seconds = covered_ns(whole) / 1e9
    nothing = _Part(EMPTY, 0, 0, 0)
    sent, loaded = parts.get(SEND, nothing), parts.get(LOAD, nothing)
    size_bytes = sent.bytes or max((part.bytes for part in parts.values()), default=0)
    counted = max(parts.get(name, nothing).tensors for name in COUNTED)
    return RankSync(
        step=step,
        lane=lane.name,
        rank=lane.rank,
        seconds=seconds,
        bytes=size_bytes,
        gigabytes_per_second=_rate(size_bytes, seconds),
        buckets=sent.spans or loaded.spans,
        tensors=counted or loaded.tensors or parts.get(GATHER, nothing).spans,
        stages={name: part.figures() for name, part in parts.items()},
        rest_seconds=covered_ns(outside(in_stages, whole)[0]) / 1e9,
    )


def _reach(rows: Intervals) -> Intervals:
    """Return the time from the first to the last."""
    return np.array([[rows[0, 0], rows[-1, 1]]], np.int64) if len(rows) else EMPTY


def _parts(columns: _Columns, windows: StepWindows) -> dict[int, _Part]:
    pieces, window, row = cut(columns.rows, windows.windows)
    # A span that crosses the edge of a window has its bytes where it begins.
    is_first = np.append(True, row[1:] != row[:-1]) if len(row) else np.empty(0, bool)
    parts = {}
    for place in map(int, np.unique(window)):
        here = window == place
        rows_begun = row[here & is_first]
        parts[place] = _Part(
            pieces[here], int(columns.bytes[rows_begun].sum()), int(columns.tensors[rows_begun].sum()), len(rows_begun)
        )
    return parts


def _rate(size_bytes: int, seconds: float) -> float | None:
    return size_bytes / 1e9 / seconds if size_bytes and seconds > 0 else None
