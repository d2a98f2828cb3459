"""What the GPUs' own streams did in a steady step: compute, collectives and copies, timed by CUDA events."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.intervals import EMPTY, Intervals, cut, holding, total_ns, union
from rltrace.analysis.lanes import Lane, order
from rltrace.analysis.observations import Observations
from rltrace.analysis.phases import in_order, lane_phases
from rltrace.analysis.seen.spans import DeviceSpans
from rltrace.analysis.steps import StepWindows
from rltrace.events import GPU_TIME, LOG_PROBS, LOSS, WEIGHT_SYNC_STAGES

FORWARD, BACKWARD = PASSES = ("fsdp.forward", "fsdp.backward")
WHOLE_BACKWARD = "autograd.backward"
"""The backward from the loss on; the model's backward is a part of it."""
OPTIMIZER = "optimizer.step"
SCATTER = "fsdp.reduce_scatter"
GATHERS_AND_SCATTERS = ("fsdp.all_gather", SCATTER)
COLLECTIVES = "collectives"
"""All collectives together; overlapping ones count once."""
COMPUTE = (FORWARD, LOG_PROBS, LOSS, WHOLE_BACKWARD, BACKWARD, OPTIMIZER)
ORDER = (*COMPUTE, *GATHERS_AND_SCATTERS, COLLECTIVES, *WEIGHT_SYNC_STAGES)


class GpuWork(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of work of a rank's GPU, as a mean over the steady steps."""

    lane: str
    """The rank's lane."""
    rank: int | None
    """The rank; None if it has none."""
    work: str
    """Name of the spans without `gpu.`; `collectives` is all collectives together, overlapping ones once."""
    phase: str | None
    """The rank's phase while the GPU worked; None is the whole step: all that was launched in it, until it was done."""
    seconds: float
    """Time in which at least one such span was open. A layer's forward lies in its model's, and a model's
    backward in `autograd.backward`. The forward and backward of a model contain their waits for collectives, and a
    collective contains its wait for the slowest rank."""
    count: float
    """How many begin in a step; layers are not counted beside their model."""
    bytes: float
    """Bytes per step that a rank receives of an all-gather, or sends of a reduce-scatter: (ranks - 1) / ranks of the
    whole; 0 where the spans do not say."""
    gigabytes_per_second: float | None
    """10^9 such bytes per second of `seconds`; None if the spans do not say."""
    queued_seconds: float
    """How long collectives were ready and waited behind another of their group, added up; not a part of `seconds`."""
    least_exposed_seconds: float | None
    """Lower bound of the time in which a collective ran and that GPU computed nothing beside it. None for other work,
    or where no layer was timed (RLTRACE_CUDA_TIME=layers)."""
    most_exposed_seconds: float | None
    """Upper bound of the same: without what a model computes before and after its layers, and without the part of a
    layer's backward that may have been a wait for an earlier reduce-scatter."""
    largest_error_seconds: float
    """The largest possible error of a beginning or end of these spans."""


class _Columns:
    """Spans of one kind on one lane, or of several kinds."""

    def __init__(self, name: str, kept: list[DeviceSpans], until_ns: int) -> None:
        self.rows: Intervals = np.concatenate([spans.rows(until_ns) for spans in kept])
        self.bytes = np.concatenate([np.array(spans.moved_bytes, np.int64) for spans in kept])
        self.queued_ns = np.concatenate([np.array(spans.queued_ns, np.int64) for spans in kept])
        self.launched_ns = self.rows[:, 0] - np.concatenate([np.array(spans.behind_ns, np.int64) for spans in kept])
        self.is_part = np.concatenate([np.array(spans.of_part, bool) for spans in kept])
        self.is_counted = _outermost(self.rows) if name in PASSES else np.full(len(self.rows), True)
        self.largest_error_ns = max(spans.largest_error_ns for spans in kept)


def gpu_work(seen: Observations, windows: StepWindows) -> list[GpuWork]:
    """Return the work by rank and kind, for the whole step and then for its phases; empty without such spans or a
    finished step."""
    of_lane: dict[Lane, dict[str, list[DeviceSpans]]] = {}
    for process in seen.processes:
        for name, kept in process.device_spans.items():
            of_lane.setdefault(process.lane, {}).setdefault(name, []).append(kept)
    phases = lane_phases(seen)
    found: list[GpuWork] = []
    for lane in sorted(of_lane, key=order):
        own = windows.of(lane)
        if own.steady:
            found += _of_lane(lane, of_lane[lane], phases.get(lane, {}), own.windows[own.steady], seen.end_ns)
    return found


def gpu_work_missed(seen: Observations) -> dict[str, str]:
    """Return by process what its GPU did and nobody timed, with the reasons; processes of one name follow each
    other."""
    found: dict[str, list[str]] = {}
    for process in seen.processes:
        if (reason := process.process.unavailable.get(GPU_TIME)) is not None:
            found.setdefault(process.process.name, []).append(reason)
    return {name: "; ".join(reasons) for name, reasons in found.items()}


def _of_lane(
    lane: Lane, kept: dict[str, list[DeviceSpans]], phases: dict[str, Intervals], steady: Intervals, until_ns: int
) -> Iterator[GpuWork]:
    together = [spans for name in GATHERS_AND_SCATTERS for spans in kept.get(name, ())]
    of_phases = [(name, cut(phases[name], steady)[0]) for name in in_order(phases)]
    inside = _Phases([rows for _, rows in of_phases])
    kinds = {**kept, COLLECTIVES: together} if together else kept
    columns = {name: _Columns(name, spans, until_ns) for name, spans in kinds.items()}
    compute = _maybe_computing(columns), _surely_computing(columns)  # each disjoint and in order
    for name in sorted(columns, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name)):
        beside = compute if name in (*GATHERS_AND_SCATTERS, COLLECTIVES) else (EMPTY, EMPTY)
        in_phases = zip((phase for phase, _ in of_phases), inside.cut(columns[name].rows), strict=True)
        for phase, (pieces, begun) in ((None, _launched(columns[name], steady)), *in_phases):
            if not len(pieces):
                continue
            row = _work(lane, name, phase, columns[name], pieces, begun, beside, len(steady))
            if row.seconds or row.count:
                yield row


def _work(
    lane: Lane,
    name: str,
    phase: str | None,
    columns: _Columns,
    pieces: Intervals,
    begun: NDArray[np.intp],
    compute: tuple[Intervals, Intervals],
    steps: int,
) -> GpuWork:
    """Of these pieces and the rows that begin with one; `compute` is when the GPU may have computed, and surely did."""
    covered = union(pieces)
    seconds, size_bytes = total_ns(covered) / 1e9, int(columns.bytes[begun].sum())
    least, most = (_uncovered_ns(covered, by) / 1e9 / steps if len(by) else None for by in compute)
    return GpuWork(
        lane=lane.name,
        rank=lane.rank,
        work=name,
        phase=phase,
        seconds=seconds / steps,
        count=int(columns.is_counted[begun].sum()) / steps,
        bytes=size_bytes / steps,
        gigabytes_per_second=size_bytes / 1e9 / seconds if size_bytes and seconds else None,
        queued_seconds=int(columns.queued_ns[begun].sum()) / 1e9 / steps,
        least_exposed_seconds=least,
        most_exposed_seconds=most,
        largest_error_seconds=columns.largest_error_ns / 1e9,
    )


def _launched(columns: _Columns, steps: Intervals) -> tuple[Intervals, NDArray[np.intp]]:
    """What the host launched in these steps, whole: it is theirs though the GPU ends it in the next step."""
    begun = np.flatnonzero(holding(steps, columns.launched_ns) >= 0)
    return columns.rows.take(begun, axis=0), begun


class _Phases:
    """When a rank was in each of its phases."""

    def __init__(self, windows: list[Intervals]) -> None:
        self._windows = windows
        together = np.concatenate([EMPTY, *windows])
        of_phase = np.repeat(np.arange(len(windows)), [len(rows) for rows in windows])
        in_order = np.argsort(together[:, 0], kind="stable")
        self._together, self._of_phase = together[in_order], of_phase[in_order]
        self._are_apart = bool((self._together[:-1, 1] <= self._together[1:, 0]).all())
        """Whether no two phases overlap, so that all are cut at once."""

    def cut(self, rows: Intervals) -> Iterator[tuple[Intervals, NDArray[np.intp]]]:
        """Yield for each phase what the GPU did inside, and which rows began there."""
        pieces, window, row = cut(rows, self._together if self._are_apart else EMPTY)
        phase = self._of_phase[window].astype(np.uint16)
        by_phase = np.argsort(phase, kind="stable")
        ends = np.searchsorted(phase[by_phase], np.arange(len(self._windows) + 1, dtype=np.uint16)).tolist()
        for number, inside in enumerate(self._windows):
            if self._are_apart:
                own = by_phase[ends[number] : ends[number + 1]]
                if not len(own):  # as in most phases, which have no work of this kind
                    yield EMPTY, own
                    continue
                found, of_row = pieces.take(own, axis=0), row[own]
            else:
                found, _, of_row = cut(rows, inside)
            yield found, of_row[found[:, 0] == rows[of_row, 0]]


def _maybe_computing(columns: dict[str, _Columns]) -> Intervals:
    """Return when a GPU may have computed: in its layers, in what a model does before and after them, and in the
    optimizer.

    Between two layers of a pass it waited for their parameters.

    Returns:
        Empty if no layer was timed.
    """
    passes = [columns[name] for name in PASSES if name in columns]
    parts = union(*(kind.rows[kind.is_part] for kind in passes))
    if not len(parts):
        return EMPTY
    ends = [_around(kind.rows[~kind.is_part], parts) for kind in passes]
    return union(parts, *ends, _rows(columns, OPTIMIZER))


def _surely_computing(columns: dict[str, _Columns]) -> Intervals:
    """Return when it certainly computed: in a layer's forward, at the end of its backward, and in the optimizer.

    A layer's backward may wait at its end for an earlier reduce-scatter (torch 2.13, FSDPParamGroup.post_backward), so
    only the part after the last reduce-scatter that ended inside of it is certainly no wait.

    Returns:
        Empty if no layer was timed.
    """
    forwards, backwards = _innermost_parts(columns, FORWARD), _innermost_parts(columns, BACKWARD)
    if not len(forwards) and not len(backwards):
        return EMPTY
    scattered_ns = np.append(0, np.sort(_rows(columns, SCATTER)[:, 1]))
    last_ns = scattered_ns[np.searchsorted(scattered_ns[1:], backwards[:, 1])]
    tails = np.column_stack([np.maximum(backwards[:, 0], last_ns), backwards[:, 1]])
    return union(forwards, tails, _rows(columns, OPTIMIZER))


def _rows(columns: dict[str, _Columns], name: str) -> Intervals:
    return columns[name].rows if name in columns else EMPTY


def _innermost_parts(columns: dict[str, _Columns], name: str) -> Intervals:
    """Return modules that contain no other: in a module with others, the GPU waits between them."""
    if name not in columns:
        return EMPTY
    kind = columns[name]
    rows = kind.rows[kind.is_part]
    rows = rows[np.lexsort((-rows[:, 1], rows[:, 0]))]
    return rows[np.append(rows[1:].mean(axis=1) >= rows[:-1, 1], True)] if len(rows) else EMPTY


def _around(wholes: Intervals, parts: Intervals) -> Intervals:
    """Return for each whole what lies before its first part and after its last one; all of a whole without parts."""
    first = np.searchsorted(parts[:, 1], wholes[:, 0], side="right")
    behind = np.searchsorted(parts[:, 0], wholes[:, 1], side="left")
    has_parts = behind > first
    starts, ends = wholes[has_parts].T
    before = np.column_stack([starts, parts[first[has_parts], 0]])
    after = np.column_stack([parts[behind[has_parts] - 1, 1], ends])
    return np.concatenate([wholes[~has_parts], before, after])


def _outermost(rows: Intervals) -> NDArray[np.bool_]:
    """Return which rows lie in no other, judged by their middle, because both ends of a row inside another are
    uncertain."""
    by_start = np.lexsort((-rows[:, 1], rows[:, 0]))
    reach_ns = np.maximum.accumulate(rows[by_start, 1])
    middle_ns = rows.take(by_start, axis=0).mean(axis=1)
    is_outermost = np.empty(len(rows), bool)
    is_outermost[by_start] = np.append(True, middle_ns[1:] >= reach_ns[:-1])
    return is_outermost


def _uncovered_ns(rows: Intervals, by: Intervals) -> int:
    """Return how much of some intervals lies outside of others; both are disjoint and in order."""
    return total_ns(rows) - total_ns(cut(rows, by)[0])
