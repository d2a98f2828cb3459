"""The requests of each engine in each step, as columns, and how evenly the engines share them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.distributions import parts
from rltrace.analysis.intervals import LATEST_NS, Intervals, holding
from rltrace.analysis.lanes import Lane, order
from rltrace.analysis.observations import Observations
from rltrace.analysis.requests import joined
from rltrace.events import REQUEST


class EngineRequests(NamedTuple):
    """Requests that began in a step and ended, one row each."""

    engines: list[Lane]
    engine: NDArray[np.intp]
    """The place of its engine in `engines`."""
    step: NDArray[np.intp]
    """The place of its step; the rows are in the order of these."""
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    queued_ns: NDArray[np.int64]
    """How long it waited in the engine's queue; -1 if nobody said so."""
    tokens: NDArray[np.int64]
    """How many tokens the engine made; -1 if nobody said so."""


def engine_requests(seen: Observations, steps: Intervals) -> EngineRequests:
    """Return the requests of all engines that began in some steps, which are in the order of their times."""
    serving = [process for process in seen.processes if REQUEST in process.passed]
    engines = sorted({process.lane for process in serving}, key=order)
    way = joined(seen)
    table = way.engines
    places = np.array([engines.index(process.lane) for process in serving], np.intp)
    engine = np.repeat(places, [len(process.passed[REQUEST]) for process in serving])
    step = holding(steps, table.starts)
    chosen = np.flatnonzero((step >= 0) & (table.ends >= table.starts))
    chosen = chosen[np.argsort(step[chosen], kind="stable")]
    columns = (engine, step, table.starts, table.ends, way.queued_ns, table.column("tokens"))
    return EngineRequests(engines, *(column.take(chosen) for column in columns))


class Balance(NamedTuple):
    """Work and time of each engine in each step, of shape (steps, engines)."""

    work: NDArray[np.float64]
    unit: str
    seconds: NDArray[np.float64]
    """The time from the first request of all engines to the last end in this engine; 0 if it had none."""


def balanced(requests: EngineRequests, steps: int) -> Balance:
    """Return the work and the time of each engine in each step. The unit is tokens if each request says how many."""
    shape = (steps, len(requests.engines))
    at = requests.step * shape[1] + requests.engine
    has_tokens = bool((requests.tokens >= 0).all())
    work = np.bincount(at, requests.tokens if has_tokens else None, shape[0] * shape[1]).astype(np.float64)
    first, last = np.full(steps, LATEST_NS), np.zeros(shape[0] * shape[1], np.int64)
    np.minimum.at(first, requests.step, requests.starts)
    np.maximum.at(last, at, requests.ends)
    seconds = np.maximum(last.reshape(shape) - first[:, None], 0) / 1e9
    return Balance(work.reshape(shape), "tokens" if has_tokens else "requests", seconds)


def surplus_of(balance: Balance) -> NDArray[np.float64]:
    """Return for each step by what share of the mean the busiest engine has more work."""
    return np.asarray(balance.work.max(axis=1) / np.maximum(balance.work.mean(axis=1), 1) - 1)


TAIL = 0.05
"""The share of requests that end last. Latencies are quoted as p95 and p99; vLLM's benchmark prints p99 by default
(0.26, vllm/benchmarks/serve.py), which an engine with fewer than 100 requests in a step does not have."""

LEAST_REQUESTS = 20
"""So many requests it takes to have one in the last 5 %."""


class Tails(NamedTuple):
    """The end of each step's rollout, from which on only the slowest 5 % of its requests run, (steps,)."""

    requests: NDArray[np.intp]
    """Of how many requests these are the slowest."""
    seconds: NDArray[np.float64]
    rollout_seconds: NDArray[np.float64]
    """From the first request of all engines to the end of the last one."""
    engine: NDArray[np.intp]
    """The place of the last request's engine."""
    tokens: NDArray[np.int64]
    """The last request's tokens; -1 if nobody said how many."""

    @property
    def are_known(self) -> NDArray[np.bool_]:
        """Whether each step has enough requests to have a slowest 5 %; else nothing else of it counts."""
        return np.asarray(self.requests >= LEAST_REQUESTS)


def tails(requests: EngineRequests, steps: int, *, of_all_engines: bool = False) -> Tails:
    """Return when only the slowest 5 % of each step's requests run.

    Args:
        requests: Those of all steps.
        steps: How many steps there are.
        of_all_engines: Compare those of all engines; else those of the engine that ends last, so that an engine that is
            behind the others is no tail.
    """
    found = Tails(
        requests=np.zeros(steps, np.intp),
        seconds=np.zeros(steps),
        rollout_seconds=np.zeros(steps),
        engine=np.zeros(steps, np.intp),
        tokens=np.zeros(steps, np.int64),
    )
    if not len(requests.step):
        return found
    having, begins = np.unique(requests.step, return_index=True)
    last = _last_ended(requests, begins)
    found.engine[having], found.tokens[having] = requests.engine[last], requests.tokens[last]
    is_compared = of_all_engines | (requests.engine == found.engine[requests.step])
    ordered = parts(requests.ends[is_compared], requests.step[is_compared], steps)
    end_ns = ordered.values[ordered.ends - 1]
    slow_ns = ordered.values[ordered.begins + ((ordered.counts - 1) * (1 - TAIL)).astype(np.intp)]
    found.requests[having] = ordered.counts
    found.seconds[having] = (end_ns - slow_ns) / 1e9
    found.rollout_seconds[having] = (end_ns - np.minimum.reduceat(requests.starts, begins)) / 1e9
    return found


def _last_ended(requests: EngineRequests, begins: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the request of each step that ended last, by where the steps' requests begin; of several the first."""
    latest_ns = np.maximum.reduceat(requests.ends, begins)
    many = np.diff(begins, append=len(requests.ends))
    are_last = np.flatnonzero(requests.ends == np.repeat(latest_ns, many))
    return are_last[np.searchsorted(are_last, begins)]
