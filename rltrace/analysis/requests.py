"""Where the time of requests went, from the agent loop that waits to the engine that generates and back.

An agent loop's request has an id of its own. It is joined with the server's by Ray's call for tokens, which both sides
name, or by its task where there is no Ray between them; and the server's with the engine's by the id, which the engine
may have put something behind. Everything is done on columns: a run has a million requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.distributions import in_order, parts, sums
from rltrace.analysis.observations import Observations, once
from rltrace.analysis.span_tables import Numbers, Places, SpanTable, around, at, last_begun, passed
from rltrace.analysis.steps import StepWindows
from rltrace.events import AGENT_REQUEST, RAY_CALL, RAY_SUBMIT, REQUEST, SERVER_REQUEST
from rltrace.read.columns import OPEN

AGENT_LOOP, TO_SERVER, SERVER, BEFORE_ENGINE = "agent_loop", "to_server", "server", "server_before_engine"
WAITING, RUNNING, ENGINE = "engine_waiting", "engine_running", "engine"
AFTER_ENGINE, FROM_SERVER = "server_after_engine", "from_server"
IN_ENGINE = (WAITING, RUNNING, ENGINE)
STAGES = (AGENT_LOOP, TO_SERVER, SERVER, BEFORE_ENGINE, *IN_ENGINE, AFTER_ENGINE, FROM_SERVER)
"""In the order in which a request passes them; a Recording has some of them."""

NOT_OVER, NOT_SENT, SENT_AGAIN = "not over", "not sent to a server", "sent several times"
NOT_SERVED, NOT_IN_ENGINE = "not recorded by a server", "not recorded by an engine"


class RequestStage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of the requests."""

    mean_seconds: float
    """Mean over the requests; the stages' means add up to that of the whole requests."""
    median_seconds: float
    """Median over the requests."""
    p95_seconds: float
    """95 % of the requests took no longer."""
    share: float
    """Share of the requests' time, 0 to 1."""


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """Requests and the stages of their way, which do not overlap; of the steady steps, or of the run where there are
    none."""

    name: str
    """Name of the outermost span: `agent_loop.request`; `server.request` for those that no agent loop of the Recording
    sent; `rollout.request` for those that no server of the Recording took."""
    count: int
    """Requests that were joined from end to end; the figures are about these."""
    mean_seconds: float | None
    """Mean length of a request; None if none was joined."""
    median_seconds: float | None
    """Median likewise."""
    p95_seconds: float | None
    """95 % of them took no longer; None likewise."""
    stages: dict[str, RequestStage]
    """By name, in the order in which a request passes them: `agent_loop` before the call that sends it (verl asks its
    load balancer for a server first); `to_server` until Ray's call begins there; `server_before_engine` until it is in
    the engine's queue; `engine_waiting` until the first step that computes it, and `engine_running`, or `engine` if
    nobody recorded when that was; `server_after_engine` until Ray's call ends; `from_server` until the agent loop goes
    on. Without any engine's requests in the Recording, the time between the calls is `server`."""
    unjoined: dict[str, int]
    """How many more requests there were, by the reason why they could not be joined, such as `not over` or `not
    recorded by an engine`."""


class StepRequests(Requests, frozen=True, kw_only=True):
    """The requests that began in one step."""

    step: int | None
    """Number of the step; None before the first step and between two."""


class Way:
    """Requests whose outermost spans have one name: when each passed from stage to stage, one row per request."""

    def __init__(self, name: str, stages: Sequence[str], edges: Sequence[Numbers], reason: NDArray[np.intp]) -> None:
        self.name = name
        self.stages = stages
        self.edges = edges
        """The beginning of every stage, and the end of the last one; they count where the request was joined."""
        self.reason = reason
        """The place in `REASONS` of why it was not; -1 if it was."""

    def places(self, windows: StepWindows) -> Places:
        """Return the window that each request began in; the first one if it began between two."""
        starts_ns = self.edges[0]
        return windows.places(starts_ns)

    def figures(self, group: Places, many: int) -> list[Requests]:
        """Return what the requests of each group took.

        Args:
            group: The group of each request; -1 for one that is in none.
            many: How many groups there are.
        """
        rows, of_row = in_order(group)
        is_joined = self.reason[rows] < 0
        joined, of_joined = rows[is_joined], of_row[is_joined]
        edges = [edge[joined] for edge in self.edges]
        whole_ns = edges[-1] - edges[0]
        sums_ns = sums(whole_ns, of_joined, many)
        lengths_ns = (whole_ns, *(end - start for start, end in pairwise(edges)))
        stages = [_stages(of_stage_ns, of_joined, sums_ns) for of_stage_ns in lengths_ns]
        unjoined = np.zeros((many, len(REASONS)), np.int64)
        np.add.at(unjoined, (of_row[~is_joined], self.reason[rows[~is_joined]]), 1)
        counts = np.bincount(of_joined, minlength=many).tolist()
        found = []
        for count, whole, *of_stages, without in zip(counts, *stages, unjoined.tolist(), strict=True):
            named = zip(self.stages, of_stages, strict=True)
            one = Requests(
                name=self.name,
                count=count,
                mean_seconds=whole.mean_seconds if whole else None,
                median_seconds=whole.median_seconds if whole else None,
                p95_seconds=whole.p95_seconds if whole else None,
                stages={name: stage for name, stage in named if stage is not None},
                unjoined={reason: times for reason, times in zip(REASONS, without, strict=True) if times},
            )
            found.append(one)
        return found


def _stages(lengths_ns: Numbers, group: Places, whole_ns: Numbers) -> list[RequestStage | None]:
    """Return the figures of a stage in each group; None where no request was joined.

    Args:
        lengths_ns: How long each request was in it, (N,).
        group: The group of each, those of the first group first, (N,).
        whole_ns: How long the requests of each group took, added up.
    """
    ordered = parts(lengths_ns, group, len(whole_ns))
    sums_ns = sums(lengths_ns, group, len(whole_ns))[ordered.groups].astype(np.float64)
    of_all_ns = whole_ns[ordered.groups].astype(np.float64)
    shares = np.where(of_all_ns != 0, sums_ns / np.where(of_all_ns != 0, of_all_ns, 1), 0)
    median, p95 = (_between(*ordered.percentile(share)) / 1e9 for share in (0.5, 0.95))
    found: list[RequestStage | None] = [None] * len(whole_ns)
    columns = (ordered.groups, sums_ns / ordered.counts / 1e9, median, p95, shares)
    for place, mean, middle, late, share in zip(*(column.tolist() for column in columns), strict=True):
        found[place] = RequestStage(mean_seconds=mean, median_seconds=middle, p95_seconds=late, share=share)
    return found


def _between(low: Numbers, high: Numbers, away: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what is so far from one number to the other, from 0 to 1, rounded as `np.percentile` does."""
    return np.where(away < 0.5, low + (high - low) * away, high - (high - low) * (1 - away))


def steady_requests(found: Sequence[Way], windows: StepWindows) -> list[Requests]:
    """Return the requests of the steady steps, or of the run if these have none: one item per outermost span."""
    steady = [np.where(np.isin(way.places(windows), windows.steady), 0, -1) for way in found]
    if not any((group == 0).any() for group in steady):
        steady = [np.zeros(len(way.reason), np.intp) for way in found]
    return [
        figures
        for way, group in zip(found, steady, strict=True)
        if (group == 0).any()
        for figures in way.figures(group, 1)
    ]


def requests_by_step(found: Sequence[Way], windows: StepWindows) -> list[StepRequests]:
    """Return the requests of each step: by step, then by outermost span."""
    rows = []
    for way in found:
        places = way.places(windows)
        figures = way.figures(places, len(windows.numbers))
        for place in np.flatnonzero(np.bincount(places)).tolist():
            rows.append((place, StepRequests(step=windows.numbers[place], **msgspec.structs.asdict(figures[place]))))
    return [row for _, row in sorted(rows, key=lambda item: item[0])]


# ---- joining ----------------------------------------------------------------------------------------------------


def ways(seen: Observations) -> list[Way]:
    """Return the requests of a Recording, each once, by the name of their outermost span."""
    if not any(name in process.passed for process in seen.processes for name in _REQUESTS):
        return []
    return joined(seen).ways()


_REQUESTS = (AGENT_REQUEST, SERVER_REQUEST, REQUEST)


class Joined:
    """Which span of the way leads to which."""

    def __init__(self, seen: Observations) -> None:
        self.agents, self.servers, self.engines = (passed(seen, name) for name in _REQUESTS)
        self.submits, self.calls = passed(seen, RAY_SUBMIT), passed(seen, RAY_CALL)
        self.queued_ns = self.engines.column("queued_ns")
        self.engine_of = engines_of(self.servers, self.engines)
        """All of these by the server's request: the engine's, Ray's call and where it was submitted, the agent's."""
        self.call_of = around(self.servers, self.calls)
        sent = np.zeros(len(self.calls), np.int64), np.zeros(len(self.submits), np.int64)  # no clock joins two hosts
        submit_of_call = last_begun(self.calls.column("keys"), sent[0], self.submits.column("keys"), sent[1])
        self.submit_of = at(submit_of_call, self.call_of)
        self.agent_of_submit = around(self.submits, self.agents)
        self.is_by_ray = at(self.agent_of_submit, self.submit_of) >= 0
        by_task = around(self.servers, self.agents)
        self.agent_of = np.where(self.is_by_ray, at(self.agent_of_submit, self.submit_of), by_task)
        claimed = np.flatnonzero(self.agent_of >= 0)
        self.server_of = np.full(len(self.agents), -1)
        """By the agent's request: the server's; the last one, if it was sent several times."""
        self.server_of[self.agent_of[claimed]] = claimed
        is_served = np.zeros(len(self.engines) + 1, np.bool_)
        is_served[self.engine_of] = True  # the last one is that of no engine
        self.only_engines = np.flatnonzero(~is_served[:-1])
        """The engines' requests that no server took."""

    def ways(self) -> list[Way]:
        """Return the requests that agent loops sent, those that servers took besides, and those of engines alone."""
        found = [self._of_agents(), self._of_servers(), self._of_engines()]
        return [way for way in found if len(way.reason)]

    def _of_agents(self) -> Way:
        agents, server = self.agents, self.server_of
        times_sent = np.bincount(self.agent_of[self.agent_of >= 0], minlength=len(agents))
        is_sent = np.bincount(self.agent_of_submit[self.agent_of_submit >= 0], minlength=len(agents)) > 0
        by_ray, call = at(self.is_by_ray, server) > 0, at(self.call_of, server)
        sent = np.where(by_ray, at(self.submits.starts, at(self.submit_of, server)), at(self.servers.starts, server))
        arrived = np.where(by_ray, at(self.calls.starts, call), at(self.servers.starts, server))
        left = np.where(by_ray, at(self.calls.ends, call), at(self.servers.ends, server))
        stages, edges, reasons = self._inside(at(self.engine_of, server), arrived, left)
        return Way(
            AGENT_REQUEST,
            (AGENT_LOOP, TO_SERVER, *stages, FROM_SERVER),
            [agents.starts, sent, *edges, agents.ends],
            _first_of(
                {
                    NOT_OVER: agents.ends == OPEN,
                    SENT_AGAIN: times_sent > 1,
                    NOT_SENT: (server < 0) & ~is_sent,
                    NOT_SERVED: server < 0,
                },
                reasons,
            ),
        )

    def _of_servers(self) -> Way:
        alone = np.flatnonzero(self.agent_of < 0)
        starts, ends = self.servers.starts[alone], self.servers.ends[alone]
        stages, edges, reasons = self._inside(self.engine_of[alone], starts, ends)
        return Way(SERVER_REQUEST, stages, edges, _first_of({}, reasons))

    def _of_engines(self) -> Way:
        stages, edges = self._in_engine(self.only_engines)
        return Way(REQUEST, stages, edges, _first_of({}, {NOT_OVER: edges[-1] == OPEN}))

    def _inside(
        self, engine: Places, arrived: Numbers, left: Numbers
    ) -> tuple[list[str], list[Numbers], dict[str, NDArray[np.bool_]]]:
        """Return the stages from the arrival at a server until it answers, their edges, and why some are not known."""
        is_open = left == OPEN
        if not len(self.engines):
            return [SERVER], [arrived, left], {NOT_OVER: is_open}
        stages, edges = self._in_engine(engine)
        reasons = {NOT_OVER: is_open, NOT_IN_ENGINE: engine < 0}
        return [BEFORE_ENGINE, *stages, AFTER_ENGINE], [arrived, *edges, left], reasons

    def _in_engine(self, engine: Places) -> tuple[list[str], list[Numbers]]:
        """Return the stages in an engine and their edges: two if all of these requests say how long they waited."""
        starts, ends = at(self.engines.starts, engine), at(self.engines.ends, engine)
        queued_ns = at(self.queued_ns, engine)
        if not (queued_ns[engine >= 0] >= 0).all():
            return [ENGINE], [starts, ends]
        return [WAITING, RUNNING], [starts, np.minimum(starts + queued_ns, ends), ends]


joined = once(Joined)

REASONS = (NOT_OVER, SENT_AGAIN, NOT_SENT, NOT_SERVED, NOT_IN_ENGINE)


def _first_of(*reasons: Mapping[str, NDArray[np.bool_]]) -> NDArray[np.intp]:
    """Return for each request the place of the first reason that holds for it; -1 if none does."""
    holding = [(reason, where) for group in reasons for reason, where in group.items()]
    first = np.full(len(holding[0][1]), -1)
    for reason, where in reversed(holding):
        first[where] = REASONS.index(reason)
    return first


def engines_of(servers: SpanTable, engines: SpanTable) -> Places:
    """Return the engine's request of each of the server's: the last one of its id that began before it ended."""
    found = np.full(len(servers), -1)
    for ids in (engines.column("stems"), engines.column("keys")):
        of_id = last_begun(servers.column("keys"), servers.until, ids, engines.starts)
        is_during = (of_id >= 0) & (at(engines.until, of_id) >= servers.starts)
        found = np.where(is_during, of_id, found)
    return found
