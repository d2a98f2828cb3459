"""Reads all rows of a Recording once: keeps what the figures are computed from, and drops the rest."""

from __future__ import annotations

import functools
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis import growth
from rltrace.analysis.clocks import TimeLine
from rltrace.analysis.growth import Growth
from rltrace.analysis.intervals import EMPTY, Intervals, paired
from rltrace.analysis.lanes import Lane, lanes
from rltrace.analysis.numbers import number
from rltrace.events import (
    AGENT_REQUEST,
    ALLOCATED_PEAK,
    ALLOCATIONS,
    ALLOCATIONS_KEPT,
    ALLOCATIONS_RESERVED,
    DEVICE_TIME,
    ENGINE_STEP,
    FORWARD,
    GENERATE,
    KERNEL,
    MEMORY_EDGE,
    MEMORY_MOVES,
    OPERATOR,
    OUT_OF_MEMORY,
    PHASES,
    RAY_CALL,
    RAY_SUBMIT,
    REQUEST,
    SAMPLER,
    SERVER_REQUEST,
    STEP,
    STEP_FIGURES,
    TOOLS,
    TRAJECTORIES,
    TURN,
    USED,
    WEIGHT_SYNC_STAGES,
    Args,
    Span,
    asked_ids,
    owner_of_counter,
    owner_of_pinned,
    owner_on_host,
    prompt_of,
)
from rltrace.read import columns, cores
from rltrace.read.columns import MISSING, NO_TEXT, OPEN, Columns
from rltrace.read.gate import MOST_BYTES
from rltrace.read.recording import Process, Recording

RESIDENT = "resident_bytes"

_NEVER_NS = 1 << 63

SERVED = "generate"
"""The method by which an agent loop asks a server for tokens, in all that are known."""


class Intervalled:
    """Spans of one name, as columns: 16 bytes per span, 32 if their bytes and tensors count."""

    __slots__ = ("bytes", "has_open", "over_ns", "pairs", "tensors")

    def __init__(self) -> None:
        self.pairs = array("q")
        """The start and the end of each, in turn."""
        self.has_open = False
        self.over_ns = _NEVER_NS
        """When the process was over; nothing is open after it."""
        self.bytes = array("q")
        self.tensors = array("q")

    @property
    def starts(self) -> NDArray[np.int64]:
        """When each began."""
        return self._rows[:, 0]

    @property
    def ends(self) -> NDArray[np.int64]:
        """When each ended; `OPEN` for an open one."""
        return self._rows[:, 1]

    @property
    def _rows(self) -> Intervals:
        """The memory of `pairs` itself: nobody may change it."""
        if not self.pairs:
            return EMPTY
        rows = np.frombuffer(self.pairs, np.int64).reshape(-1, 2)
        rows.flags.writeable = False
        return rows

    def rows(self, until_ns: int) -> Intervals:
        """Return rows of shape (N, 2), not to be changed; open spans end at `until_ns`, or with their process."""
        rows = self._rows
        if self.has_open:
            rows = rows.copy()
            rows[rows[:, 1] == OPEN, 1] = min(until_ns, self.over_ns)
        return rows

    def ended(self) -> Intervals:
        """Return the same, without open spans."""
        rows = self._rows
        return rows[rows[:, 1] != OPEN] if self.has_open else rows


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
    """Spans of one name that requests pass on their way to an engine, as columns: 32 bytes per span, 56 of those that
    say their tokens, 96 of an engine's."""

    __slots__ = (
        "cached_tokens", "first_token_ns", "keys", "places", "prompt_tokens", "prompts", "queued_ns", "stems", "tokens",
        "trajectories",
    )  # fmt: skip

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
        self.prompt_tokens = array("q")
        """How many it was asked with, likewise."""
        self.first_token_ns = array("q")
        """How long after its beginning an engine's request had its first token, likewise."""
        self.cached_tokens = array("q")
        """How many of the prompt's tokens the engine had computed before, likewise."""
        self.prompts = array("q")
        """Of an engine's request, what the samples of one prompt have in common; 0 if nothing says so."""
        self.trajectories = array("q")
        """The trajectory that a request says it belongs to; 0 if it does not say."""


class Trajectories(Intervalled):
    """Trajectories, as columns: 41 bytes per span."""

    __slots__ = ("are_validating", "places", "prompts", "trajectories")

    def __init__(self) -> None:
        super().__init__()
        self.places = array("q")
        """Which thread and task of which process it was in."""
        self.trajectories = array("q")
        """Its id; 0 if it has none."""
        self.prompts = array("q")
        """What the samples of one prompt have in common; 0 if nothing says so."""
        self.are_validating = array("b")
        """1 if it is of a validation."""


class ToolCalls(Intervalled):
    """Calls of tools and environments, as columns: 36 bytes per span."""

    __slots__ = ("names", "places", "tools", "trajectories")

    def __init__(self) -> None:
        super().__init__()
        self.places = array("q")
        """Which thread and task of which process it was in."""
        self.trajectories = array("q")
        """The trajectory that it says it belongs to; 0 if it does not say."""
        self.tools = array("i")
        """The place of the tool's name in `names`."""
        self.names: list[str] = []

    def place(self, name: str) -> int:
        """Return the place of a tool's name; a new one comes last."""
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)


class EngineSteps(Intervalled):
    """Steps of an engine, as columns: 56 bytes per span."""

    __slots__ = ("accepted", "drafted", "kv_usage", "preempted", "running", "waiting")

    def __init__(self) -> None:
        super().__init__()
        self.running = array("i")
        self.waiting = array("i")
        """Requests that were computed, and that waited; -1 if nobody said so."""
        self.preempted = array("i")
        """Requests that lost their KV cache in the step."""
        self.kv_usage = array("d")
        """Share of the KV cache that was taken, 0 to 1; -1 if nobody said so."""
        self.drafted = array("i")
        self.accepted = array("i")
        """Tokens that a draft had guessed, and those among them that the model accepted."""


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

    def extend(self, times_ns: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Append some."""
        _extend(self.times_ns, times_ns)
        _extend(self.values, values)

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

    def place(self, owner: str) -> int:
        """Return the place of an owner; a new one comes last."""
        if owner not in self.owners:
            self.owners.append(owner)
        return self.owners.index(owner)

    def extend(self, places: NDArray[np.int64], times_ns: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Append some."""
        _extend(self.places, places)
        _extend(self.times_ns, times_ns)
        _extend(self.values, values)


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
        self.used = Samples()
        """The total of its device, each time that it was read."""
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
        self.looks: list[Span] = []
        """When it measured what it owns, at phase boundaries and in between, with the totals that it read."""
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
        self.trajectories = Trajectories()
        """Those that are trajectories."""
        self.tool_calls = ToolCalls()
        """Those that are calls of tools."""

    def intervalled(self) -> Iterator[Intervalled]:
        """Yield all columns of spans."""
        for kept in vars(self).values():
            for one in kept.values() if isinstance(kept, dict) else [kept]:
                if isinstance(one, Intervalled):
                    yield one

    def finish(self) -> None:
        """Put the samples of each counter in order, and keep numbers of the GPU's work in as few bytes as they take."""
        by_name = (self.owners, self.on_host, self.pinned, self.figures, self.sampled)
        named = (samples for of_kind in by_name for samples in of_kind.values())
        for samples in (*named, self.resident, self.used, self.allocated_peak, self.reserved):
            samples.sort()
        for work in self.device_spans.values():
            work.moved_bytes, work.queued_ns, work.behind_ns = map(
                _narrowed, (work.moved_bytes, work.queued_ns, work.behind_ns)
            )


def _narrowed(column: array[int]) -> array[int]:
    """Return whole numbers in as few bytes as the largest takes."""
    if not column:
        return column
    values = np.frombuffer(column, np.int64)
    least, most = int(values.min()), int(values.max())
    code = next(code for code in "bhiq" if np.iinfo(code).min <= least and most <= np.iinfo(code).max)
    return array(code, values.astype(code).tobytes())


class Observations:
    """What was kept of a Recording; all times are on its `TimeLine`.

    Memory: a few numbers for each span and each owner's sample; nothing for any other event, such as torch.profiler's.
    """

    def __init__(self, recording: Recording) -> None:
        processes = recording.processes
        self.recording = recording
        self.time_line = TimeLine(recording)
        on_lane = lanes(processes)
        before = Growth(recording)
        self.processes = cores.each(
            lambda process: _see(process, on_lane[process.key], self.time_line, before), processes
        )
        self.damaged = before.damaged
        """Files of the cache that could not be used, because they are damaged."""
        self._on_lane: dict[Lane, list[Seen]] = {}
        for seen in self.processes:
            self._on_lane.setdefault(seen.lane, []).append(seen)
        self.samplers = [seen for seen in self.processes if seen.process.role == SAMPLER]
        self.pids: dict[str, set[int]] = {}
        """Those of each host's processes."""
        for process in processes:
            self.pids.setdefault(process.host, set()).add(process.pid)
        self.start_ns = min((seen.first_ns for seen in self.processes), default=0)
        self.end_ns = max((seen.last_ns for seen in self.processes), default=0)
        """The time of the last event of all."""
        self.now_ns = self.time_line.now_ns()
        self.went_on_ns = _went_on_ns(self.processes)
        """By the key of a process that went on as another program (`exec`), when that program began."""
        for seen in self.processes:
            if self.is_end_known(seen) and not seen.process.is_alive:
                over_ns = self.open_until_ns(seen)
                for kept in seen.intervalled():
                    kept.over_ns = over_ns

    def on(self, lane: Lane) -> list[Seen]:
        """Return what was kept of the processes of a lane."""
        return self._on_lane.get(lane, [])

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


Made = TypeVar("Made")


Of = TypeVar("Of")


def once(make: Callable[[Of], Made]) -> Callable[[Of], Made]:
    """Make what several figures need once for each Recording. Nobody may change it."""
    made: WeakKeyDictionary[Of, Made] = WeakKeyDictionary()

    @functools.wraps(make)
    def known(of: Of) -> Made:
        if of not in made:
            made[of] = make(of)
        return made[of]

    return known


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


def _see(process: Process, lane: Lane, time_line: TimeLine, before: Growth | None = None) -> Seen:
    shift_ns = time_line.shift_ns(process)
    if before is not None and not shift_ns:
        seeing = _Seeing(process, lane, shift_ns)
        if before.see(process, seeing):
            return seeing.seen()
    return columns.fold(process, lambda: _Seeing(process, lane, shift_ns), _Seeing.add).seen()


# ---- what names say ---------------------------------------------------------------------------------------------

_STAGE, _PHASE, _STEP, _DEVICE, _MOVE, _KEPT, _PROFILED, _CALL, _SUBMIT, _ON_THE_WAY, _ENGINE_STEP, _FORWARD = (
    1 << n for n in range(12)
)
_TRAJECTORY, _TOOL = 1 << 12, 1 << 13
"""What a span is by its name, as bits; one that hooks make only, if a hook made it."""

_KINDS: dict[str, int] = {}
for _bit, _names in (
    (_STAGE, WEIGHT_SYNC_STAGES),
    (_PHASE, PHASES),
    (_STEP, (STEP,)),
    (_MOVE, MEMORY_MOVES),
    (_KEPT, (MEMORY_EDGE, ALLOCATIONS_KEPT, OUT_OF_MEMORY)),
    (_CALL, (RAY_CALL,)),
    (_SUBMIT, (RAY_SUBMIT,)),
    (_ON_THE_WAY, (TURN, GENERATE, AGENT_REQUEST, RAY_SUBMIT, RAY_CALL, SERVER_REQUEST, REQUEST)),
    (_TRAJECTORY, TRAJECTORIES),
    (_TOOL, TOOLS),
    (_ENGINE_STEP, (ENGINE_STEP,)),
    (_FORWARD, (FORWARD,)),
):
    for _name in _names:
        _KINDS[_name] = _KINDS.get(_name, 0) | _bit


def _kind(name: str) -> int:
    kind = _KINDS.get(name, 0)
    if name.startswith(DEVICE_TIME):
        kind |= _DEVICE
    return kind | _PROFILED if name.startswith((KERNEL, OPERATOR)) else kind


def has_own_figures(name: str, *, is_automatic: bool) -> bool:
    """Return whether spans of a name are in other figures than those of all other spans."""
    kind = _kind(name)
    of_hooks = _DEVICE | _KEPT | _PROFILED if is_automatic else 0
    return bool(kind & (_STAGE | _PHASE | _STEP | _MOVE | of_hooks))


_OF_READING = ("process", "lane")
"""What `Seen` has beside what it keeps."""


class _Seeing:
    """Keeps what counts of the rows of a process, some of them at a time."""

    def __init__(self, process: Process, lane: Lane, shift_ns: int) -> None:
        self._seen = Seen(process, lane)
        self._shift_ns = shift_ns
        self._kinds = np.empty(0, np.uint16)
        """Of each text, as a name."""
        self._last_ns = self._last_span_ns = process.start_ns

    def add(self, rows: Columns) -> None:
        """Keep what counts of more rows."""
        kinds = [_kind(name) for name in rows.texts[len(self._kinds) :]]
        self._kinds = np.append(self._kinds, np.array(kinds, np.uint16))
        self._seen.spans += len(rows)
        if len(rows):
            ends_ns = np.where(rows.end_ns == OPEN, rows.start_ns, rows.end_ns)
            self._last_span_ns = max(self._last_span_ns, int(ends_ns.max()))
            _see_spans(self._seen, rows, self._kinds[rows.name], self._shift_ns)
        self._seen.samples += len(rows.samples.name)
        if len(rows.samples.name):
            self._last_ns = max(self._last_ns, int(rows.samples.ts_ns.max()))
            _see_samples(self._seen, rows, self._shift_ns)

    def said(self) -> Any:
        """Return all that was kept so far as numbers, texts and bytes."""
        kept = {name: growth.value_of(value) for name, value in vars(self._seen).items() if name not in _OF_READING}
        return [self._last_ns, self._last_span_ns, kept]

    def put(self, said: Any) -> None:
        """Take what another one said, before the first row."""
        self._last_ns, self._last_span_ns, kept = said
        for name, value in kept.items():
            setattr(self._seen, name, growth.put(getattr(self._seen, name), value))

    def seen(self) -> Seen:
        """Return what was kept, when there are no more rows."""
        seen, shift_ns = self._seen, self._shift_ns
        if shift_ns:
            _shift(seen, shift_ns)
        seen.finish()
        seen.first_ns = seen.process.start_ns + shift_ns
        seen.last_span_ns = self._last_span_ns + shift_ns
        seen.last_ns = max(self._last_ns, self._last_span_ns, seen.process.end_ns or 0) + shift_ns
        return seen


# ---- spans ------------------------------------------------------------------------------------------------------


def _see_spans(seen: Seen, rows: Columns, kinds: NDArray[np.uint16], shift_ns: int) -> None:
    def has(bits: int) -> NDArray[np.bool_]:
        return (kinds & bits).astype(np.bool_)

    is_stage = has(_STAGE)
    is_phase = (has(_PHASE) | rows.arguments["phase"]) & ~is_stage
    is_step = has(_STEP) & ~is_phase
    is_device = has(_DEVICE) & rows.is_automatic & ~is_phase
    is_kept = has(_MOVE) | (has(_KEPT) & rows.is_automatic)
    is_other = ~(is_stage | is_phase | is_step | is_device | is_kept | (has(_PROFILED) & rows.is_automatic))
    times = _Times(rows, shift_ns)
    _see_whole(seen, rows, kinds, is_step, is_kept)
    _see_errors(seen, rows, ~has(_STEP | _MOVE), times)
    for row in np.flatnonzero(rows.is_automatic & rows.arguments["inferred"]).tolist():
        seen.inferred[rows.texts[rows.name[row]], str(rows.args(row).get("reason"))] = None
    for name, chosen in _by_name(rows, is_stage):
        _see_stages(seen.stages[name], chosen, rows, times)
    for name, chosen in _by_name(rows, is_phase):
        times.put(seen.phases[name], chosen)
    for name, chosen in _by_name(rows, is_device):
        _see_device_spans(seen.device_spans[name.removeprefix(DEVICE_TIME)], chosen, rows, times)
    for spans, is_one in ((seen.automatic_spans, rows.is_automatic), (seen.own_spans, ~rows.is_automatic)):
        for name, method, chosen in _by_method(rows, is_other & is_one, has(_CALL)):
            times.put(spans[name, method], chosen)
    on_the_way = np.flatnonzero(is_other & has(_ON_THE_WAY))
    if len(on_the_way):
        _see_passed(seen, on_the_way[~has(_CALL | _SUBMIT)[on_the_way] | _is_served(rows, on_the_way)], rows, times)
    steps_of_engine = np.flatnonzero(is_other & has(_ENGINE_STEP))
    if len(steps_of_engine):
        _see_engine_steps(seen.engine_steps, steps_of_engine, rows, times)
    trajectories = np.flatnonzero(is_other & has(_TRAJECTORY))
    if len(trajectories):
        _see_trajectories(seen, trajectories, rows, times)
    calls = np.flatnonzero(is_other & has(_TOOL))
    if len(calls):
        _see_tool_calls(seen, calls, rows, times)
    forwards = np.flatnonzero(is_other & has(_FORWARD) & rows.is_automatic)
    if len(forwards):
        times.put(seen.forwards, forwards)
        _extend(seen.forwards.tokens, _tokens(rows, forwards))


Rows = NDArray[np.intp]


class _Times:
    """When spans began and ended, on the time line."""

    def __init__(self, rows: Columns, shift_ns: int) -> None:
        self.starts_ns = rows.start_ns + shift_ns if shift_ns else rows.start_ns
        self.ends_ns = np.where(rows.end_ns == OPEN, OPEN, rows.end_ns + shift_ns) if shift_ns else rows.end_ns
        self.has_open = bool((self.ends_ns == OPEN).any())

    def put(self, kept: Intervalled, chosen: Rows) -> None:
        """Keep those of some rows."""
        ends_ns = self.ends_ns[chosen]
        kept.has_open |= self.has_open and bool((ends_ns == OPEN).any())
        _extend(kept.pairs, paired(self.starts_ns[chosen], ends_ns))


def _extend(kept: array[Any], values: NDArray[Any]) -> None:
    kept.frombytes(np.ascontiguousarray(values, kept.typecode).view(np.uint8).data)


def _groups(keys: NDArray[Any]) -> list[Rows]:
    """Return the places of equal keys, by where each key is first."""
    if not len(keys):
        return []
    # A radix sort orders what fits into 16 bits, ten times as fast.
    order = np.argsort(keys.astype(np.uint16) if keys.max() < 1 << 16 else keys, kind="stable")
    cuts = np.flatnonzero(np.diff(keys[order])) + 1
    return sorted(np.split(order, cuts), key=lambda places: int(places[0]))


def _by_name(rows: Columns, is_one: NDArray[np.bool_]) -> Iterator[tuple[str, Rows]]:
    """Yield the names of some spans, in the order in which they were first, with the rows of each."""
    chosen = np.flatnonzero(is_one)
    names = rows.name[chosen]
    for places in _groups(names):
        yield rows.texts[names[places[0]]], chosen[places]


def _by_method(
    rows: Columns, is_one: NDArray[np.bool_], is_call: NDArray[np.bool_]
) -> list[tuple[str, str | None, Rows]]:
    """Return the same, those of calls for each method."""
    found: list[tuple[str, str | None, Rows]] = []
    for name, chosen in _by_name(rows, is_one):
        if is_call[chosen[0]]:
            methods = rows.arguments["method"][chosen]
            for places in _groups(methods + 1):
                method = methods[places[0]]
                found.append((name, None if method == NO_TEXT else rows.texts[method], chosen[places]))
        else:
            found.append((name, None, chosen))
    return sorted(found, key=lambda one: int(one[2][0]))


def _whole_numbers(rows: Columns, key: str, chosen: Rows, otherwise: int = 0) -> NDArray[np.int64]:
    values: NDArray[np.int64] = rows.arguments[key][chosen]
    return np.where(values == MISSING, otherwise, values)


def _see_whole(
    seen: Seen, rows: Columns, kinds: NDArray[np.uint16], is_step: NDArray[np.bool_], is_kept: NDArray[np.bool_]
) -> None:
    """Keep the spans whose arguments count as they are, and those that are open."""
    chosen = np.flatnonzero((rows.end_ns == OPEN) | is_step | is_kept)
    for span, is_of_step, counts in zip(
        rows.spans(chosen), is_step[chosen].tolist(), is_kept[chosen].tolist(), strict=True
    ):
        if span.end_ns is None:
            seen.open_spans.append(span)
        if is_of_step:
            seen.steps.append(span)
        if counts:
            _place_of(seen, span).append(span)


def _place_of(seen: Seen, span: Span) -> list[Span]:
    """Return where a span goes; a program marks its own sleeps and wake-ups too."""
    if span.name in MEMORY_MOVES:
        return seen.moves
    if span.name == MEMORY_EDGE:
        return seen.looks
    return seen.allocations_kept if span.name == ALLOCATIONS_KEPT else seen.out_of_memory


def _tokens(rows: Columns, forwards: Rows) -> NDArray[np.int64]:
    """Return how many tokens forwards have; a size that no tensor has counts as nothing."""
    sequences, length = (_whole_numbers(rows, key, forwards) for key in ("rows", "columns"))
    return np.where((np.abs(sequences) < 1 << 31) & (np.abs(length) < 1 << 31), sequences * length, 0)


def _see_errors(seen: Seen, rows: Columns, is_one: NDArray[np.bool_], times: _Times) -> None:
    errors = rows.arguments["error"]
    for row in np.flatnonzero((errors != NO_TEXT) & is_one).tolist():
        error = rows.texts[errors[row]]
        if _is_exception(error):
            name = rows.texts[rows.name[row]]
            key = (int(rows.thread[row]), int(rows.task[row]), error, name)
            times.put(seen.errors[key], np.array([row]))
            _see_message(seen.messages, rows, row, (error, name))


def _is_exception(error: str) -> bool:
    """Return whether an argument is the name of an exception's type, and not one of the program's own values."""
    return error.partition("(")[0].isidentifier()  # Ray's: RayTaskError(KeyError)


def _see_message(
    messages: dict[tuple[str, str], tuple[int, str]], rows: Columns, row: int, key: tuple[str, str]
) -> None:
    """Keep the message of the exception that left a span of its name first."""
    end_ns = int(rows.end_ns[row])
    if end_ns != OPEN and end_ns < messages.get(key, (_NEVER_NS,))[0]:
        message = rows.args(row).get("error_message")
        if isinstance(message, str):
            messages[key] = end_ns, message


def _see_stages(kept: Intervalled, chosen: Rows, rows: Columns, times: _Times) -> None:
    times.put(kept, chosen)
    _extend(kept.bytes, _whole_numbers(rows, "bytes", chosen))
    _extend(kept.tensors, _whole_numbers(rows, "tensors", chosen))


def _see_device_spans(kept: DeviceSpans, chosen: Rows, rows: Columns, times: _Times) -> None:
    times.put(kept, chosen)
    _extend(kept.moved_bytes, _moved(_whole_numbers(rows, "bytes", chosen), _whole_numbers(rows, "ranks", chosen)))
    _extend(kept.queued_ns, _whole_numbers(rows, "queued_ns", chosen))
    _extend(kept.behind_ns, _whole_numbers(rows, "behind_host_ns", chosen))
    _extend(kept.of_part, rows.arguments["module"][chosen])
    error_ns = int(_whole_numbers(rows, "error_ns", chosen).max())
    kept.largest_error_ns = max(kept.largest_error_ns, error_ns)


def _moved(moved_bytes: NDArray[np.int64], ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes that a rank sends or gets in a collective: it has its own part already."""
    if np.abs(moved_bytes).max() * float(np.abs(ranks).max()) < 2.0**62:
        return np.where(ranks == 0, 0, moved_bytes * (ranks - 1) // np.where(ranks == 0, 1, ranks))
    pairs = zip(moved_bytes.tolist(), ranks.tolist(), strict=True)
    return np.array([many * (of - 1) // of if of else 0 for many, of in pairs], np.int64)


def _is_served(rows: Columns, chosen: Rows) -> NDArray[np.bool_]:
    """Return which of some spans are of calls by which a server is asked for tokens."""
    methods = rows.arguments["method"][chosen]
    is_there = np.zeros(len(rows.texts) + 1, np.bool_)
    is_there[methods] = True  # the last one is that of no text
    is_served = np.zeros(len(is_there), np.bool_)
    for method in np.flatnonzero(is_there[:-1]).tolist():
        is_served[method] = rows.texts[method].rpartition(".")[2] == SERVED
    found: NDArray[np.bool_] = is_served[methods]
    return found


def _see_passed(seen: Seen, chosen: Rows, rows: Columns, times: _Times) -> None:
    """Keep of spans on the way of a request what joins each with the next one; of Ray's calls those with an arrow."""
    names = rows.name[chosen]
    for places in _groups(names):
        name, own = rows.texts[names[places[0]]], chosen[places]
        if name in (RAY_SUBMIT, RAY_CALL):
            flows = [rows.flows_of(row)[0 if name == RAY_SUBMIT else 1] for row in own.tolist()]
            own, keys = own[[bool(ends) for ends in flows]], [ends[0] for ends in flows if ends]
            if not keys:
                continue
        else:
            keys = [_request_of(row, name, rows) for row in own.tolist()]
        kept = seen.passed[name]
        times.put(kept, own)
        kept.places.extend(_lanes(seen, own, rows))
        kept.keys.extend([number(key) for key in keys])
        if name in (RAY_SUBMIT, RAY_CALL):
            continue
        _extend(kept.trajectories, _hashes(rows, "trajectory", own))
        for told in ("tokens", "prompt_tokens"):
            _extend(getattr(kept, told), _whole_numbers(rows, told, own, -1))
        if name == REQUEST:
            kept.stems.extend([number(asked_ids(key)[1]) for key in keys])
            kept.prompts.extend([_prompt(seen, prompt_of(key)) for key in keys])
            for told in ("queued_ns", "first_token_ns", "cached_tokens"):
                _extend(getattr(kept, told), _whole_numbers(rows, told, own, -1))


def _lanes(seen: Seen, chosen: Rows, rows: Columns) -> list[int]:
    """Return the thread and task of some rows, as one number each."""
    lanes = [*zip(rows.thread[chosen].tolist(), rows.task[chosen].tolist(), strict=True)]
    number_of = {lane: number(seen.process.key, *lane) for lane in {*lanes}}
    return [number_of[lane] for lane in lanes]


def _hashes(rows: Columns, key: str, chosen: Rows) -> NDArray[np.int64]:
    """Return a number for each row's text; 0 for none."""
    texts, places = np.unique(rows.arguments[key][chosen], return_inverse=True)
    of_text = [0 if text == NO_TEXT else number(rows.texts[text]) for text in texts.tolist()]
    return np.array(of_text, np.int64)[places]


def _prompt(seen: Seen, prompt: object) -> int:
    """Return a number for what an engine's samples have in common; 0 for nothing."""
    return 0 if prompt is None else number(seen.process.key, prompt)


def _see_trajectories(seen: Seen, chosen: Rows, rows: Columns, times: _Times) -> None:
    kept = seen.trajectories
    times.put(kept, chosen)
    kept.places.extend(_lanes(seen, chosen, rows))
    _extend(kept.trajectories, _hashes(rows, "trajectory", chosen))
    args = [rows.args(row) for row in chosen.tolist()]
    kept.prompts.extend([0 if (prompt := sampled_prompt(one)) is None else number(*prompt) for one in args])
    kept.are_validating.extend([one.get("validate") is True for one in args])


def sampled_prompt(args: Args) -> tuple[str, ...] | None:
    """Return what the trajectories of one prompt have in common: its name, or verl's step and place in the data."""
    if "prompt" in args:
        return (str(args["prompt"]),)
    return (str(args.get("step")), str(args["sample_index"])) if "sample_index" in args else None


def _see_tool_calls(seen: Seen, chosen: Rows, rows: Columns, times: _Times) -> None:
    kept = seen.tool_calls
    times.put(kept, chosen)
    kept.places.extend(_lanes(seen, chosen, rows))
    _extend(kept.trajectories, _hashes(rows, "trajectory", chosen))
    tools, names = rows.arguments["tool"][chosen].tolist(), rows.name[chosen].tolist()
    for tool, name in zip(tools, names, strict=True):
        kept.tools.append(kept.place(rows.texts[name if tool == NO_TEXT else tool]))


def _request_of(row: int, name: str, rows: Columns) -> str:
    """Return the id of a row's request; one without an id joins nothing."""
    request = rows.arguments["request_id"][row]
    return rows.texts[request] if request != NO_TEXT else str(rows.args(row).get("request_id", name))


def _see_engine_steps(kept: EngineSteps, chosen: Rows, rows: Columns, times: _Times) -> None:
    times.put(kept, chosen)
    _extend(kept.running, _whole_numbers(rows, "running", chosen, -1))
    _extend(kept.waiting, _whole_numbers(rows, "waiting", chosen, -1))
    for told in ("preempted", "drafted", "accepted"):
        _extend(getattr(kept, told), _whole_numbers(rows, told, chosen))
    usage = rows.arguments["kv_usage"][chosen]
    _extend(kept.kv_usage, np.where(np.isnan(usage), -1.0, usage))


# ---- samples ----------------------------------------------------------------------------------------------------


class _Sampled(NamedTuple):
    """What a counter samples: where in `Seen` it is kept, and whose it is."""

    where: str
    whose: str = ""


OF_PROCESS = {RESIDENT: "resident", USED: "used", ALLOCATED_PEAK: "allocated_peak"}
"""Counters that a process has one of, and where they are kept."""


@functools.lru_cache(4096)
def _sampled(name: str) -> _Sampled:
    if (owner := owner_of_counter(name)) is not None:
        return _Sampled("owners", owner)
    if name == ALLOCATIONS_RESERVED:
        return _Sampled("reserved")
    if name.startswith(ALLOCATIONS):
        exact = owner_of_counter(name.removeprefix(ALLOCATIONS))
        return _Sampled("") if exact is None else _Sampled("balances", exact)
    if name in OF_PROCESS:
        return _Sampled(OF_PROCESS[name])
    if (on_host := owner_on_host(name)) is not None:
        return _Sampled("on_host", on_host)
    pinned = owner_of_pinned(name)
    return _Sampled("figures", name) if pinned is None else _Sampled("pinned", pinned)


def _see_samples(seen: Seen, rows: Columns, shift_ns: int) -> None:
    name, values = rows.samples.name, rows.samples.value
    times_ns = rows.samples.ts_ns + shift_ns
    named = [(rows.texts[name[places[0]]], places) for places in _groups(name)]
    if seen.process.role == SAMPLER:
        for counter, places in named:
            seen.sampled[counter].extend(times_ns[places], values[places])
        return
    is_size = np.abs(values) <= MOST_BYTES  # of another one nobody knows how many bytes it is
    found = [(_sampled(counter), places) for counter, places in named]
    found = [(of, places if of.where == "figures" else places[is_size[places]]) for of, places in found if of.where]
    found = sorted(((of, places) for of, places in found if len(places)), key=lambda one: int(one[1][0]))
    for (where, whose), places in found:
        if where == "figures" and not (whose in STEP_FIGURES or seen.lane.is_driver):
            continue
        if where != "balances":
            kept = getattr(seen, where)[whose] if whose else getattr(seen, where)
            kept.extend(times_ns[places], values[places])
    exact = [(of.whose, places) for of, places in found if of.where == "balances"]
    if exact:
        owners = np.repeat([seen.balances.place(owner) for owner, _ in exact], [len(places) for _, places in exact])
        together = np.concatenate([places for _, places in exact])
        order = np.argsort(together)
        seen.balances.extend(owners[order], times_ns[together[order]], values[together[order]])


def _shift(seen: Seen, shift_ns: int) -> None:
    kept = (
        *seen.steps,
        *seen.open_spans,
        *seen.allocations_kept,
        *seen.looks,
        *seen.moves,
        *seen.out_of_memory,
    )
    for span in {id(span): span for span in kept}.values():
        span.start_ns += shift_ns
        if span.end_ns is not None:
            span.end_ns += shift_ns
