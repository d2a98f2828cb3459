"""The requests of each engine in each step, as columns, and how evenly the engines share them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.intervals import Intervals, holding
from rltrace.analysis.lanes import Lane, order
from rltrace.analysis.observations import Observations
from rltrace.analysis.seen.spans import Passed
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

    def by_step(self, steps: int) -> Iterator[EngineRequests]:
        """Yield those that began in each step, in order; none for a step without any."""
        edges = np.searchsorted(self.step, np.arange(steps + 1))
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            yield EngineRequests(self.engines, *(column[begin:end] for column in self[1:]))


def engine_requests(seen: Observations, steps: Intervals) -> EngineRequests:
    """Return the requests of all engines that began in some steps, which are in the order of their times."""
    serving = [process for process in seen.processes if REQUEST in process.passed]
    engines = sorted({process.lane for process in serving}, key=order)
    columns = [_columns(process.passed[REQUEST], engines.index(process.lane)) for process in serving]
    rows = np.concatenate([np.empty((0, 5), np.int64), *columns])
    step = holding(steps, rows[:, 1])
    chosen = np.flatnonzero((step >= 0) & (rows[:, 2] >= rows[:, 1]))
    chosen = chosen[np.argsort(step[chosen], kind="stable")]
    engine, starts, ends, queued_ns, tokens = rows[chosen].T
    return EngineRequests(engines, engine, step[chosen], starts, ends, queued_ns, tokens)


def _columns(kept: Passed, engine: int) -> NDArray[np.int64]:
    columns = [np.array(column, np.int64) for column in (kept.starts, kept.ends, kept.queued_ns, kept.tokens)]
    return np.column_stack([np.full(len(kept.starts), engine), *columns])


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
    first, last = np.full(steps, np.iinfo(np.int64).max), np.zeros(shape[0] * shape[1], np.int64)
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


class Tail(NamedTuple):
    """The end of a step's rollout, from which on only the slowest 5 % of its requests run."""

    seconds: float
    rollout_seconds: float
    """From the first request of all engines to the end of the last one."""
    requests: int
    """Of how many requests these are the slowest."""
    engine: Lane
    """The engine of the last request."""
    tokens: int
    """The last request's tokens; -1 if nobody said how many."""


def tail_of(requests: EngineRequests, *, of_all_engines: bool = False) -> Tail | None:
    """Return when only the slowest 5 % of a step's requests run.

    Args:
        requests: Those of one step; there is at least one.
        of_all_engines: Compare those of all engines; else those of the engine that ends last, so that an engine that is
            behind the others is no tail.

    Returns:
        None if that are too few to have a slowest 5 %.
    """
    last = int(requests.ends.argmax())
    ends = requests.ends if of_all_engines else requests.ends[requests.engine == requests.engine[last]]
    if len(ends) < LEAST_REQUESTS:
        return None
    end_ns = int(ends.max())
    return Tail(
        (end_ns - int(np.sort(ends)[int((len(ends) - 1) * (1 - TAIL))])) / 1e9,
        (end_ns - int(requests.starts.min())) / 1e9,
        len(ends),
        requests.engines[requests.engine[last]],
        int(requests.tokens[last]),
    )
