"""Metrics of a run that grow with it: histograms, totals and last values, made of rows as they are written.

Every row is added once, when its span has ended, so that a run that goes on is never read again from its beginning. No
step, phase or rank is kept for itself, and the names that a program makes up are bounded: what is held, and what a
scrape says, does not grow with the steps, and hardly with the ranks (`places`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.lanes import Lane, lanes, order
from rltrace.events import (
    AGENT_REQUEST,
    ENGINE_STEP,
    PHASES,
    REQUEST,
    REWARD_MEAN,
    SAMPLER,
    SERVER_REQUEST,
    STEP,
    STEP_FIGURES,
    SYNC_STAGES,
    TOKENS,
    TOKENS_PER_SECOND,
    TOOLS,
    TRAJECTORIES,
    Span,
    owner_of_counter,
    subjects,
)
from rltrace.read.columns import NO_TEXT, OPEN, Columns
from rltrace.read.gate import MOST_BYTES
from rltrace.read.recording import Process

BOUNDS_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1000.0,
)  # fmt: skip
"""Upper bounds of the buckets of a histogram: from a stage of a bucket's sync to a step of a large run."""

MOST_NAMES = 64
"""How many names that a program can make up are told apart in one metric: phases, tools, processes without a rank."""
OTHERS = "(other)"
"""What all names behind them are called."""
NEWEST_SPANS = 1024
"""How many spans of a phase a process keeps, to add up those of the last step."""
MOST_PLACES = 64
"""How many ranks are told apart; of more, as many groups of neighbours."""

REQUESTS = (AGENT_REQUEST, SERVER_REQUEST, REQUEST)
DRIVER = "driver"


class Histogram:
    """How many lengths lie at or below each of `BOUNDS_SECONDS`, and their sum."""

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros(len(BOUNDS_SECONDS) + 1, np.int64)
        """By bucket; the last one is for what is longer than all bounds."""
        self.seconds = 0.0

    def add(self, lengths_ns: NDArray[np.int64]) -> None:
        """Add some lengths."""
        seconds = np.maximum(lengths_ns, 0) / 1e9
        places = np.searchsorted(BOUNDS_SECONDS, seconds, side="left")
        self.counts += np.bincount(places, minlength=len(self.counts))
        self.seconds += float(seconds.sum())

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.counts.sum())


Kept = TypeVar("Kept")


class Named(Generic[Kept]):
    """Something for each name, of which there are not too many."""

    def __init__(self, make: Callable[[], Kept]) -> None:
        self._make = make
        self.by_name: dict[str, Kept] = {}

    def __getitem__(self, name: str) -> Kept:
        if name not in self.by_name and len(self.by_name) >= MOST_NAMES:
            name = OTHERS
        return self.by_name.setdefault(name, self._make())


class OfProcess:
    """What one process said last."""

    def __init__(self) -> None:
        self.steps = Histogram()
        self.step: int | None = None
        """Number of the step that ended last."""
        self.step_ns = (0, 0)
        """Its beginning and its end."""
        self.tokens = 0.0
        """Of all its steps."""
        self.figures: dict[str, float] = {}
        """Reward and tokens per second of that step, as far as anybody said them."""
        self.figures_at: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in STEP_FIGURES}
        """When these were sampled, for steps that do not have them as arguments."""
        self.phases: Named[deque[tuple[int, int]]] = Named(lambda: deque(maxlen=NEWEST_SPANS))
        """Beginning and end of the newest spans of each phase."""
        self.owner_bytes: dict[str, float] = {}
        self.sampled: dict[str, float] = {}
        """The counters of a host's sampler."""
        self.engine: dict[str, float] = {}
        """What its engine's last step said: `running`, `waiting`, `kv_usage`."""
        self.last_ns = 0
        """When its last event was."""


class Metrics:
    """What was added so far."""

    def __init__(self) -> None:
        self.phases: Named[Histogram] = Named(Histogram)
        self.requests: Named[Histogram] = Named(Histogram)
        """By the name of the span: as the agent loop, the server and the engine see them."""
        self.queued = Histogram()
        """How long requests waited in their engine."""
        self.first_token = Histogram()
        """How long it took an engine from a request's arrival to its first token."""
        self.trajectories = Histogram()
        self.tools: Named[Histogram] = Named(Histogram)
        self.sync_stages: Named[Histogram] = Named(Histogram)
        self.request_tokens: dict[str, int] = {"tokens": 0, "prompt_tokens": 0, "cached_tokens": 0}
        """What engines generated for requests, what these were asked with, and what of it was cached."""
        self.of_process: dict[str, OfProcess] = {}
        """By the process's key."""

    def add(self, process: Process, rows: Columns) -> None:
        """Add rows of a process, each once; spans that are open are left to the rows in which they have ended."""
        of_process = self.of_process.setdefault(process.key, OfProcess())
        _add_samples(of_process, rows, is_of_sampler=process.role == SAMPLER)
        if not len(rows):
            return
        has_ended = rows.end_ns != OPEN
        of_process.last_ns = max(of_process.last_ns, int(np.where(has_ended, rows.end_ns, rows.start_ns).max()))
        for name, chosen in _by_name(rows, has_ended):
            self._add_spans(of_process, rows, name, chosen)

    def _add_spans(self, of_process: OfProcess, rows: Columns, name: str, chosen: NDArray[np.intp]) -> None:
        if name in SYNC_STAGES:
            _add(self.sync_stages[name], rows, chosen)
        elif (phases := chosen if name in PHASES else chosen[rows.arguments["phase"][chosen]]).size:
            _add(self.phases[name], rows, phases)
            newest = phases[-NEWEST_SPANS:]
            of_process.phases[name].extend(
                zip(rows.start_ns[newest].tolist(), rows.end_ns[newest].tolist(), strict=True)
            )
        elif name == STEP:
            _add_steps(of_process, sorted(rows.spans(chosen), key=lambda span: span.end_ns or 0))
        elif name in REQUESTS:
            self._add_requests(rows, name, chosen)
        elif name in TRAJECTORIES:
            _add(self.trajectories, rows, chosen)
        elif name in TOOLS:
            self._add_tools(rows, name, chosen)
        elif name == ENGINE_STEP:
            newest = chosen[np.argmax(rows.end_ns[chosen])]
            said = {key: float(rows.arguments[key][newest]) for key in ("running", "waiting", "kv_usage")}
            of_process.engine = {key: value for key, value in said.items() if value >= 0}  # else missing, or NaN

    def _add_requests(self, rows: Columns, name: str, chosen: NDArray[np.intp]) -> None:
        _add(self.requests[name], rows, chosen)
        if name != REQUEST:
            return
        for key, histogram in (("queued_ns", self.queued), ("first_token_ns", self.first_token)):
            said = rows.arguments[key][chosen]
            histogram.add(said[said >= 0])
        for key in self.request_tokens:
            said = rows.arguments[key][chosen]
            self.request_tokens[key] += int(said[said >= 0].sum())

    def _add_tools(self, rows: Columns, name: str, chosen: NDArray[np.intp]) -> None:
        tools = rows.arguments["tool"][chosen]
        for tool in np.unique(tools).tolist():
            _add(self.tools[name if tool == NO_TEXT else rows.texts[tool]], rows, chosen[tools == tool])


# ---- rows -------------------------------------------------------------------------------------------------------


def _by_name(rows: Columns, is_one: NDArray[np.bool_]) -> Iterator[tuple[str, NDArray[np.intp]]]:
    """Yield the names that a metric is made of, with their rows."""
    is_phase = rows.arguments["phase"]
    counts = np.bincount(rows.name[is_one], minlength=len(rows.texts))
    marked = np.bincount(rows.name[is_one & is_phase], minlength=len(rows.texts))
    for place in np.flatnonzero(counts).tolist():
        if rows.texts[place] in _NAMES or marked[place]:
            yield rows.texts[place], np.flatnonzero(is_one & (rows.name == place))


_NAMES = frozenset({*PHASES, STEP, *REQUESTS, *TRAJECTORIES, *TOOLS, ENGINE_STEP, *SYNC_STAGES})


def _add(histogram: Histogram, rows: Columns, chosen: NDArray[np.intp]) -> None:
    histogram.add(rows.end_ns[chosen] - rows.start_ns[chosen])


def _add_samples(of_process: OfProcess, rows: Columns, *, is_of_sampler: bool) -> None:
    if not len(rows.samples.name):
        return
    of_process.last_ns = max(of_process.last_ns, int(rows.samples.ts_ns.max()))
    for name, times_ns, values in rows.samples_by_name():
        owner, last = owner_of_counter(name), float(values[-1])
        if is_of_sampler:
            of_process.sampled[name] = last
        elif name in STEP_FIGURES:
            known_ns, known = of_process.figures_at[name]
            known_ns += times_ns.tolist()
            known += values.tolist()
        elif owner is not None and abs(last) <= MOST_BYTES:
            of_process.owner_bytes[owner] = last


def _add_steps(of_process: OfProcess, spans: Iterable[Span]) -> None:
    for span in spans:
        assert span.end_ns is not None
        if span.args.get("recorded") is False or "error" in span.args:
            continue
        number = span.args.get("step")
        of_process.step = number if isinstance(number, int) else of_process.steps.count
        of_process.step_ns = (span.start_ns, span.end_ns)
        of_process.steps.add(np.array([span.end_ns - span.start_ns]))
        said = {name: _figure(of_process, span, name) for name in STEP_FIGURES}
        known = {name: value for name, value in said.items() if value is not None}
        of_process.tokens += known.get(TOKENS, 0.0)
        if TOKENS in known and span.seconds > 0:
            known.setdefault(TOKENS_PER_SECOND, known[TOKENS] / span.seconds)
        of_process.figures |= known
        for times_ns, values in of_process.figures_at.values():
            behind = bisect_right(times_ns, span.end_ns)
            del times_ns[:behind], values[:behind]


def _figure(of_process: OfProcess, span: Span, name: str) -> float | None:
    """Return a figure of a step: its argument, else the last sample inside of it."""
    said = span.args.get(name)
    if isinstance(said, (int, float)) and not isinstance(said, bool):
        return float(said)
    times_ns, values = of_process.figures_at[name]
    behind = bisect_right(times_ns, span.end_ns or 0)
    return values[behind - 1] if behind and times_ns[behind - 1] >= span.start_ns else None


# ---- what all processes say together ----------------------------------------------------------------------------


class Place(NamedTuple):
    """Where something was measured, as a metric tells it apart: a rank, some neighbouring ranks, or another name."""

    name: str
    """`3`, `48-63`, `driver`, or what processes without a rank are called."""
    lanes: tuple[Lane, ...]


class Device(NamedTuple):
    """A device, or the fullest one of a group of ranks."""

    place: str
    device: str
    """Its uuid, `cpu`, or `fullest of 16`."""
    bytes: Mapping[str, float]
    """By owner."""


class Gpu(NamedTuple):
    """A GPU as a sampler saw it last, or the fullest one of a group of ranks."""

    place: str
    """Empty if no process of the run said that it works on it."""
    device: str
    sampled: Mapping[str, float]
    """By counter: `gpu.used_bytes`."""


class LastSteps(NamedTuple):
    """The steps of the run."""

    histogram: Histogram
    tokens: float
    number: int | None
    """Of the last one."""
    reward_mean: float | None
    tokens_per_second: float | None
    window_ns: tuple[int, int]
    """From when to when it was."""


def places(processes: Sequence[Process]) -> list[Place]:
    """Return the places of all lanes: each rank by itself, or at most `MOST_PLACES` groups of equally many ranks."""
    on_lane = lanes(processes)
    name_of = {on_lane[process.key]: process.name for process in processes}
    last = max((lane.rank for lane in name_of if lane.rank is not None), default=0)
    size = 1
    while (last // size) + 1 > MOST_PLACES:
        size *= 2
    members: Named[list[Lane]] = Named(list)
    ranks: dict[int, list[Lane]] = {}
    for lane in sorted(name_of, key=order):
        if lane.rank is not None:
            ranks.setdefault(lane.rank // size, []).append(lane)
        else:
            members[DRIVER if lane.is_driver else name_of[lane]].append(lane)
    of_ranks = [Place(_ranks(group, size), tuple(together)) for group, together in ranks.items()]
    return [*of_ranks, *(Place(name, tuple(together)) for name, together in members.by_name.items())]


def _ranks(group: int, size: int) -> str:
    return str(group) if size == 1 else f"{group * size}-{group * size + size - 1}"


def _device(uuid: str, of: int) -> str:
    return uuid if of == 1 else f"fullest of {of}"


class Together:
    """The metrics of single processes, put together."""

    def __init__(self, processes: Sequence[Process], metrics: Metrics, *, is_live: bool) -> None:
        self._processes = {process.key: process for process in processes}
        self._of_process = metrics.of_process
        self._phases = metrics.phases.by_name
        self._is_live = is_live
        self.places = places(processes)
        self._keys: dict[Lane, list[str]] = {}
        for key, lane in lanes(processes).items():
            if key in self._of_process:
                self._keys.setdefault(lane, []).append(key)
        self._newest: dict[tuple[Lane, str], str] = {}
        """The process that has each name on a lane: one that was started again takes the place of the first."""
        for lane, keys in self._keys.items():
            for key in sorted(keys, key=lambda key: self._processes[key].start_ns):
                self._newest[lane, self._processes[key].name] = key

    def steps(self) -> LastSteps:
        """Return the steps that count: the driver's; without a driver the lowest rank's; else all processes' own."""
        having = [(lane, self._of_process[key]) for lane, keys in self._keys.items() for key in keys]
        having = sorted((one for one in having if one[1].steps.count), key=lambda one: order(one[0]))
        if having and (having[0][0].is_driver or having[0][0].rank is not None):
            having = [one for one in having if one[0] == having[0][0]]
        together, tokens = Histogram(), 0.0
        for _, of_process in having:
            together.counts = together.counts + of_process.steps.counts
            together.seconds += of_process.steps.seconds
            tokens += of_process.tokens
        newest = max((of_process for _, of_process in having), key=lambda one: one.last_ns, default=OfProcess())
        reward, rate = newest.figures.get(REWARD_MEAN), newest.figures.get(TOKENS_PER_SECOND)
        return LastSteps(together, tokens, newest.step, reward, rate, newest.step_ns)

    def phase_seconds(self) -> Iterator[tuple[str, str, float]]:
        """Yield place and phase with its seconds in the last step, of the rank of the place that took longest."""
        first_ns, last_ns = self.steps().window_ns
        for place in self.places:
            longest: dict[str, float] = {}
            for lane in place.lanes:
                of_lane: dict[str, int] = {}
                for key in self._keys.get(lane, ()):
                    for phase, spans in self._of_process[key].phases.by_name.items():
                        inside = [end_ns - start_ns for start_ns, end_ns in spans if first_ns <= start_ns < last_ns]
                        if inside:
                            known = phase if phase in self._phases else OTHERS
                            of_lane[known] = of_lane.get(known, 0) + sum(inside)
                for phase, phase_ns in of_lane.items():
                    longest[phase] = max(longest.get(phase, 0.0), phase_ns / 1e9)
            yield from ((place.name, phase, seconds) for phase, seconds in longest.items())

    def devices(self) -> Iterator[Device]:
        """Yield what each device's owners held last: of its processes that are there, or were at the end."""
        for place in self.places:
            full = [(lane, owners) for lane in place.lanes if (owners := self._owner_bytes(lane))]
            if full:
                lane, owners = max(full, key=lambda one: sum(one[1].values()))
                yield Device(place.name, _device(lane.device or "cpu", len(full)), owners)

    def gpus(self) -> Iterator[Gpu]:
        """Yield what the samplers said last of each place's GPU, or of its fullest one; then of GPUs without a rank."""
        sampled = self._by_gpu()
        for place in self.places:
            own = [lane.device for lane in place.lanes if lane.device in sampled]
            if own:
                fullest = max(own, key=lambda uuid: sampled[uuid or ""].get("gpu.used_bytes", 0.0)) or ""
                yield Gpu(place.name, _device(fullest, len(own)), sampled[fullest])
        of_ranks = {lane.device for place in self.places for lane in place.lanes}
        for uuid in sorted(sampled.keys() - of_ranks)[:MOST_PLACES]:
            yield Gpu("", uuid, sampled[uuid])

    def _by_gpu(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for of_process in self._of_process.values():
            for full, value in of_process.sampled.items():
                counter, of = subjects(full)
                if len(of) == 1 and counter.startswith("gpu."):
                    found.setdefault(of[0], {})[counter] = value
        return found

    def engine(self, key: str) -> list[float]:
        """Return what each engine that is there said last of itself."""
        there = (self._of_process[process].engine for process in self._newest.values() if self._is_there(process))
        return [said[key] for said in there if key in said]

    def _is_there(self, key: str) -> bool:
        """Return whether a process holds what it said last: it has not ended, or the whole run has."""
        process = self._processes[key]
        return not self._is_live or (process.end_ns is None and process.gone_ns is None)

    def _owner_bytes(self, lane: Lane) -> dict[str, float]:
        held: dict[str, float] = {}
        for key in self._keys.get(lane, ()):
            if self._newest[lane, self._processes[key].name] == key and self._is_there(key):
                for owner, size_bytes in self._of_process[key].owner_bytes.items():
                    held[owner] = held.get(owner, 0.0) + size_bytes
        return held
