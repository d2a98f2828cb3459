"""The rollout of each step: its trajectories and requests, how long and how large they were, and who did them.

A trajectory or a request belongs to the step in which it began, also if it ended in a later one, and all of its length
counts. Those of a validation are counted and left out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from rltrace.analysis.asked import Asked, asked
from rltrace.analysis.engine_load import EngineLoad, LoadSlice
from rltrace.analysis.engine_requests import (
    LEAST_REQUESTS,
    Balance,
    EngineRequests,
    balanced,
    engine_requests,
    surplus_of,
    tail_of,
)
from rltrace.analysis.observations import Observations
from rltrace.analysis.steps import StepWindows
from rltrace.analysis.trajectories import Trajectories, trajectories
from rltrace.read.columns import OPEN

TRAJECTORY_SECONDS, TRAJECTORY_TOKENS, TURNS, TOOL_SECONDS = (
    "trajectory_seconds", "trajectory_tokens", "turns", "tool_seconds",
)  # fmt: skip
REQUEST_SECONDS, QUEUE_SECONDS, FIRST_TOKEN_SECONDS = "request_seconds", "queue_seconds", "first_token_seconds"
TOKENS_PER_SECOND, PROMPT_TOKENS, TOKENS = "decode_tokens_per_second", "prompt_tokens", "tokens"
NAMES = {
    TRAJECTORY_SECONDS: "trajectory",
    TURNS: "turns of a trajectory",
    TRAJECTORY_TOKENS: "tokens of a trajectory",
    TOOL_SECONDS: "tools of a trajectory",
    REQUEST_SECONDS: "request",
    QUEUE_SECONDS: "waiting in the engine",
    FIRST_TOKEN_SECONDS: "time to first token",
    TOKENS_PER_SECOND: "tokens per second after it",
    PROMPT_TOKENS: "tokens of a prompt",
    TOKENS: "tokens of a response",
}
"""What each distribution is called, in the order in which they are shown."""
SECONDS = frozenset({TRAJECTORY_SECONDS, TOOL_SECONDS, REQUEST_SECONDS, QUEUE_SECONDS, FIRST_TOKEN_SECONDS})
"""Those that are lengths."""


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """How some values are spread. Percentiles between two values are interpolated between them."""

    count: int
    """So many values; where nobody said a value, it is not among them."""
    mean: float
    """Their mean."""
    p50: float
    """Half of the values are no more than this."""
    p95: float
    """95 % likewise."""
    p99: float
    """99 % likewise."""
    maximum: float
    """The largest."""


class RolloutTail(msgspec.Struct, frozen=True, kw_only=True):
    """The time from which on only the slowest 5 % of the requests run."""

    seconds: float
    """Its length."""
    without_seconds: float
    """What the rollout in the engines would have taken without them."""
    of: str
    """`last engine`: compared with the other requests of the engine that ends last, as the finding `rollout_tail`
    does; `all engines`: no engine has enough for that."""


class EngineBalance(msgspec.Struct, frozen=True, kw_only=True):
    """How evenly engines, or servers, share a rollout."""

    engines: int
    """Engines of the run that recorded requests."""
    unit: str
    """What `least` and the like count: `tokens` if every request says how many it made, else `requests`."""
    least: float
    """Of the engine that has the fewest."""
    mean: float
    """Of all engines."""
    most: float
    """Of the one that has the most."""
    most_over_mean: float
    """1 if all have as much."""
    first_done_seconds: float
    """When the first engine had ended its last request, counted from the first request of all."""
    last_done_seconds: float
    """When the last engine had."""
    last_engine: str
    """That engine."""


class EngineShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine did in the rollouts of the steady steps."""

    engine: str
    """Its lane."""
    requests: int
    """Requests that began in these steps and ended."""
    tokens: int | None
    """Tokens that it made; None if not every request says how many."""
    seconds: float
    """From the first request of all engines to its last end: a mean over the steps."""
    times_last: int
    """In so many steps it was the last one to end."""
    preempted: int
    """So many times a request lost its KV cache and was computed again."""
    most_kv_cache_share: float | None
    """Share of its KV cache that was taken at most, 0 to 1; None if it did not say so."""


class PromptGroups(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of the same prompt: an advantage that compares them needs all of them."""

    prompts: int
    """Prompts of which a sample is over."""
    least_samples: int
    """Of the prompt that has the fewest that are over."""
    most_samples: int
    """Of the one that has the most."""
    seconds: Distribution
    """From the beginning of a prompt's first sample to the end of its last one."""
    waiting_seconds: Distribution
    """From the end of a prompt's first sample to the end of its last one."""


class ToolFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one tool or environment."""

    name: str
    """The argument `tool` of its span, or the span's name."""
    calls: int
    """Calls that began in these steps."""
    not_over: int
    """Calls that had not ended when the Recording did; they are in no other figure."""
    outside: int
    """Calls of which no trajectory is known; only those inside of one count in `tool_seconds`."""
    seconds: Distribution | None
    """Length of a call; None if none is over."""


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the engines say of themselves."""

    preempted: int
    """So many times a request lost its KV cache and was computed again."""
    cached_tokens: int | None
    """Tokens of prompts that an engine had computed before (prefix hits); None if no engine said so."""
    cached_share: float | None
    """Their share of the prompts' tokens, of the requests that say both."""
    drafted_tokens: int
    """Tokens that a draft had guessed; 0 without speculation."""
    accepted_tokens: int
    """Those among them that the model accepted."""
    most_running: int | None
    """Most requests that one engine computed in one step; None if no engine said so."""
    most_waiting: int | None
    """Most that waited in one engine, likewise."""
    most_kv_cache_share: float | None
    """Share of a KV cache that was taken at most, 0 to 1; None if no engine said so."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories and requests that began in some steps."""

    seconds: float | None
    """From the first trajectory or request to the end of the last one that is over, in a step; a mean if there are
    several. None if none is over."""
    trajectories: int
    """Those of a validation are not among them."""
    trajectories_not_over: int
    """Had not ended when the Recording did: they are in no distribution."""
    validating: int
    """Trajectories of a validation; they, and their requests, are in no other figure of this."""
    requests: int
    """Each once, however many processes recorded it: as the agent loop waits for it, else as the server answers it,
    else as the engine runs it."""
    requests_not_over: int
    """Had not ended when the Recording did, likewise."""
    requests_ended_later: int
    """Were over only after the step in which they began: they count there, with all of their length."""
    requests_carried_over: int
    """Were in flight when a step began. They count in the step in which they began."""
    distributions: dict[str, Distribution]
    """By what it is: `trajectory_seconds`, `trajectory_tokens` (made by all turns), `turns`, `tool_seconds` (all calls
    of a trajectory added up), `request_seconds`, `queue_seconds` (in the engine's queue), `first_token_seconds` (from
    the engine's queue on), `decode_tokens_per_second` (of one request, from its first token on), `prompt_tokens` and
    `tokens` of a request."""
    unknown: dict[str, str]
    """Those among them, and `tail`, that are not known, or not of all requests, each with the reason."""
    tail: RolloutTail | None
    """A mean, if there are several steps."""
    balance: EngineBalance | None
    """None if no engine recorded its requests; means, if there are several steps."""
    prompts: PromptGroups | None
    """None if nothing says which samples are of the same prompt."""
    tools: list[ToolFigures]
    """One item per tool that was called, by name."""
    engine: EngineFigures | None
    """None if no engine recorded its steps or requests."""


class StepRollout(Rollout, frozen=True, kw_only=True):
    """The rollout of one step."""

    step: int | None
    """Number of the step; None before the first step and between two."""
    load: list[LoadSlice]
    """How many requests ran and waited while it went on, and how full the KV caches were: 20 slices of one length."""


class SteadyRollout(Rollout, frozen=True, kw_only=True):
    """The rollouts of the steady steps together, or of the whole run where these have none."""

    steps: list[int]
    """The steps that it is of; empty if no step is marked, or if it is of the whole run."""
    steps_without: list[int]
    """Steady steps in which no trajectory and no request began."""
    engines: list[EngineShare]
    """One item per engine."""


class Rollouts(NamedTuple):
    """The figures of all rollouts."""

    steady: SteadyRollout | None
    by_step: list[StepRollout]


def rollouts(seen: Observations, windows: StepWindows) -> Rollouts:
    """Return the rollout of each step, and of the steady steps together; nothing if there is none in the run."""
    if not (len(asked(seen).starts) or len(trajectories(seen))):
        return Rollouts(None, [])
    found = _Found(seen, windows)
    load = EngineLoad(seen)
    by_step = [
        StepRollout(
            step=windows.numbers[place],
            load=load.slices(*found.reaches_ns[place]),
            **asdict(found.figures([place])),
        )
        for place in found.having
    ]
    there = {*found.having}
    having = [place for place in windows.steady if place in there and found.has_any(place)]
    chosen = having or [place for place in found.having if found.has_any(place)]
    steady = SteadyRollout(
        steps=_numbers(windows, having),
        steps_without=_numbers(windows, [place for place in windows.steady if not found.has_any(place)]),
        engines=found.shares(chosen),
        **asdict(found.figures(chosen)),
    )
    return Rollouts(steady, by_step)


def _numbers(windows: StepWindows, places: list[int]) -> list[int]:
    return [number for place in places if (number := windows.numbers[place]) is not None]


# ---- the parts of each step -------------------------------------------------------------------------------------

Places = NDArray[np.intp]
_NEVER_NS = np.iinfo(np.int64).max
"""Later than any time."""


class _ByStep:
    """Rows in the order of their steps."""

    def __init__(self, step: Places, steps: int) -> None:
        self._order = np.argsort(step, kind="stable")
        self._edges = np.searchsorted(step[self._order], np.arange(steps + 1))

    def of(self, steps: list[int]) -> Places:
        """Return the rows of some steps."""
        parts = [self._order[self._edges[step] : self._edges[step + 1]] for step in steps]
        return np.concatenate([np.empty(0, np.intp), *parts])


class _EngineSteps(NamedTuple):
    """Steps of all engines, one row each."""

    engine: Places
    starts: NDArray[np.int64]
    running: NDArray[np.int64]
    waiting: NDArray[np.int64]
    preempted: NDArray[np.int64]
    drafted: NDArray[np.int64]
    accepted: NDArray[np.int64]
    kv_usage: NDArray[np.float64]

    def part(self, places: Places) -> _EngineSteps:
        """Return some of them."""
        whole = (self.starts, self.running, self.waiting, self.preempted, self.drafted, self.accepted)
        starts, running, waiting, preempted, drafted, accepted = (column[places] for column in whole)
        return _EngineSteps(
            self.engine[places], starts, running, waiting, preempted, drafted, accepted, self.kv_usage[places]
        )


class _Found:
    """What was recorded of rollouts, by step."""

    def __init__(self, seen: Observations, windows: StepWindows) -> None:
        self._windows = windows
        many = len(windows.numbers)
        self._trajectories = trajectories(seen)
        requests = asked(seen)
        is_validating = np.append(self._trajectories.are_validating, False)[requests.trajectory]
        self._ends_ns = np.sort(np.where(requests.ends == OPEN, np.iinfo(np.int64).max, requests.ends))
        self._starts_ns = np.sort(requests.starts)
        self._requests: Asked = requests.part(~is_validating)
        self._step_of_request = windows.places(self._requests.starts)
        self._by_request = _ByStep(self._step_of_request, many)
        self._by_trajectory = _ByStep(windows.places(self._trajectories.table.starts), many)
        self._by_call = _ByStep(windows.places(self._trajectories.calls.starts), many)
        self._in_engines = engine_requests(seen, _reaching(windows, seen))
        self._of_step = list(self._in_engines.by_step(many))
        self._balance = balanced(self._in_engines, many) if len(self._in_engines.step) else None
        self._engine_steps = _engine_steps(seen, self._in_engines)
        self._by_engine_step = _ByStep(windows.places(self._engine_steps.starts), many)
        self._turns = self._trajectories.turns_of_each()
        self._tool_ns, self._tokens = _of_each(self._trajectories, requests)

    @functools.cached_property
    def having(self) -> list[int]:
        """Places of all steps, and of the time outside of them if anything began there."""
        return [place for place in range(len(self._windows.numbers)) if place > 0 or self.has_any(0)]

    def has_any(self, place: int) -> bool:
        """Return whether a trajectory or a request began in a step."""
        return bool(len(self._by_request.of([place])) or len(self._by_trajectory.of([place])))

    @functools.cached_property
    def reaches_ns(self) -> list[tuple[int, int]]:
        """When the first trajectory or request of each step began, and when the last one of them ended; of those that
        are over."""
        requests, of, counted = self._requests, self._trajectories.table, ~self._trajectories.are_validating
        step = np.concatenate([self._step_of_request, self._windows.places(of.starts[counted])])
        starts = np.concatenate([requests.starts, of.starts[counted]])
        ends = np.concatenate([requests.ends, of.ends[counted]])
        is_over = ends != OPEN
        first, last = np.full(len(self._windows.numbers), _NEVER_NS), np.full(len(self._windows.numbers), -_NEVER_NS)
        np.minimum.at(first, step[is_over], starts[is_over])
        np.maximum.at(last, step[is_over], ends[is_over])
        has_any = first < _NEVER_NS
        return [*zip(np.where(has_any, first, 0).tolist(), np.where(has_any, last, 0).tolist(), strict=True)]

    def _counted(self, places: Places) -> Places:
        """Return the trajectories among some that are of no validation."""
        chosen: Places = places[~self._trajectories.are_validating[places]]
        return chosen

    def figures(self, steps: list[int]) -> Rollout:
        """Return the rollouts of some steps together."""
        chosen = self._by_request.of(steps)
        requests, step = self._requests.part(chosen), self._step_of_request[chosen]
        begun = self._by_trajectory.of(steps)
        of, counted = self._trajectories, self._counted(begun)
        over = counted[of.are_over[counted]]
        reaches_ns = [self.reaches_ns[place] for place in steps]
        lengths = [(end_ns - start_ns) / 1e9 for start_ns, end_ns in reaches_ns if end_ns > start_ns]
        found, unknown = _distributions(requests)
        more, missing = self._of_trajectories(over)
        tail, no_tail = self._tail(steps)
        last_of = self._windows.windows[:, 1]
        is_marked = step > 0
        return Rollout(
            seconds=float(np.mean(lengths)) if lengths else None,
            trajectories=len(counted),
            trajectories_not_over=len(counted) - len(over),
            validating=len(begun) - len(counted),
            requests=len(requests.starts),
            requests_not_over=int((requests.ends == OPEN).sum()),
            requests_ended_later=int(((requests.ends > last_of[step]) & is_marked).sum()),
            requests_carried_over=sum(map(self._in_flight, (place for place in steps if place > 0))),
            distributions=more | found,
            unknown=missing | unknown | no_tail,
            tail=tail,
            balance=self._balance_of(steps),
            prompts=self._prompts(requests, over),
            tools=list(self._tools(self._by_call.of(steps))),
            engine=self._engine(requests, self._by_engine_step.of(steps)),
        )

    def _in_flight(self, place: int) -> int:
        """Return how many requests were in flight when a step began."""
        begin_ns = self._windows.windows[place, 0]
        begun = int(np.searchsorted(self._starts_ns, begin_ns, side="left"))
        return begun - int(np.searchsorted(self._ends_ns, begin_ns, side="right"))

    def _of_trajectories(self, over: Places) -> tuple[dict[str, Distribution], dict[str, str]]:
        of = self._trajectories
        if not len(of):
            reason = "no trajectory was recorded"
            return {}, dict.fromkeys((TRAJECTORY_SECONDS, TRAJECTORY_TOKENS, TURNS, TOOL_SECONDS), reason)
        columns: dict[str, NDArray[np.float64]] = {
            TRAJECTORY_SECONDS: (of.table.ends[over] - of.table.starts[over]) / 1e9,
        }
        unknown = {}
        if of.turn is None:
            unknown[TURNS] = "no turn of a trajectory was recorded"
        else:
            columns[TURNS] = self._turns[over].astype(np.float64)
        if (self._tokens >= 0).any():
            known = over[self._tokens[over] >= 0]
            columns[TRAJECTORY_TOKENS] = self._tokens[known].astype(np.float64)
        else:
            unknown[TRAJECTORY_TOKENS] = "no request of a trajectory says its tokens"
        if (of.calls.trajectory >= 0).any():
            columns[TOOL_SECONDS] = self._tool_ns[over] / 1e9
        else:
            unknown[TOOL_SECONDS] = "no call of a tool was recorded in a trajectory"
        return {name: _distribution(values) for name, values in columns.items() if len(values)}, unknown

    def _tail(self, steps: list[int]) -> tuple[RolloutTail | None, dict[str, str]]:
        """Return the mean tail of some steps, of those that have enough requests; the same kind in each of them."""
        parts = [part for step in steps if len((part := self._of_step[step]).step)]
        if not parts:
            return None, {"tail": "no engine recorded its requests"}
        for of, of_all in (("last engine", False), ("all engines", True)):
            tails = [tail for part in parts if (tail := tail_of(part, of_all_engines=of_all)) is not None]
            if len(tails) == len(parts):
                seconds = float(np.mean([tail.seconds for tail in tails]))
                whole = float(np.mean([tail.rollout_seconds for tail in tails]))
                return RolloutTail(seconds=seconds, without_seconds=whole - seconds, of=of), {}
        return None, {
            "tail": f"a step has fewer requests than the {LEAST_REQUESTS} that it takes to have a slowest 5 %"
        }

    def _balance_of(self, steps: list[int]) -> EngineBalance | None:
        chosen = [step for step in steps if len(self._of_step[step].step)]
        if self._balance is None or not chosen:
            return None
        work, seconds = self._balance.work[chosen], self._balance.seconds[chosen]
        last = np.bincount(seconds.argmax(axis=1), minlength=seconds.shape[1])
        busy = np.where(work > 0, seconds, np.inf)
        part = Balance(work, self._balance.unit, seconds)
        return EngineBalance(
            engines=len(self._in_engines.engines),
            unit=self._balance.unit,
            least=float(work.min(axis=1).mean()),
            mean=float(work.mean()),
            most=float(work.max(axis=1).mean()),
            most_over_mean=1 + float(surplus_of(part).mean()),
            first_done_seconds=float(busy.min(axis=1).mean()),
            last_done_seconds=float(seconds.max(axis=1).mean()),
            last_engine=self._in_engines.engines[int(last.argmax())].name,
        )

    def shares(self, steps: list[int]) -> list[EngineShare]:
        """Return what each engine did in some steps."""
        chosen = [step for step in steps if len(self._of_step[step].step)]
        if self._balance is None or not chosen:
            return []
        seconds = self._balance.seconds[chosen]
        last = np.bincount(seconds.argmax(axis=1), minlength=seconds.shape[1])
        rows = np.isin(self._in_engines.step, chosen)
        many = np.bincount(self._in_engines.engine[rows], minlength=seconds.shape[1])
        work = self._balance.work[chosen].sum(axis=0)
        own = self._engine_steps.part(self._by_engine_step.of(steps))
        has_tokens = self._balance.unit == TOKENS
        return [
            EngineShare(
                engine=lane.name,
                requests=int(many[place]),
                tokens=int(work[place]) if has_tokens else None,
                seconds=float(seconds[:, place].mean()),
                times_last=int(last[place]),
                preempted=int(own.preempted[own.engine == place].sum()),
                most_kv_cache_share=_most_usage(own.kv_usage[own.engine == place]),
            )
            for place, lane in enumerate(self._in_engines.engines)
        ]

    def _prompts(self, requests: Asked, over: Places) -> PromptGroups | None:
        """Return the groups of trajectories; where these do not say their prompts, those of requests."""
        of = self._trajectories
        known = over[of.prompts[over] != 0]
        if len(known):
            return _groups(of.prompts[known], of.table.starts[known], of.table.ends[known])
        is_own = (requests.prompts != 0) & (requests.ends != OPEN)
        if not is_own.any():
            return None
        return _groups(requests.prompts[is_own], requests.starts[is_own], requests.ends[is_own])

    def _tools(self, places: Places) -> Iterator[ToolFigures]:
        calls = self._trajectories.calls
        is_trained = ~np.append(self._trajectories.are_validating, False)[calls.trajectory[places]]
        places = places[is_trained]
        for tool in np.unique(calls.tool[places]).tolist():
            own = places[calls.tool[places] == tool]
            over = own[calls.ends[own] != OPEN]
            lengths = (calls.ends[over] - calls.starts[over]) / 1e9
            yield ToolFigures(
                name=self._trajectories.tools[tool],
                calls=len(own),
                not_over=len(own) - len(over),
                outside=int((calls.trajectory[own] < 0).sum()),
                seconds=_distribution(lengths) if len(lengths) else None,
            )

    def _engine(self, requests: Asked, places: Places) -> EngineFigures | None:
        if not len(places) and not (requests.engine_starts >= 0).any():
            return None
        own = self._engine_steps.part(places)
        says = (requests.cached_tokens >= 0) & (requests.prompt_tokens >= 0)
        cached, asked_for = int(requests.cached_tokens[says].sum()), int(requests.prompt_tokens[says].sum())
        return EngineFigures(
            preempted=int(own.preempted.sum()),
            cached_tokens=cached if says.any() else None,
            cached_share=cached / asked_for if asked_for else None,
            drafted_tokens=int(own.drafted.sum()),
            accepted_tokens=int(own.accepted.sum()),
            most_running=_most(own.running),
            most_waiting=_most(own.waiting),
            most_kv_cache_share=_most_usage(own.kv_usage),
        )


def _reaching(windows: StepWindows, seen: Observations) -> NDArray[np.int64]:
    """Return the windows; a run without steps has one, in which its last request ends too."""
    if windows.spans:
        return windows.windows
    return np.array([(seen.start_ns, seen.end_ns + 1)], np.int64)


def _engine_steps(seen: Observations, requests: EngineRequests) -> _EngineSteps:
    kept = [(process.lane, process.engine_steps) for process in seen.processes if process.engine_steps]
    place = {lane: number for number, lane in enumerate(requests.engines)}
    counts = [len(steps.starts) for _, steps in kept]
    engine = np.repeat(np.array([place.get(lane, -1) for lane, _ in kept], np.intp), counts)

    def whole(name: str) -> NDArray[np.int64]:
        columns = [np.array(getattr(steps, name), np.int64) for _, steps in kept]
        return np.concatenate([np.empty(0, np.int64), *columns])

    return _EngineSteps(
        engine,
        starts=whole("starts"),
        running=whole("running"),
        waiting=whole("waiting"),
        preempted=whole("preempted"),
        drafted=whole("drafted"),
        accepted=whole("accepted"),
        kv_usage=np.concatenate([np.empty(0), *(np.array(steps.kv_usage) for _, steps in kept)]),
    )


def _of_each(of: Trajectories, requests: Asked) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each trajectory how long its tools took together, and the tokens of its turns; -1 if not all say."""
    calls = of.calls
    tool_ns = np.zeros(len(of), np.int64)
    counts = (calls.trajectory >= 0) & (calls.ends != OPEN)
    np.add.at(tool_ns, calls.trajectory[counts], (calls.ends - calls.starts)[counts])
    own = requests.part(requests.trajectory >= 0)
    tokens = np.zeros(len(of), np.int64)
    np.add.at(tokens, own.trajectory, np.maximum(own.tokens, 0))
    silent = np.ones(len(of), np.bool_)
    silent[own.trajectory] = False
    silent[own.trajectory[own.tokens < 0]] = True
    tokens[silent] = -1
    return tool_ns, tokens


# ---- values -----------------------------------------------------------------------------------------------------


def _distribution(values: NDArray[np.float64]) -> Distribution:
    ordered = np.sort(values)
    p50, p95, p99 = (_percentile(ordered, share) for share in (0.5, 0.95, 0.99))
    return Distribution(
        count=len(ordered), mean=float(ordered.mean()), p50=p50, p95=p95, p99=p99, maximum=ordered.item(-1)
    )


def _percentile(ordered: NDArray[np.float64], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    low, high = ordered.item(below), ordered.item(min(below + 1, len(ordered) - 1))
    return low + (high - low) * (place - below)


def _distributions(requests: Asked) -> tuple[dict[str, Distribution], dict[str, str]]:
    """Return the distributions of requests, and why some are not known; requests that are not over are in none."""
    over = requests.part(requests.ends != OPEN)
    if not len(over.starts):
        return {}, {}
    in_engine_ns = over.engine_ends - over.engine_starts
    decode_ns = np.where(over.first_token_ns >= 0, in_engine_ns - over.first_token_ns, -1)
    decodes = (over.tokens > 1) & (decode_ns > 0)
    columns = {
        REQUEST_SECONDS: (over.ends - over.starts) / 1e9,
        QUEUE_SECONDS: over.queued_ns[over.queued_ns >= 0] / 1e9,
        FIRST_TOKEN_SECONDS: over.first_token_ns[over.first_token_ns >= 0] / 1e9,
        TOKENS_PER_SECOND: (over.tokens[decodes] - 1) / decode_ns[decodes] * 1e9,
        PROMPT_TOKENS: over.prompt_tokens[over.prompt_tokens >= 0].astype(np.float64),
        TOKENS: over.tokens[over.tokens >= 0].astype(np.float64),
    }
    unknown = {name: _reason(name, len(values), over) for name, values in columns.items()}
    return (
        {name: _distribution(values) for name, values in columns.items() if len(values)},
        {name: reason for name, reason in unknown.items() if reason},
    )


def _reason(name: str, known: int, over: Asked) -> str:
    """Return why values are missing; nothing if none is. A request of one token has no speed."""
    wanted = int(((over.tokens > 1) | (over.tokens < 0)).sum()) if name == TOKENS_PER_SECOND else len(over.starts)
    if known >= wanted:
        return ""
    if known:
        return f"{wanted - known:,} of {wanted:,} requests do not say"
    return "no engine recorded its requests" if not (over.engine_starts >= 0).any() else "no engine said so"


def _groups(prompts: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> PromptGroups:
    order = np.argsort(prompts, kind="stable")
    first = np.flatnonzero(np.append(True, np.diff(prompts[order]) != 0))
    sizes = np.diff(np.append(first, len(order)))
    begun = np.minimum.reduceat(starts[order], first)
    first_end, last_end = (reduce.reduceat(ends[order], first) for reduce in (np.minimum, np.maximum))
    return PromptGroups(
        prompts=len(first),
        least_samples=int(sizes.min()),
        most_samples=int(sizes.max()),
        seconds=_distribution((last_end - begun) / 1e9),
        waiting_seconds=_distribution((last_end - first_end) / 1e9),
    )


def _most(values: NDArray[np.int64]) -> int | None:
    return int(values.max()) if len(values) and values.max() >= 0 else None


def _most_usage(values: NDArray[np.float64]) -> float | None:
    return float(values.max()) if len(values) and values.max() >= 0 else None
