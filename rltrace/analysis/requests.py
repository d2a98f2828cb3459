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

from rltrace.analysis.observations import Observations
from rltrace.analysis.steps import StepWindows
from rltrace.events import AGENT_REQUEST, RAY_CALL, RAY_SUBMIT, REQUEST, SERVER_REQUEST
from rltrace.read.columns import OPEN

Numbers = NDArray[np.int64]
Places = NDArray[np.intp]
"""Rows of a table, in the order of another one's; -1 where there is none."""

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
        at = np.maximum(np.searchsorted(windows.windows[:, 0], starts_ns, side="right") - 1, 0)
        return np.where(starts_ns < windows.windows[at, 1], at, 0)

    def part(self, chosen: NDArray[np.bool_]) -> Way:
        """Return the chosen requests."""
        return Way(self.name, self.stages, [edge[chosen] for edge in self.edges], self.reason[chosen])

    def figures(self) -> Requests:
        """Return what they took."""
        joined = self.reason < 0
        edges = [edge[joined] for edge in self.edges]
        whole = _spread(edges[-1] - edges[0]) if joined.any() else (None, None, None)
        all_ns = float((edges[-1] - edges[0]).sum())
        lengths = {name: end - start for name, (start, end) in zip(self.stages, pairwise(edges), strict=True)}
        unjoined = np.bincount(self.reason[~joined], minlength=len(REASONS)).tolist()
        return Requests(
            name=self.name,
            count=int(joined.sum()),
            mean_seconds=whole[0],
            median_seconds=whole[1],
            p95_seconds=whole[2],
            stages={name: _stage(length, all_ns) for name, length in lengths.items()} if joined.any() else {},
            unjoined={reason: many for reason, many in zip(REASONS, unjoined, strict=True) if many},
        )


def _spread(lengths_ns: Numbers) -> tuple[float, float, float]:
    """Return mean, median and 95th percentile in seconds."""
    median_ns, p95_ns = np.percentile(lengths_ns, (50, 95))
    return float(lengths_ns.mean()) / 1e9, float(median_ns) / 1e9, float(p95_ns) / 1e9


def _stage(lengths_ns: Numbers, all_ns: float) -> RequestStage:
    mean, median, p95 = _spread(lengths_ns)
    share = float(lengths_ns.sum()) / all_ns if all_ns else 0.0
    return RequestStage(mean_seconds=mean, median_seconds=median, p95_seconds=p95, share=share)


def steady_requests(found: Sequence[Way], windows: StepWindows) -> list[Requests]:
    """Return the requests of the steady steps, or of the run if these have none: one item per outermost span."""
    steady = [way.part(np.isin(way.places(windows), windows.steady)) for way in found]
    return [way.figures() for way in (steady if any(len(way.reason) for way in steady) else found) if len(way.reason)]


def requests_by_step(found: Sequence[Way], windows: StepWindows) -> list[StepRequests]:
    """Return the requests of each step: by step, then by outermost span."""
    rows = []
    for way in found:
        places = way.places(windows)
        for place in map(int, np.unique(places)):
            figures = msgspec.structs.asdict(way.part(places == place).figures())
            rows.append((place, StepRequests(step=windows.numbers[place], **figures)))
    return [row for _, row in sorted(rows, key=lambda item: item[0])]


# ---- joining ----------------------------------------------------------------------------------------------------


class _Table:
    """The spans of one name of all processes."""

    def __init__(self, seen: Observations, name: str) -> None:
        self._kept = [process.passed[name] for process in seen.processes if name in process.passed]
        self.starts, self.ends = self.column("starts"), self.column("ends")
        self.places, self.keys = self.column("places"), self.column("keys")
        self.until = np.where(self.ends == OPEN, np.iinfo(np.int64).max, self.ends)

    def column(self, name: str) -> Numbers:
        return np.concatenate([np.empty(0, np.int64), *(np.array(getattr(k, name), np.int64) for k in self._kept)])

    def __len__(self) -> int:
        return len(self.starts)


def ways(seen: Observations) -> list[Way]:
    """Return the requests of a Recording, each once, by the name of their outermost span."""
    if not any(name in process.passed for process in seen.processes for name in _REQUESTS):
        return []
    return _Joined(seen).ways()


_REQUESTS = (AGENT_REQUEST, SERVER_REQUEST, REQUEST)


class _Joined:
    """Which span of the way leads to which."""

    def __init__(self, seen: Observations) -> None:
        self.agents, self.servers, self.engines = (_Table(seen, name) for name in _REQUESTS)
        self.submits, self.calls = _Table(seen, RAY_SUBMIT), _Table(seen, RAY_CALL)
        self.queued_ns = self.engines.column("queued_ns")
        self.engine_of = _engines_of(self.servers, self.engines)
        """All of these by the server's request: the engine's, Ray's call and where it was submitted, the agent's."""
        self.call_of = _around(self.servers, self.calls)
        sent = np.zeros(len(self.calls), np.int64), np.zeros(len(self.submits), np.int64)  # no clock joins two hosts
        self.submit_of = _at(_last_begun(self.calls.keys, sent[0], self.submits.keys, sent[1]), self.call_of)
        self.agent_of_submit = _around(self.submits, self.agents)
        self.is_by_ray = _at(self.agent_of_submit, self.submit_of) >= 0
        by_task = _around(self.servers, self.agents)
        self.agent_of = np.where(self.is_by_ray, _at(self.agent_of_submit, self.submit_of), by_task)

    def ways(self) -> list[Way]:
        """Return the requests that agent loops sent, those that servers took besides, and those of engines alone."""
        found = [self._of_agents(), self._of_servers(), self._of_engines()]
        return [way for way in found if len(way.reason)]

    def _of_agents(self) -> Way:
        agents, claimed = self.agents, np.flatnonzero(self.agent_of >= 0)
        times_sent = np.bincount(self.agent_of[claimed], minlength=len(agents))
        server = np.full(len(agents), -1)
        server[self.agent_of[claimed]] = claimed
        is_sent = np.bincount(self.agent_of_submit[self.agent_of_submit >= 0], minlength=len(agents)) > 0
        by_ray, call = _at(self.is_by_ray, server) > 0, _at(self.call_of, server)
        sent = np.where(by_ray, _at(self.submits.starts, _at(self.submit_of, server)), _at(self.servers.starts, server))
        arrived = np.where(by_ray, _at(self.calls.starts, call), _at(self.servers.starts, server))
        left = np.where(by_ray, _at(self.calls.ends, call), _at(self.servers.ends, server))
        stages, edges, reasons = self._inside(_at(self.engine_of, server), arrived, left)
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
        alone = np.setdiff1d(np.arange(len(self.engines)), self.engine_of)
        stages, edges = self._in_engine(alone)
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
        starts, ends = _at(self.engines.starts, engine), _at(self.engines.ends, engine)
        queued_ns = _at(self.queued_ns, engine)
        if not (queued_ns[engine >= 0] >= 0).all():
            return [ENGINE], [starts, ends]
        return [WAITING, RUNNING], [starts, np.minimum(starts + queued_ns, ends), ends]


REASONS = (NOT_OVER, SENT_AGAIN, NOT_SENT, NOT_SERVED, NOT_IN_ENGINE)


def _first_of(*reasons: Mapping[str, NDArray[np.bool_]]) -> NDArray[np.intp]:
    """Return for each request the place of the first reason that holds for it; -1 if none does."""
    holding = [(reason, where) for group in reasons for reason, where in group.items()]
    first = np.full(len(holding[0][1]), -1)
    for reason, where in reversed(holding):
        first[where] = REASONS.index(reason)
    return first


def _engines_of(servers: _Table, engines: _Table) -> Places:
    """Return the engine's request of each of the server's: the last one of its id that began before it ended."""
    found = np.full(len(servers), -1)
    for ids in (engines.column("stems"), engines.keys):
        of_id = _last_begun(servers.keys, servers.until, ids, engines.starts)
        is_during = (of_id >= 0) & (_at(engines.until, of_id) >= servers.starts)
        found = np.where(is_during, of_id, found)
    return found


def _around(inner: _Table, outer: _Table) -> Places:
    """Return the span of the same thread and task that is around each one."""
    found = _last_begun(inner.places, inner.starts, outer.places, outer.starts)
    return np.where(_at(outer.until, found) >= inner.until, found, -1)


def _at(column: NDArray[np.generic], places: Places) -> Numbers:
    """Return the values at these places; -1 where there is none."""
    return np.append(column.astype(np.int64), -1)[places]


def _last_begun(keys: Numbers, at_ns: Numbers, of_keys: Numbers, of_starts: Numbers) -> Places:
    """Return for each key and instant the last span of that key that had begun by then; -1 if there is none."""
    spans = len(of_keys)
    both, times_ns = np.concatenate([of_keys, keys]), np.concatenate([of_starts, at_ns])
    order = np.lexsort((np.arange(len(both)) >= spans, times_ns, both))
    is_span = order < spans
    before = np.maximum.accumulate(np.where(is_span, np.arange(len(order)), -1))
    last = np.where(before >= 0, order[before], -1)
    found = np.full(len(keys), -1)
    asked = order[~is_span]
    found[asked - spans] = np.where((last[~is_span] >= 0) & (both[last[~is_span]] == both[asked]), last[~is_span], -1)
    return found
