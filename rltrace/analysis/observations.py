"""Reads all events of a Recording once: keeps what the figures are computed from, and drops the rest."""

from __future__ import annotations

from array import array
from collections import defaultdict
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.clocks import TimeLine
from rltrace.analysis.intervals import Intervals
from rltrace.analysis.lanes import Lane, lanes
from rltrace.events import (
    AGENT_REQUEST,
    ALLOCATED_PEAK,
    ALLOCATIONS,
    ALLOCATIONS_KEPT,
    ALLOCATIONS_RESERVED,
    DEVICE_TIME,
    ENGINE_STEP,
    FORWARD,
    KERNEL,
    MEMORY_EDGE,
    MEMORY_MOVES,
    OPERATOR,
    OUT_OF_MEMORY,
    RAY_CALL,
    RAY_SUBMIT,
    REQUEST,
    SAMPLER,
    SERVER_REQUEST,
    STEP,
    WEIGHT_SYNC_STAGES,
    Counter,
    Span,
    asked_ids,
    owner_of_counter,
    owner_of_pinned,
    owner_on_host,
)
from rltrace.read.gate import is_size
from rltrace.read.recording import Process, Recording

REWARD_MEAN, TOKENS, TOKENS_PER_SECOND = "reward_mean", "tokens", "tokens_per_second"
STEP_FIGURES = (REWARD_MEAN, TOKENS, TOKENS_PER_SECOND)
"""Counters, or arguments of the `step` span, that say how a step went; other samples of the driver are kept too."""

RESIDENT = "resident_bytes"

_NEVER_NS = 1 << 63
OPEN = -1
"""The end of a span that has none."""

SERVED = "generate"
"""The method by which an agent loop asks a server for tokens, in all that are known."""


class Intervalled:
    """Spans of one name, as columns: 16 bytes per span, 32 if their bytes and tensors count."""

    __slots__ = ("bytes", "ends", "starts", "tensors")

    def __init__(self) -> None:
        self.starts = array("q")
        self.ends = array("q")
        self.bytes = array("q")
        self.tensors = array("q")

    def rows(self, until_ns: int) -> Intervals:
        """Return rows of shape (N, 2); open spans end at `until_ns`."""
        starts = np.frombuffer(self.starts, np.int64) if self.starts else np.empty(0, np.int64)
        ends = np.frombuffer(self.ends, np.int64) if self.ends else np.empty(0, np.int64)
        return np.column_stack([starts, np.where(ends == OPEN, until_ns, ends)])

    def ended(self) -> Intervals:
        """Return the same, without open spans."""
        rows = self.rows(0)
        return rows[np.frombuffer(self.ends, np.int64) != OPEN] if self.ends else rows


class DeviceSpans(Intervalled):
    """Spans of one kind of work on a GPU's streams, as columns: 41 bytes per span."""

    __slots__ = ("behind_ns", "largest_error_ns", "moved_bytes", "of_part", "queued_ns")

    def __init__(self) -> None:
        super().__init__()
        self.behind_ns = array("q")
        """How long before its beginning the host had launched it."""
        self.moved_bytes = array("q")
        """Bytes of a collective: to a rank, or from it."""
        self.queued_ns = array("q")
        self.of_part = array("b")
        """1 for a module inside of the model."""
        self.largest_error_ns = 0


class Passed(Intervalled):
    """Spans of one name that requests pass on their way to an engine, as columns: 32 bytes per span, 56 of an
    engine's."""

    __slots__ = ("keys", "places", "queued_ns", "stems", "tokens")

    def __init__(self) -> None:
        super().__init__()
        self.places = array("q")
        """Which thread and task of which process it was in."""
        self.keys = array("q")
        """The request's id, or that of Ray's call."""
        self.stems = array("q")
        """The id of an engine's request, without what the engine has put behind it."""
        self.queued_ns = array("q")
        """How long an engine's request waited there; -1 if nobody said so."""
        self.tokens = array("q")
        """How many tokens an engine made for it; -1 if nobody said so."""


class EngineSteps(Intervalled):
    """Steps of an engine, as columns: 48 bytes per span."""

    __slots__ = ("kv_usage", "preempted", "running", "waiting")

    def __init__(self) -> None:
        super().__init__()
        self.running = array("i")
        self.waiting = array("i")
        """Requests that were computed, and that waited; -1 if nobody said so."""
        self.preempted = array("i")
        """Requests that lost their KV cache in the step."""
        self.kv_usage = array("d")
        """Share of the KV cache that was taken, 0 to 1; -1 if nobody said so."""


class Forwards(Intervalled):
    """Forwards of models, as columns: 24 bytes per span."""

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        super().__init__()
        self.tokens = array("q")
        """Rows times columns of what the model was called with; 0 if nobody said so."""


class Samples:
    """Samples of one counter of one process, as columns."""

    __slots__ = ("times_ns", "values")

    def __init__(self) -> None:
        self.times_ns = array("q")
        self.values = array("d")

    def add(self, time_ns: int, value: float) -> None:
        """Append one."""
        self.times_ns.append(time_ns)
        self.values.append(value)

    def sort(self) -> None:
        """Put them in the order of their times: each thread of a process writes its own."""
        times_ns = np.frombuffer(self.times_ns, np.int64)
        if (np.diff(times_ns) >= 0).all():
            return
        order = np.argsort(times_ns, kind="stable")
        values = np.frombuffer(self.values, np.float64)[order]
        self.times_ns, self.values = array("q", times_ns[order].tobytes()), array("d", values.tobytes())


def values_at(samples: Samples, times_ns: NDArray[np.int64]) -> NDArray[np.float64]:
    """The last value of each moment or before it; 0 before the first."""
    behind = np.searchsorted(np.array(samples.times_ns, np.int64), times_ns, side="right")
    return np.concatenate([[0.0], np.array(samples.values, np.float64)])[behind]


class Balances:
    """What the owners of a process held after each allocation, as columns in the order of the allocator's changes."""

    __slots__ = ("owners", "places", "times_ns", "values")

    def __init__(self) -> None:
        self.times_ns = array("q")
        self.values = array("d")
        self.places = array("B")
        """The place of each one's owner in `owners`."""
        self.owners: list[str] = []

    def add(self, owner: str, time_ns: int, value: float) -> None:
        """Append one."""
        if owner not in self.owners:
            self.owners.append(owner)
        self.times_ns.append(time_ns)
        self.values.append(value)
        self.places.append(self.owners.index(owner))


SpanName = tuple[str, str | None]
"""Name of a span; of a call also what was called."""


class Seen:
    """What was kept of one process."""

    def __init__(self, process: Process, lane: Lane) -> None:
        self.process = process
        self.lane = lane
        self.first_ns = 0
        self.last_ns = 0
        """When it began, and when its last event was."""
        self.last_span_ns = 0
        """When one of its spans last began or ended."""
        self.spans = 0
        self.samples = 0
        self.steps: list[Span] = []
        self.phases: defaultdict[str, Intervalled] = defaultdict(Intervalled)
        self.inferred: dict[tuple[str, str], None] = {}
        """Names of steps and phases that were inferred, each with the reason."""
        self.stages: defaultdict[str, Intervalled] = defaultdict(Intervalled)
        self.device_spans: defaultdict[str, DeviceSpans] = defaultdict(DeviceSpans)
        """Spans by kind of work: their names after `gpu.`."""
        self.owners: defaultdict[str, Samples] = defaultdict(Samples)
        self.on_host: defaultdict[str, Samples] = defaultdict(Samples)
        """Bytes of owners that lie in the host's memory, beside a GPU."""
        self.pinned: defaultdict[str, Samples] = defaultdict(Samples)
        """The page-locked ones among them; `unattributed` is what else torch has page-locked."""
        self.resident = Samples()
        """Bytes of the whole process in the host's memory."""
        self.allocated_peak = Samples()
        """The most that torch's allocator had handed out at once, each time that this changed."""
        self.figures: defaultdict[str, Samples] = defaultdict(Samples)
        self.sampled: defaultdict[str, Samples] = defaultdict(Samples)
        """All counters of a host's sampler."""
        self.open_spans: list[Span] = []
        self.balances = Balances()
        self.reserved = Samples()
        """What its allocators have from the driver, each time that this changed; from the same histories as
        `balances`."""
        self.allocations_kept: list[Span] = []
        """Spans in which every allocation is in `balances`."""
        self.edges: list[Span] = []
        """When it measured what it owns, at phase boundaries, with the totals that it read."""
        self.moves: list[Span] = []
        """Sleeps and wake-ups, and the mappings inside them."""
        self.out_of_memory: list[Span] = []
        self.errors: defaultdict[tuple[int, int, str, str], Intervalled] = defaultdict(Intervalled)
        """Spans that an exception left, by thread, task, exception and name, without steps and moves, which have their
        own."""
        self.messages: dict[tuple[str, str], tuple[int, str]] = {}
        """When the first exception of a type left a span of a name, and what it said, by type and name."""
        self.own_spans: defaultdict[SpanName, Intervalled] = defaultdict(Intervalled)
        """All other spans that the program made itself."""
        self.automatic_spans: defaultdict[SpanName, Intervalled] = defaultdict(Intervalled)
        """All other spans that hooks made."""
        self.engine_steps = EngineSteps()
        """Those among the automatic spans that are an engine's steps."""
        self.forwards = Forwards()
        """Those that are a model's forwards."""
        self.passed: defaultdict[str, Passed] = defaultdict(Passed)
        """Those that join a request's way, by name: its own ones, and Ray's where a server is asked for tokens."""

    def sort_samples(self) -> None:
        """Put the samples of each counter in order."""
        by_name = (self.owners, self.on_host, self.pinned, self.figures, self.sampled)
        named = (samples for of_kind in by_name for samples in of_kind.values())
        for samples in (*named, self.resident, self.allocated_peak, self.reserved):
            samples.sort()


class Observations:
    """What was kept of a Recording; all times are on its `TimeLine`.

    Memory: a few numbers for each span and each owner's sample; nothing for any other event, such as torch.profiler's.
    """

    def __init__(self, recording: Recording) -> None:
        processes = recording.processes
        self.recording = recording
        self.time_line = TimeLine(recording)
        on_lane = lanes(processes)
        self.processes = [_see(process, on_lane[process.key], self.time_line) for process in processes]
        self.start_ns = min((seen.first_ns for seen in self.processes), default=0)
        self.end_ns = max((seen.last_ns for seen in self.processes), default=0)
        """The time of the last event of all."""
        self.now_ns = self.time_line.now_ns()
        self.went_on_ns = _went_on_ns(self.processes)
        """By the key of a process that went on as another program (`exec`), when that program began."""

    def open_until_ns(self, seen: Seen) -> int:
        """Return until when an open span of a process counts: until the process was over, else until its last event."""
        over_ns = self._over_ns(seen)
        return seen.last_ns if over_ns is None else over_ns

    def is_end_known(self, seen: Seen) -> bool:
        """Return whether a process is alive, or has ended its part, or was seen to be gone."""
        return seen.process.end_ns is not None or self._over_ns(seen) is not None

    def _over_ns(self, seen: Seen) -> int | None:
        """Return when it was seen to be gone, or now if it is alive."""
        if seen.process.key in self.went_on_ns:
            return self.went_on_ns[seen.process.key]
        if seen.process.is_alive:
            return self.now_ns
        gone_ns = seen.process.gone_ns
        return None if gone_ns is None else gone_ns + self.time_line.shift_ns(seen.process)


def _went_on_ns(all_seen: list[Seen]) -> dict[str, int]:
    """Return when the next program of the same process began, for each that did not end its part itself."""
    began_ns: dict[str, int] = {}
    next_of: dict[tuple[Any, ...], Seen] = {}
    for seen in sorted(all_seen, key=lambda seen: -seen.first_ns):
        process = seen.process
        if process.life is None:
            continue
        if process.life in next_of and (process.end_ns is None or process.gone_ns is not None):
            began_ns[process.key] = next_of[process.life].first_ns
        next_of[process.life] = seen
    return began_ns


def _see(process: Process, lane: Lane, time_line: TimeLine) -> Seen:
    seen = Seen(process, lane)
    shift_ns = time_line.shift_ns(process)
    last_ns = last_span_ns = process.start_ns
    owner_names: dict[str, str | None] = {}
    for event in process.events():
        if isinstance(event, Counter):
            seen.samples += 1
            last_ns = max(last_ns, event.ts_ns)
            _see_sample(seen, event, owner_names, shift_ns)
            continue
        seen.spans += 1
        end_ns = event.end_ns
        if end_ns is None:
            end_ns = event.start_ns
            seen.open_spans.append(event)
        if end_ns > last_span_ns:
            last_span_ns = end_ns
        kept = _kept_whole(seen, event)
        if kept is not None:
            kept.append(event)
        error = event.args.get("error")
        if _is_exception(error) and event.name != STEP and event.name not in MEMORY_MOVES:
            _see_interval(seen.errors[event.thread, event.task, error, event.name], event, shift_ns)
            _see_message(seen.messages, event, error)
        if event.is_inferred:
            seen.inferred[event.name, str(event.args.get("reason"))] = None
        if event.name in _STAGES:
            _see_stage(seen.stages[event.name], event, shift_ns)
        elif event.is_phase:
            _see_interval(seen.phases[event.name], event, shift_ns)
        elif event.name == STEP:
            seen.steps.append(event)
        elif event.is_automatic and event.name.startswith(DEVICE_TIME):
            _see_device_span(seen.device_spans[event.name.removeprefix(DEVICE_TIME)], event, shift_ns)
        elif kept is None and not (event.is_automatic and event.name.startswith(_PROFILED)):
            method = event.args.get("method") if event.name == RAY_CALL else None
            spans = seen.automatic_spans if event.is_automatic else seen.own_spans
            _see_interval(spans[event.name, None if method is None else str(method)], event, shift_ns)
            if event.name in _ON_THE_WAY:
                _see_passed(seen, event, shift_ns)
            elif event.name == ENGINE_STEP:
                _see_engine_step(seen.engine_steps, event, shift_ns)
            elif event.name == FORWARD and event.is_automatic:
                _see_interval(seen.forwards, event, shift_ns)
                seen.forwards.tokens.append(int(event.args.get("rows", 0)) * int(event.args.get("columns", 0)))
    if shift_ns:
        _shift(seen, shift_ns)
    seen.sort_samples()
    seen.first_ns = process.start_ns + shift_ns
    seen.last_span_ns = last_span_ns + shift_ns
    seen.last_ns = max(last_ns, last_span_ns, process.end_ns or 0) + shift_ns
    return seen


_STAGES = frozenset(WEIGHT_SYNC_STAGES)
_ON_THE_WAY = frozenset({AGENT_REQUEST, RAY_SUBMIT, RAY_CALL, SERVER_REQUEST, REQUEST})
_PROFILED = (KERNEL, OPERATOR)


def _kept_whole(seen: Seen, span: Span) -> list[Span] | None:
    """Return where a span goes whose arguments count; a program marks its own sleeps and wake-ups too."""
    name = span.name
    if name in MEMORY_MOVES:
        return seen.moves
    if not span.is_automatic:
        return None
    if name == MEMORY_EDGE:
        return seen.edges
    if name == ALLOCATIONS_KEPT:
        return seen.allocations_kept
    return seen.out_of_memory if name == OUT_OF_MEMORY else None


def _is_exception(error: Any) -> TypeGuard[str]:
    """Return whether an argument is the name of an exception's type, and not one of the program's own values."""
    return isinstance(error, str) and error.partition("(")[0].isidentifier()  # Ray's: RayTaskError(KeyError)


def _see_message(messages: dict[tuple[str, str], tuple[int, str]], span: Span, error: str) -> None:
    """Keep the message of the exception that left a span of its name first."""
    message, key = span.args.get("error_message"), (error, span.name)
    if isinstance(message, str) and span.end_ns is not None and span.end_ns < messages.get(key, (_NEVER_NS,))[0]:
        messages[key] = span.end_ns, message


def _see_interval(kept: Intervalled, span: Span, shift_ns: int) -> None:
    kept.starts.append(span.start_ns + shift_ns)
    kept.ends.append(OPEN if span.end_ns is None else span.end_ns + shift_ns)


def _see_stage(kept: Intervalled, span: Span, shift_ns: int) -> None:
    _see_interval(kept, span, shift_ns)
    kept.bytes.append(int(span.args.get("bytes", 0)))
    kept.tensors.append(int(span.args.get("tensors", 0)))


def _see_device_span(kept: DeviceSpans, span: Span, shift_ns: int) -> None:
    _see_interval(kept, span, shift_ns)
    args = span.args
    ranks = int(args.get("ranks", 0))
    # A rank has its own part of a collective already.
    kept.moved_bytes.append(int(args.get("bytes", 0)) * (ranks - 1) // ranks if ranks else 0)
    kept.queued_ns.append(int(args.get("queued_ns", 0)))
    kept.behind_ns.append(int(args.get("behind_host_ns", 0)))
    kept.of_part.append(bool(args.get("module")))
    kept.largest_error_ns = max(kept.largest_error_ns, int(args.get("error_ns", 0)))


def _see_passed(seen: Seen, span: Span, shift_ns: int) -> None:
    """Keep of a span on the way of a request what joins it with the next one; of Ray's calls only those for tokens."""
    args = span.args
    if span.name in (RAY_SUBMIT, RAY_CALL):
        flows = span.flows_out if span.name == RAY_SUBMIT else span.flows_in
        if not flows or str(args.get("method")).rpartition(".")[2] != SERVED:
            return
        key = flows[0]
    else:
        key = str(args.get("request_id", span.name))  # without one, it joins nothing
    kept = seen.passed[span.name]
    _see_interval(kept, span, shift_ns)
    kept.places.append(hash((seen.process.key, span.thread, span.task)))
    kept.keys.append(hash(key))
    if span.name == REQUEST:
        kept.stems.append(hash(asked_ids(key)[1]))
        kept.queued_ns.append(int(args.get("queued_ns", -1)))
        kept.tokens.append(int(args.get("tokens", -1)))


def _see_engine_step(kept: EngineSteps, span: Span, shift_ns: int) -> None:
    _see_interval(kept, span, shift_ns)
    args = span.args
    kept.running.append(int(args.get("running", -1)))
    kept.waiting.append(int(args.get("waiting", -1)))
    kept.preempted.append(int(args.get("preempted", 0)))
    kept.kv_usage.append(float(args.get("kv_usage", -1)))


def _see_sample(seen: Seen, sample: Counter, owner_names: dict[str, str | None], shift_ns: int) -> None:
    name = sample.name
    if seen.process.role == SAMPLER:
        seen.sampled[name].add(sample.ts_ns + shift_ns, sample.value)
        return
    if name not in owner_names:
        owner_names[name] = owner_of_counter(name)
    owner = owner_names[name]
    if owner is not None:
        if is_size(sample.value):  # else nobody knows how many bytes
            seen.owners[owner].add(sample.ts_ns + shift_ns, sample.value)
    elif name == ALLOCATIONS_RESERVED:
        if is_size(sample.value):
            seen.reserved.add(sample.ts_ns + shift_ns, sample.value)
    elif name.startswith(ALLOCATIONS):
        exact = owner_of_counter(name.removeprefix(ALLOCATIONS))
        if exact is not None and is_size(sample.value):
            seen.balances.add(exact, sample.ts_ns + shift_ns, sample.value)
    elif name in (RESIDENT, ALLOCATED_PEAK):
        if is_size(sample.value):
            kept = seen.resident if name == RESIDENT else seen.allocated_peak
            kept.add(sample.ts_ns + shift_ns, sample.value)
    elif (on_host := owner_on_host(name)) is not None:
        if is_size(sample.value):
            seen.on_host[on_host].add(sample.ts_ns + shift_ns, sample.value)
    elif (pinned := owner_of_pinned(name)) is not None:
        if is_size(sample.value):
            seen.pinned[pinned].add(sample.ts_ns + shift_ns, sample.value)
    elif name in STEP_FIGURES or seen.lane.is_driver:
        seen.figures[name].add(sample.ts_ns + shift_ns, sample.value)


def _shift(seen: Seen, shift_ns: int) -> None:
    kept = (
        *seen.steps,
        *seen.open_spans,
        *seen.allocations_kept,
        *seen.edges,
        *seen.moves,
        *seen.out_of_memory,
    )
    for span in {id(span): span for span in kept}.values():
        span.start_ns += shift_ns
        if span.end_ns is not None:
            span.end_ns += shift_ns
