"""What a run does now: where each rank is and since when, who holds each device's bytes, how fast it generates.

`Live` takes what a follower of the Recording gives (`rltrace/read/following.py`), and keeps a few figures of each
process, however long the run is. `Live.now` makes values of them; `rltrace/cli/tables/live.py` draws these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.clocks import TimeLine
from rltrace.analysis.lanes import Lane, lanes, order
from rltrace.analysis.processes import signal_name
from rltrace.analysis.used_memory import SAMPLED_RESERVED, SAMPLED_USED
from rltrace.events import (
    ENGINE_STEP,
    MEMORY_EDGE,
    OWNERS,
    PHASES,
    REWARD_MEAN,
    SAMPLER,
    STEP,
    STEP_FIGURES,
    TOKENS,
    TOKENS_PER_SECOND,
    USED,
    Args,
    Span,
    owner_of_counter,
    subjects,
)
from rltrace.read.columns import MISSING, NO_TEXT, Columns
from rltrace.read.following import Follower, Losses, News
from rltrace.read.recording import Process

RATE_SECONDS = 10.0
"""Tokens per second are a mean over so long: an engine computes for some seconds, and then sleeps."""

COMPUTING_SECONDS = 2.0
"""An engine whose last step is longer ago computes nothing, unless a rollout goes on."""

STILL_SECONDS = 30.0
"""A run in which nothing begins or ends for longer may hang: then it is shown where each thread stands."""

SILENT_SECONDS = 10.0
"""A rank that has written nothing for so long is named, if others have written."""

MOST_STEPS, MOST_ERRORS, MOST_FIGURES = 20, 20, 64
"""How many steps and errors of a process are kept, and samples of a figure."""

ROLLOUT = "rollout.generate"
SAMPLED_FREE = "gpu.free_bytes"


_OTHER, _STEP, _ENGINE_STEP, _EDGE, _PHASE = range(5)
_KINDS = {**dict.fromkeys(PHASES, _PHASE), STEP: _STEP, ENGINE_STEP: _ENGINE_STEP, MEMORY_EDGE: _EDGE}
"""Spans that something is kept of by their names, besides phases of the program's own and spans that an exception
left."""


class LaneNow(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank, the driver or another process does."""

    name: str
    rank: int | None
    host: str | None
    phase: str | None
    """The phase that it is in; None between two."""
    phase_seconds: float | None
    """How long it has been in it; without a phase, since the end of the last one."""
    last_phase: str | None
    """The phase that ended last, if it is in none."""
    inside: str | None
    """The innermost span that is open in it."""
    inside_seconds: float | None
    silent_seconds: float
    """How long none of its processes has written anything."""
    state: str
    """`running`; `ended` if all its processes ended in good order; else how the first of them died: `SIGKILL`."""


class DeviceNow(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds the bytes of a device: what each of its processes said last."""

    name: str
    rank: int | None
    host: str | None
    owners: dict[str, int]
    """By owner, in the order of `events.OWNERS`, those that hold something."""
    used_bytes: int | None
    """The device's total, as it was read last; None if nobody read it."""
    capacity_bytes: int | None
    """What there is; None if nobody said so, as on a CPU."""


class RolloutNow(msgspec.Struct, frozen=True, kw_only=True):
    """What the engines do."""

    tokens_per_second: float
    """Over the last 10 s, all engines together."""
    running: int
    """Requests that are computed."""
    waiting: int
    """Requests in the queues."""
    kv_usage: float | None
    """Share of the fullest engine's KV cache that is taken."""
    engines: int
    """How many engines compute."""


class StepNow(msgspec.Struct, frozen=True, kw_only=True):
    """A step."""

    number: int
    seconds: float
    """Its length; until now if it is not over."""
    is_over: bool
    reward_mean: float | None
    tokens_per_second: float | None
    error: str | None
    is_inferred: bool = False
    """Whether nobody marks it."""


class ErrorNow(msgspec.Struct, frozen=True, kw_only=True):
    """An exception that left a span, or a process that was killed."""

    at_seconds: float
    """When, counted from the beginning of the Recording."""
    process: str
    what: str


class HostNow(msgspec.Struct, frozen=True, kw_only=True):
    """A host that writes to the Recording."""

    name: str
    processes: int
    ranks: int
    cpu_percent: float | None
    available_bytes: int | None
    silent_seconds: float


class StackNow(msgspec.Struct, frozen=True, kw_only=True):
    """Where a thread stands."""

    process: str
    rank: int | None
    pid: int
    host: str
    thread: str
    spans: list[str]
    """What is open, the innermost last."""
    seconds: float
    """How long the innermost has been open."""


class Now(msgspec.Struct, frozen=True, kw_only=True):
    """What a run does at one moment."""

    seconds: float
    """Since the beginning of the Recording."""
    still_seconds: float
    """How long nothing has begun, ended or been sampled in any process of the program."""
    lanes: list[LaneNow]
    devices: list[DeviceNow]
    rollout: RolloutNow | None
    """None if no engine has said anything."""
    steps: list[StepNow]
    errors: list[ErrorNow]
    errors_in_all: int
    hosts: list[HostNow]
    hosts_elsewhere: list[str]
    """Other hosts of the run, of which nothing is here yet."""
    ranks_started: int | None
    """How many ranks the launcher started; None if nobody said so."""
    processes: int
    ended: int
    """How many of them have ended."""
    losses: Losses
    """Of all processes together."""
    stacks: list[StackNow]
    """Where each thread stands."""

    @property
    def is_still(self) -> bool:
        """Whether it may hang."""
        return self.still_seconds >= STILL_SECONDS and any(lane.state == "running" for lane in self.lanes)


class Live:
    """Follows a run, and keeps what `now` is made of."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self._kept: dict[str, _Kept] = {}
        self._time_line: TimeLine | None = None
        self._lanes: dict[str, Lane] = {}

    def poll(self) -> None:
        """Read what was written since the last time."""
        is_anyone_new = False
        for news in self.follower.poll():
            is_anyone_new |= news.is_new
            kept = self._kept.get(news.process.key)
            if kept is None:
                kept = self._kept[news.process.key] = _Kept(news.process)
            kept.take(news)
        for kept in self._kept.values():
            if kept.has_changed:
                key = kept.process.key
                kept.look(self.follower.open_spans(key), self.follower.pending_spans(key))
        if is_anyone_new or self._time_line is None:
            self._time_line = TimeLine(self.follower)
        self._lanes = lanes([kept.process for kept in self._kept.values()])

    def now(self) -> Now:
        """Return what the run does now."""
        time_line = self._time_line or TimeLine(self.follower)
        now_ns = time_line.now_ns()
        kept = [*self._kept.values()]
        for one in kept:
            one.now_ns = now_ns - time_line.shift_ns(one.process)
        program = [one for one in kept if one.process.role != SAMPLER]
        first_ns = min((one.process.start_ns + time_line.shift_ns(one.process) for one in kept), default=now_ns)
        on_lane: dict[Lane, list[_Kept]] = {}
        for one in program:
            on_lane.setdefault(self._lanes[one.process.key], []).append(one)
        in_order = sorted(on_lane.items(), key=lambda item: order(item[0]))
        errors = sorted(
            (
                ErrorNow(
                    at_seconds=(at_ns + time_line.shift_ns(one.process) - first_ns) / 1e9,
                    process=one.process.name,
                    what=what,
                )
                for one in program
                for at_ns, what in one.all_errors()
            ),
            key=lambda error: error.at_seconds,
        )
        return Now(
            seconds=max(0.0, (now_ns - first_ns) / 1e9),
            still_seconds=min((one.silent_seconds for one in program if not one.is_over), default=0.0),
            lanes=[_lane(lane, members) for lane, members in in_order],
            devices=[*_devices(in_order, [one for one in kept if one.process.role == SAMPLER])],
            rollout=_rollout(program),
            steps=_steps(in_order),
            errors=errors[-MOST_ERRORS:],
            errors_in_all=sum(one.many_errors + (one.process.killed_by is not None) for one in program),
            hosts=_hosts(kept),
            hosts_elsewhere=sorted(self.follower.read_hosts - {one.process.host for one in kept}),
            ranks_started=max((one.process.world_size for one in program if one.process.world_size), default=None),
            processes=len(program),
            ended=sum(one.is_over for one in program),
            losses=Losses(*(sum(column) for column in zip(*(one.losses for one in kept), strict=True)))
            if kept
            else Losses(*[0] * len(Losses._fields)),
            stacks=[stack for one in program if not one.is_over for stack in one.stacks()],
        )


class _Kept:
    """What is kept of one process; times are on its own time line."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.now_ns = 0
        self.last_ns = process.start_ns
        self.open: list[Span] = []
        self.pending: list[Span] = []
        """Inferred steps and phases that are over and may still change."""
        self.has_changed = False
        self.owners: dict[str, float] = {}
        self.used: tuple[int, float] | None = None
        """When it read its device's total, and what that was."""
        self.capacity_bytes: int | None = None
        self.sampled: dict[str, float] = {}
        """What a sampler sampled last."""
        self.last_phase: tuple[int, str] | None = None
        """When the last phase ended, and which one that was; inferred ones come late."""
        self.tokens: dict[int, float] = {}
        """Tokens by second, of the engine's steps."""
        self._kind_of: list[int] = []
        """Of each of the process's texts, as a name of spans."""
        self._texts: object = None
        self.engine: Span | None = None
        """The engine's last step."""
        self.steps: deque[Span] = deque(maxlen=MOST_STEPS)
        self.figures: dict[str, deque[tuple[int, float]]] = {}
        self.errors: deque[tuple[int, str]] = deque(maxlen=MOST_ERRORS)
        self.many_errors = 0
        self._last_error: dict[int, Span] = {}
        self.losses = Losses(*[0] * len(Losses._fields))

    # ---- what it writes ----

    def take(self, news: News) -> None:
        self.losses, self.has_changed = news.losses, True
        columns = news.columns
        self._sample(columns)
        if len(columns):
            self.last_ns = max(self.last_ns, int(columns.end_ns.max()))
            for span in columns.spans(self._told_of(columns)):
                self._span(span)

    def look(self, open_spans: list[Span], pending: list[Span]) -> None:
        self.open, self.pending, self.has_changed = open_spans, pending, False
        if open_spans:
            self.last_ns = max(self.last_ns, open_spans[-1].start_ns)

    def _sample(self, columns: Columns) -> None:
        if not len(columns.samples.ts_ns):
            return
        self.last_ns = max(self.last_ns, int(columns.samples.ts_ns.max()))
        for name, times_ns, values in columns.samples_by_name():
            last = float(values[-1])
            if self.process.role == SAMPLER:
                self.sampled[name] = last
            elif name == USED:
                self.used = int(times_ns[-1]), last
            elif (owner := owner_of_counter(name)) is not None:
                self.owners[owner] = last
            elif name in STEP_FIGURES:
                newest = zip(times_ns[-MOST_FIGURES:].tolist(), values[-MOST_FIGURES:].tolist(), strict=True)
                self.figures.setdefault(name, deque(maxlen=MOST_FIGURES)).extend(newest)

    def _told_of(self, columns: Columns) -> NDArray[np.intp]:
        """Return the rows of spans that something is kept of: all steps and errors, and the last one of the others."""
        if columns.texts is not self._texts:  # the decoder was made anew
            self._kind_of, self._texts = [], columns.texts
        for place in range(len(self._kind_of), len(columns.texts)):
            self._kind_of.append(_KINDS.get(columns.texts[place], _OTHER))
        kinds = np.array(self._kind_of, np.int8)[columns.name]
        is_kept = (kinds == _STEP) | (columns.arguments["error"] != NO_TEXT)
        engine_steps = np.flatnonzero(kinds == _ENGINE_STEP)
        if len(engine_steps):
            self._count_tokens(columns.end_ns[engine_steps], columns.arguments[TOKENS][engine_steps])
        is_phase = (kinds == _PHASE) | columns.arguments["phase"]
        for rows in (engine_steps, np.flatnonzero(kinds == _EDGE), np.flatnonzero(is_phase)):
            is_kept[rows[-1:]] = True
        return np.flatnonzero(is_kept)

    def _span(self, span: Span) -> None:
        end_ns = span.end_ns or span.start_ns
        if span.name == ENGINE_STEP:
            self.engine = span
        elif span.name == STEP:
            self.steps.append(span)
        elif span.name == MEMORY_EDGE:
            self._edge(span.args)
        elif span.is_phase:
            self.last_phase = max(self.last_phase or (0, ""), (end_ns, span.name))
        if "error" in span.args:
            self._error(span, end_ns)

    def _count_tokens(self, ends_ns: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Add the tokens of an engine's steps to those of their seconds."""
        seconds, of = np.unique(ends_ns // 10**9, return_inverse=True)
        many = np.bincount(of, np.where(tokens == MISSING, 0, tokens))
        for second, tokens_then in zip(seconds.tolist(), many.tolist(), strict=True):
            self.tokens[second] = self.tokens.get(second, 0.0) + tokens_then
        newest = max(self.tokens)
        self.tokens = {second: n for second, n in self.tokens.items() if second > newest - 2 * RATE_SECONDS}

    def _edge(self, args: Args) -> None:
        totals, free_bytes = args.get("totals"), args.get("free_bytes")
        if isinstance(totals, dict) and isinstance(free_bytes, int) and isinstance(totals.get("used"), int):
            self.capacity_bytes = totals["used"] + free_bytes

    def _error(self, span: Span, end_ns: int) -> None:
        """Keep the innermost span of those that an exception left."""
        inner, self._last_error[span.thread] = self._last_error.get(span.thread), span
        error = span.args["error"]
        if inner is not None and inner.start_ns >= span.start_ns and inner.args["error"] == error:
            return
        self.many_errors += 1
        message = span.args.get("error_message")
        self.errors.append((end_ns, f"{error} in {span.name}" + (f": {message}" if message else "")))

    # ---- what is made of it ----

    @property
    def is_over(self) -> bool:
        return self.process.end_ns is not None or self.process.gone_ns is not None

    @property
    def silent_seconds(self) -> float:
        return max(0.0, (self.now_ns - self.last_ns) / 1e9)

    def all_errors(self) -> Iterator[tuple[int, str]]:
        yield from self.errors
        killed_by = signal_name(self.process.killed_by)
        if killed_by is not None and not self.process.was_stopped:
            yield self.process.gone_ns or self.last_ns, f"killed by {killed_by} (pid {self.process.pid})"

    def phases(self) -> list[Span]:
        """Its open phases, the outermost first."""
        return [span for span in self.open if span.is_phase]

    def ended_phase(self) -> tuple[float, str] | None:
        """How long ago its last phase ended, and which one that was."""
        over = [(span.end_ns, span.name) for span in self.pending if span.is_phase and span.end_ns is not None]
        over += [] if self.last_phase is None else [self.last_phase]
        end_ns, name = max(over, default=(None, ""))
        return None if end_ns is None else (self.seconds_since(end_ns), name)

    def all_steps(self) -> list[Span]:
        """Its last steps, and the one that goes on."""
        return [*self.steps, *(span for span in (*self.pending, *self.open) if span.name == STEP)]

    def innermost(self) -> list[Span]:
        """Return the innermost open span of each thread and task."""
        last: dict[tuple[int, int], Span] = {}
        for span in self.open:
            last[span.thread, span.task] = span
        return [*last.values()]

    def stacks(self) -> Iterator[StackNow]:
        """Where each thread and task stands."""
        found: dict[tuple[int, int], list[Span]] = {}
        for span in self.open:
            found.setdefault((span.thread, span.task), []).append(span)
        for (thread, task), spans in found.items():
            name = self.process.threads.get(thread, str(thread))
            yield StackNow(
                process=self.process.name,
                rank=self.process.rank,
                pid=self.process.pid,
                host=self.process.host,
                thread=f"{name}, task {task}" if task else name,
                spans=[span.name for span in spans],
                seconds=self.seconds_since(spans[-1].start_ns),
            )

    def seconds_since(self, at_ns: int) -> float:
        return max(0.0, (self.now_ns - at_ns) / 1e9)

    def figure(self, name: str, step: Span) -> float | None:
        """A figure of a step: its argument, else the last sample inside of it."""
        said = step.args.get(name)
        if said is not None and _is_number(said):
            return float(said)
        end_ns = self.now_ns if step.end_ns is None else step.end_ns
        inside = [value for at_ns, value in self.figures.get(name, ()) if step.start_ns <= at_ns <= end_ns]
        return inside[-1] if inside else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def _lane(lane: Lane, members: Sequence[_Kept]) -> LaneNow:
    phases = [(one.seconds_since(span.start_ns), one, span) for one in members for span in one.phases()]
    seconds, where, phase = min(phases, default=(None, None, None), key=lambda item: item[0])
    ended = [found for one in members if (found := one.ended_phase()) is not None]
    after_seconds, last_phase = min(ended, default=(None, None))
    inside = [
        (one.seconds_since(span.start_ns), span.name)
        for one in ([where] if where is not None else members)
        for span in one.innermost()
        if not span.is_phase and span.name != STEP and (phase is None or _are_together(span, phase))
    ]
    inside_seconds, inside_name = max(inside, default=(None, None))
    return LaneNow(
        name=lane.name,
        rank=lane.rank,
        host=lane.host or members[0].process.host,
        phase=None if phase is None else phase.name,
        phase_seconds=after_seconds if phase is None else seconds,
        last_phase=last_phase if phase is None else None,
        inside=inside_name,
        inside_seconds=inside_seconds,
        silent_seconds=min(one.silent_seconds for one in members),
        state=_state(members),
    )


def _are_together(span: Span, other: Span) -> bool:
    return (span.thread, span.task) == (other.thread, other.task)


def _state(members: Sequence[_Kept]) -> str:
    killed = [one.process.killed_by for one in members if one.process.killed_by is not None]
    if killed:
        return signal_name(killed[0]) or "died"
    return "ended" if all(one.is_over for one in members) else "running"


def _devices(in_order: Iterable[tuple[Lane, list[_Kept]]], samplers: Sequence[_Kept]) -> Iterator[DeviceNow]:
    sampled = {name: value for one in samplers for name, value in one.sampled.items()}
    of_gpu: dict[str, dict[str, float]] = {}
    for name, value in sampled.items():
        counter, whose = subjects(name)
        if len(whose) == 1 and counter in (SAMPLED_USED, SAMPLED_FREE, SAMPLED_RESERVED):
            of_gpu.setdefault(whose[0], {})[counter] = value
    for lane, members in in_order:
        alive = [one for one in members if not one.is_over]
        owners: dict[str, int] = {}
        for one in alive:
            for owner, size in one.owners.items():
                owners[owner] = owners.get(owner, 0) + int(size)
        if not any(owners.values()):
            continue
        gpu = of_gpu.get(str(lane.device), {})
        used = max((one.used for one in alive if one.used is not None), default=None)
        total = (
            gpu[SAMPLED_USED] + gpu.get(SAMPLED_RESERVED, 0.0)
            if SAMPLED_USED in gpu
            else used[1]
            if used is not None
            else None
        )
        said = [one.capacity_bytes for one in members if one.capacity_bytes is not None]
        capacity = (
            int(total + gpu[SAMPLED_FREE]) if SAMPLED_FREE in gpu and total is not None else max(said, default=None)
        )
        yield DeviceNow(
            name=lane.name,
            rank=lane.rank,
            host=lane.host,
            owners={owner: owners[owner] for owner in OWNERS if owners.get(owner)},
            used_bytes=None if total is None else int(total),
            capacity_bytes=capacity,
        )


def _rollout(program: Sequence[_Kept]) -> RolloutNow | None:
    engines = [one for one in program if one.engine is not None]
    if not engines:
        return None
    goes_on = any(span.name == ROLLOUT for one in program for span in one.open)
    tokens = 0.0
    computing = []
    for one in engines:
        since = one.now_ns // 10**9 - RATE_SECONDS
        tokens += sum(many for second, many in one.tokens.items() if second >= since)
        last = one.engine
        is_recent = last is not None and one.seconds_since(last.end_ns or last.start_ns) < COMPUTING_SECONDS
        if last is not None and (is_recent or goes_on) and not one.is_over:
            computing.append(last.args)
    usage = [args["kv_usage"] for args in computing if _is_number(args.get("kv_usage"))]
    return RolloutNow(
        tokens_per_second=tokens / RATE_SECONDS,
        running=sum(args["running"] for args in computing if isinstance(args.get("running"), int)),
        waiting=sum(args["waiting"] for args in computing if isinstance(args.get("waiting"), int)),
        kv_usage=max(usage, default=None),
        engines=len(computing),
    )


def _steps(in_order: Iterable[tuple[Lane, list[_Kept]]]) -> list[StepNow]:
    """Return the last steps of the driver; without one, of the lowest rank that has steps, or the first process."""
    for _, members in in_order:
        for one in members:
            spans = one.all_steps()
            if spans:
                return [_step(one, span, place) for place, span in enumerate(spans)]
    return []


def _step(kept: _Kept, span: Span, place: int) -> StepNow:
    number, error = span.args.get("step"), span.args.get("error")
    seconds = kept.seconds_since(span.start_ns) if span.end_ns is None else span.seconds
    tokens, rate = kept.figure(TOKENS, span), kept.figure(TOKENS_PER_SECOND, span)
    if rate is None and tokens is not None and span.seconds > 0:
        rate = tokens / span.seconds
    return StepNow(
        number=number if isinstance(number, int) else place,
        seconds=seconds,
        is_over=span.end_ns is not None,
        reward_mean=kept.figure(REWARD_MEAN, span),
        tokens_per_second=rate,
        error=None if error is None else str(error),
        is_inferred=span.is_inferred,
    )


def _hosts(kept: Sequence[_Kept]) -> list[HostNow]:
    hosts: dict[str, list[_Kept]] = {}
    for one in kept:
        hosts.setdefault(one.process.host, []).append(one)
    return [
        HostNow(
            name=host,
            processes=sum(one.process.role != SAMPLER for one in members),
            ranks=len({one.process.rank for one in members} - {None}),
            cpu_percent=_last(members, "host.cpu_percent"),
            available_bytes=None if (left := _last(members, "host.available_bytes")) is None else int(left),
            silent_seconds=min(one.silent_seconds for one in members),
        )
        for host, members in sorted(hosts.items())
    ]


def _last(members: Sequence[_Kept], name: str) -> float | None:
    return next((one.sampled[name] for one in members if name in one.sampled), None)
