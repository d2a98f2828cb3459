"""The rollout of each step: its trajectories and requests, how long and how large they were, and who did them.

A trajectory or a request belongs to the step in which it began, also if it ended in a later one, and all of its length
counts. Those of a validation are counted and left out.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from rltrace.analysis.asked import Asked, asked
from rltrace.analysis.distributions import Distribution, ascending, distributions, in_order, means, most, sums
from rltrace.analysis.engine_load import EngineLoad, LoadSlice
from rltrace.analysis.engine_requests import (
    LEAST_REQUESTS,
    EngineRequests,
    Tails,
    balanced,
    engine_requests,
    surplus_of,
    tails,
)
from rltrace.analysis.intervals import LATEST_NS
from rltrace.analysis.moments import where_known
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
    of_steps = found.figures([[place] for place in found.having])
    loads = EngineLoad(seen).slices(*(at_ns[found.having] for at_ns in found.reaches_ns))
    by_step = [
        StepRollout(step=windows.numbers[place], load=load, **asdict(of_step))
        for place, load, of_step in zip(found.having, loads, of_steps, strict=True)
    ]
    having = [place for place in windows.steady if found.has_any[place]]
    chosen = having or [place for place in found.having if found.has_any[place]]
    (of_chosen,) = found.figures([chosen])
    steady = SteadyRollout(
        steps=_numbers(windows, having),
        steps_without=_numbers(windows, [place for place in windows.steady if not found.has_any[place]]),
        engines=found.shares(chosen),
        **asdict(of_chosen),
    )
    return Rollouts(steady, by_step)


def _numbers(windows: StepWindows, places: list[int]) -> list[int]:
    return [number for place in places if (number := windows.numbers[place]) is not None]


# ---- the parts of each step -------------------------------------------------------------------------------------

Places = NDArray[np.intp]


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
        self._trajectories = trajectories(seen)
        requests = asked(seen)
        is_validating = np.append(self._trajectories.are_validating, False)[requests.trajectory]
        # Those of each process are in order already.
        self._ends_ns = np.sort(np.where(requests.ends == OPEN, LATEST_NS, requests.ends), kind="stable")
        self._starts_ns = np.sort(requests.starts, kind="stable")
        rows, self._step_of_request = in_order(np.where(is_validating, -1, windows.places(requests.starts)))
        self._requests: Asked = requests.part(rows)
        self._step_of_trajectory = windows.places(self._trajectories.table.starts)
        self._step_of_call = windows.places(self._trajectories.calls.starts)
        self._in_engines = engine_requests(seen, _reaching(windows, seen))
        many = len(windows.numbers)
        self._is_in_engines = np.bincount(self._in_engines.step, minlength=many) > 0
        """In which steps any engine recorded its requests."""
        self._balance = balanced(self._in_engines, many) if self._is_in_engines.any() else None
        self._engine_steps = _engine_steps(seen, self._in_engines)
        self._step_of_engine_step = windows.places(self._engine_steps.starts)
        self._turns = self._trajectories.turns_of_each()
        self._tool_ns, self._tokens = _of_each(self._trajectories, requests)
        begun = np.concatenate([self._step_of_request, self._step_of_trajectory])
        self.has_any: list[bool] = (np.bincount(begun, minlength=many) > 0).tolist()
        """Whether a trajectory or a request began in each step."""
        self.having = [place for place in range(many) if place > 0 or self.has_any[0]]
        """Places of all steps, and of the time outside of them if anything began there."""

    @functools.cached_property
    def reaches_ns(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """When the first trajectory or request of each step began, and when the last one of them ended; of those that
        are over."""
        requests, of, counted = self._requests, self._trajectories.table, ~self._trajectories.are_validating
        step = np.concatenate([self._step_of_request, self._step_of_trajectory[counted]])
        starts = np.concatenate([requests.starts, of.starts[counted]])
        ends = np.concatenate([requests.ends, of.ends[counted]])
        is_over = ends != OPEN
        first, last = np.full(len(self._windows.numbers), LATEST_NS), np.full(len(self._windows.numbers), -LATEST_NS)
        np.minimum.at(first, step[is_over], starts[is_over])
        np.maximum.at(last, step[is_over], ends[is_over])
        has_any = first < LATEST_NS
        return np.where(has_any, first, 0), np.where(has_any, last, 0)

    def figures(self, groups: list[list[int]]) -> list[Rollout]:
        """Return the rollouts of the steps of each group together; no two groups share a step."""
        many = len(groups)
        group_of = np.full(len(self._windows.numbers), -1, np.intp)
        group_of[[step for steps in groups for step in steps]] = np.repeat(np.arange(many), [*map(len, groups)])
        chosen, group = in_order(group_of[self._step_of_request])
        requests, step = self._requests.part(chosen), self._step_of_request[chosen]
        is_open = requests.ends == OPEN
        is_later = (requests.ends > self._windows.windows[step, 1]) & (step > 0)
        begun, of_begun = in_order(group_of[self._step_of_trajectory])
        is_counted = ~self._trajectories.are_validating[begun]
        is_over = is_counted & self._trajectories.are_over[begun]
        over, of_over = begun[is_over], of_begun[is_over]

        def count(of: Places) -> list[int]:
            counts: list[int] = np.bincount(of, minlength=many).tolist()
            return counts

        more, missing = self._of_trajectories(over, of_over, many)
        found = _of_requests(requests.part(np.flatnonzero(~is_open)), group[~is_open], many)
        of_tails = self._tails_of(groups)
        columns = {
            "seconds": self._seconds(groups),
            "trajectories": count(of_begun[is_counted]),
            "trajectories_not_over": count(of_begun[is_counted & ~is_over]),
            "validating": count(of_begun[~is_counted]),
            "requests": count(group),
            "requests_not_over": count(group[is_open]),
            "requests_ended_later": count(group[is_later]),
            "requests_carried_over": self._carried_over(group_of, many),
            "distributions": [one | other for one, (other, _) in zip(more, found, strict=True)],
            "unknown": [missing | one | other for (_, one), (_, other) in zip(found, of_tails, strict=True)],
            "tail": [tail for tail, _ in of_tails],
            "balance": self._balances(groups),
            "prompts": self._prompts(requests, group, over, of_over, many),
            "tools": self._tools(group_of, many),
            "engine": self._engines(requests, group, group_of, many),
        }
        return [Rollout(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]

    def _seconds(self, groups: list[list[int]]) -> list[float | None]:
        first_ns, last_ns = self.reaches_ns
        steps, group = _members(groups, last_ns > first_ns)
        found = means((last_ns - first_ns)[steps] / 1e9, group, len(groups))
        return where_known(found.tolist(), np.isfinite(found))

    def _carried_over(self, group_of: Places, many: int) -> list[int]:
        """Return how many requests were in flight when the steps of each group began, added up."""
        begin_ns = self._windows.windows[:, 0]
        begun, ended = self._starts_ns.searchsorted(begin_ns), self._ends_ns.searchsorted(begin_ns, side="right")
        steps = np.flatnonzero(group_of[1:] >= 0) + 1
        listed: list[int] = sums((begun - ended)[steps], group_of[steps], many).tolist()
        return listed

    def _of_trajectories(
        self, over: Places, group: Places, many: int
    ) -> tuple[list[dict[str, Distribution]], dict[str, str]]:
        """Return the distributions of each group's trajectories, and why some are not known."""
        of = self._trajectories
        if not len(of):
            reason = "no trajectory was recorded"
            return [{}] * many, dict.fromkeys((TRAJECTORY_SECONDS, TRAJECTORY_TOKENS, TURNS, TOOL_SECONDS), reason)
        every = np.ones(len(over), np.bool_)
        columns = {TRAJECTORY_SECONDS: ((of.table.ends[over] - of.table.starts[over]) / 1e9, every)}
        unknown = {}
        if of.turn is None:
            unknown[TURNS] = "no turn of a trajectory was recorded"
        else:
            columns[TURNS] = self._turns[over].astype(np.float64), every
        if (self._tokens >= 0).any():
            columns[TRAJECTORY_TOKENS] = self._tokens[over].astype(np.float64), self._tokens[over] >= 0
        else:
            unknown[TRAJECTORY_TOKENS] = "no request of a trajectory says its tokens"
        if (of.calls.trajectory >= 0).any():
            columns[TOOL_SECONDS] = self._tool_ns[over] / 1e9, every
        else:
            unknown[TOOL_SECONDS] = "no call of a tool was recorded in a trajectory"
        return _by_name(columns, group, many), unknown

    @functools.cached_property
    def _tails(self) -> list[tuple[str, Tails]]:
        """The tails of all steps, of either kind."""
        many = len(self._windows.numbers)
        return [
            (of, tails(self._in_engines, many, of_all_engines=of_all))
            for of, of_all in (("last engine", False), ("all engines", True))
        ]

    def _tails_of(self, groups: list[list[int]]) -> list[tuple[RolloutTail | None, dict[str, str]]]:
        """Return the mean tail of the steps of each group, of those that have enough requests; the same kind in each of
        them."""
        many = len(groups)
        steps, group = _members(groups, self._is_in_engines)
        is_in_engines = np.bincount(group, minlength=many) > 0
        of_kinds = [
            (
                of,
                (np.bincount(group, ~found.are_known[steps], many) == 0).tolist(),
                means(found.seconds[steps], group, many).tolist(),
                means(found.rollout_seconds[steps], group, many).tolist(),
            )
            for of, found in self._tails
        ]
        few = f"a step has fewer requests than the {LEAST_REQUESTS} that it takes to have a slowest 5 %"
        listed: list[tuple[RolloutTail | None, dict[str, str]]] = []
        for place, is_there in enumerate(is_in_engines.tolist()):
            known = [
                RolloutTail(seconds=seconds[place], without_seconds=whole[place] - seconds[place], of=of)
                for of, are_known, seconds, whole in of_kinds
                if is_there and are_known[place]
            ]
            reason = few if is_there else "no engine recorded its requests"
            listed.append((known[0], {}) if known else (None, {"tail": reason}))
        return listed

    def _balances(self, groups: list[list[int]]) -> list[EngineBalance | None]:
        """Return how evenly the engines share the rollouts of each group."""
        if self._balance is None:
            return [None] * len(groups)
        many, engines = len(groups), self._in_engines.engines
        work, seconds = self._balance.work, self._balance.seconds
        steps, group = _members(groups, self._is_in_engines)
        first_done = np.where(work > 0, seconds, np.inf).min(axis=1)
        columns = (work.min(axis=1), work.max(axis=1), surplus_of(self._balance), first_done, seconds.max(axis=1))
        times_last = np.zeros((many, len(engines)), np.int64)
        np.add.at(times_last, (group, seconds.argmax(axis=1)[steps]), 1)
        rows = zip(
            (np.bincount(group, minlength=many) > 0).tolist(),
            means(work[steps].ravel(), np.repeat(group, len(engines)), many).tolist(),
            times_last.argmax(axis=1).tolist(),
            *(means(column[steps], group, many).tolist() for column in columns),
            strict=True,
        )
        return [
            EngineBalance(
                engines=len(engines),
                unit=self._balance.unit,
                least=least,
                mean=mean,
                most=fullest,
                most_over_mean=1 + surplus,
                first_done_seconds=first_seconds,
                last_done_seconds=last_seconds,
                last_engine=engines[last].name,
            )
            if is_there
            else None
            for is_there, mean, last, least, fullest, surplus, first_seconds, last_seconds in rows
        ]

    def shares(self, steps: list[int]) -> list[EngineShare]:
        """Return what each engine did in some steps."""
        chosen = [step for step in steps if self._is_in_engines[step]]
        if self._balance is None or not chosen:
            return []
        seconds = self._balance.seconds[chosen]
        last = np.bincount(seconds.argmax(axis=1), minlength=seconds.shape[1])
        rows = np.isin(self._in_engines.step, chosen)
        many = np.bincount(self._in_engines.engine[rows], minlength=seconds.shape[1])
        work = self._balance.work[chosen].sum(axis=0)
        is_own = np.isin(self._step_of_engine_step, steps) & (self._engine_steps.engine >= 0)
        own = self._engine_steps.part(np.flatnonzero(is_own))
        engines = self._in_engines.engines
        preempted = sums(own.preempted, own.engine, len(engines))
        usage = most(own.kv_usage, own.engine, len(engines))
        has_tokens = self._balance.unit == TOKENS
        return [
            EngineShare(
                engine=lane.name,
                requests=int(many[place]),
                tokens=int(work[place]) if has_tokens else None,
                seconds=float(seconds[:, place].mean()),
                times_last=int(last[place]),
                preempted=int(preempted[place]),
                most_kv_cache_share=usage[place],
            )
            for place, lane in enumerate(engines)
        ]

    def _prompts(
        self, requests: Asked, group: Places, over: Places, of_over: Places, many: int
    ) -> list[PromptGroups | None]:
        """Return each group's prompts: of its trajectories; where these do not say their prompts, of its requests."""
        of = self._trajectories
        says = of.prompts[over] != 0
        known = over[says]
        of_trajectories = _prompts(of.prompts[known], of.table.starts[known], of.table.ends[known], of_over[says], many)
        is_own = (requests.prompts != 0) & (requests.ends != OPEN)
        prompts, starts, ends = (column[is_own] for column in (requests.prompts, requests.starts, requests.ends))
        of_requests = _prompts(prompts, starts, ends, group[is_own], many)
        return [other if one is None else one for one, other in zip(of_trajectories, of_requests, strict=True)]

    def _tools(self, group_of: Places, many: int) -> list[list[ToolFigures]]:
        """Return the calls of each group's tools."""
        calls, tools = self._trajectories.calls, self._trajectories.tools
        is_trained = ~np.append(self._trajectories.are_validating, False)[calls.trajectory]
        cell_of = group_of[self._step_of_call] * len(tools) + calls.tool
        places, cell = in_order(np.where(is_trained & (group_of[self._step_of_call] >= 0), cell_of, -1))
        is_open = calls.ends[places] == OPEN
        over = places[~is_open]
        cells = many * len(tools)
        lengths = distributions((calls.ends[over] - calls.starts[over]) / 1e9, cell[~is_open], cells)
        kinds = (cell, cell[is_open], cell[calls.trajectory[places] < 0])
        counts, not_over, outside = (np.bincount(kind, minlength=cells).tolist() for kind in kinds)
        found: list[list[ToolFigures]] = [[] for _ in range(many)]
        for at in np.flatnonzero(counts).tolist():
            found[at // len(tools)].append(
                ToolFigures(
                    name=tools[at % len(tools)],
                    calls=counts[at],
                    not_over=not_over[at],
                    outside=outside[at],
                    seconds=lengths[at],
                )
            )
        return found

    def _engines(self, requests: Asked, group: Places, group_of: Places, many: int) -> list[EngineFigures | None]:
        """Return what the engines say of each group's steps and requests."""
        rows, of_row = in_order(group_of[self._step_of_engine_step])
        own = self._engine_steps.part(rows)
        says = (requests.cached_tokens >= 0) & (requests.prompt_tokens >= 0)
        is_known = np.bincount(np.concatenate([of_row, group[requests.engine_starts >= 0]]), minlength=many) > 0
        columns = (
            is_known.tolist(),
            np.bincount(group[says], minlength=many).tolist(),
            *(
                sums(column[says], group[says], many).tolist()
                for column in (requests.cached_tokens, requests.prompt_tokens)
            ),
            *(sums(column, of_row, many).tolist() for column in (own.preempted, own.drafted, own.accepted)),
            *(most(column, of_row, many) for column in (own.running, own.waiting, own.kv_usage)),
        )
        return [
            EngineFigures(
                preempted=preempted,
                cached_tokens=cached if saying else None,
                cached_share=cached / asked_for if asked_for else None,
                drafted_tokens=drafted,
                accepted_tokens=accepted,
                most_running=running,
                most_waiting=waiting,
                most_kv_cache_share=usage,
            )
            if known
            else None
            for known, saying, cached, asked_for, preempted, drafted, accepted, running, waiting, usage in zip(
                *columns, strict=True
            )
        ]


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
    own = requests.part(np.flatnonzero(requests.trajectory >= 0))
    tokens = np.zeros(len(of), np.int64)
    np.add.at(tokens, own.trajectory, np.maximum(own.tokens, 0))
    silent = np.ones(len(of), np.bool_)
    silent[own.trajectory] = False
    silent[own.trajectory[own.tokens < 0]] = True
    tokens[silent] = -1
    return tool_ns, tokens


def _members(groups: list[list[int]], counts: NDArray[np.bool_]) -> tuple[Places, Places]:
    """Return the steps of each group that count, those of the first group first, and the group of each."""
    steps = np.array([step for of_group in groups for step in of_group], np.intp)
    group = np.repeat(np.arange(len(groups)), [*map(len, groups)])
    is_counted = counts[steps]
    return steps[is_counted], group[is_counted]


# ---- values -----------------------------------------------------------------------------------------------------


_Column = tuple[NDArray[np.float64], NDArray[np.bool_]]
"""Some values, and which of them are known."""


def _by_name(columns: dict[str, _Column], group: Places, many: int) -> list[dict[str, Distribution]]:
    """Return for each group the distributions of what is known there."""
    found: list[dict[str, Distribution]] = [{} for _ in range(many)]
    for name, (values, is_known) in columns.items():
        for of_group, one in zip(found, distributions(values[is_known], group[is_known], many), strict=True):
            if one is not None:
                of_group[name] = one
    return found


def _of_requests(over: Asked, group: Places, many: int) -> list[tuple[dict[str, Distribution], dict[str, str]]]:
    """Return for each group the distributions of requests that are over, and why some are not known."""
    in_engine_ns = over.engine_ends - over.engine_starts
    decode_ns = np.where(over.first_token_ns >= 0, in_engine_ns - over.first_token_ns, -1)
    decodes = (over.tokens > 1) & (decode_ns > 0)
    columns = {
        REQUEST_SECONDS: ((over.ends - over.starts) / 1e9, np.ones(len(over.starts), np.bool_)),
        QUEUE_SECONDS: (over.queued_ns / 1e9, over.queued_ns >= 0),
        FIRST_TOKEN_SECONDS: (over.first_token_ns / 1e9, over.first_token_ns >= 0),
        TOKENS_PER_SECOND: ((over.tokens - 1) / np.where(decodes, decode_ns, 1) * 1e9, decodes),
        PROMPT_TOKENS: (over.prompt_tokens.astype(np.float64), over.prompt_tokens >= 0),
        TOKENS: (over.tokens.astype(np.float64), over.tokens >= 0),
    }
    found = _by_name(columns, group, many)
    # A request of one token has no speed.
    kinds = (np.ones(len(group), np.bool_), over.engine_starts >= 0, (over.tokens > 1) | (over.tokens < 0))
    counts = (np.bincount(group[kind], minlength=many).tolist() for kind in kinds)
    return [
        (of_group, _unknown(of_group, requests, in_engines, speeding) if requests else {})
        for of_group, requests, in_engines, speeding in zip(found, *counts, strict=True)
    ]


def _unknown(found: dict[str, Distribution], requests: int, in_engines: int, speeding: int) -> dict[str, str]:
    """Return why values of some requests are missing; nothing if none is.

    Args:
        found: Their distributions.
        requests: How many they are.
        in_engines: How many of them an engine recorded.
        speeding: How many have a speed, or may have one.
    """
    unknown = {}
    for name in (REQUEST_SECONDS, QUEUE_SECONDS, FIRST_TOKEN_SECONDS, TOKENS_PER_SECOND, PROMPT_TOKENS, TOKENS):
        wanted = speeding if name == TOKENS_PER_SECOND else requests
        known = found[name].count if name in found else 0
        if known >= wanted:
            continue
        if known:
            unknown[name] = f"{wanted - known:,} of {wanted:,} requests do not say"
        else:
            unknown[name] = "no engine said so" if in_engines else "no engine recorded its requests"
    return unknown


def _prompts(
    prompts: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64], group: Places, many: int
) -> list[PromptGroups | None]:
    """Return the prompts of each group's samples, those of the first group first; None without any."""
    order = ascending(prompts, group, many)
    prompts, starts, ends, group = (column[order] for column in (prompts, starts, ends, group))
    is_next = (prompts[1:] != prompts[:-1]) | (group[1:] != group[:-1])
    first = np.flatnonzero(np.append(len(order) > 0, is_next))
    of_prompt, sizes = group[first], np.diff(first, append=len(order))
    begun, first_end = np.minimum.reduceat(starts, first), np.minimum.reduceat(ends, first)
    last_end = np.maximum.reduceat(ends, first)
    seconds = distributions((last_end - begun) / 1e9, of_prompt, many)
    waiting = distributions((last_end - first_end) / 1e9, of_prompt, many)
    least, fullest = np.full(many, len(order)), np.zeros(many, np.intp)
    np.minimum.at(least, of_prompt, sizes)
    np.maximum.at(fullest, of_prompt, sizes)
    return [
        None
        if of_group is None or waits is None
        else PromptGroups(
            prompts=of_group.count, least_samples=few, most_samples=most_, seconds=of_group, waiting_seconds=waits
        )
        for of_group, waits, few, most_ in zip(seconds, waiting, least.tolist(), fullest.tolist(), strict=True)
    ]
