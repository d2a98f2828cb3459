"""How many requests ran and waited while a rollout went on, and how full the engines' KV caches were."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.asked import asked
from rltrace.analysis.observations import Observations
from rltrace.read.columns import OPEN

SLICES = 20
"""So many parts of a rollout, all of one length."""

Decimals = NDArray[np.float64]


class LoadSlice(msgspec.Struct, frozen=True, kw_only=True):
    """One twentieth of a rollout."""

    seconds: float
    """When it began, counted from the first request of the rollout."""
    running: float
    """Requests that were computed, all engines together: a mean over the slice. Those of other steps count too. Where
    no engine said how long its requests waited, those that waited are among them."""
    waiting: float | None
    """Requests in the queues of all engines likewise; None where no engine said so."""
    kv_cache_share: float | None
    """Share of the KV cache that was taken, 0 to 1: a mean over the steps of all engines that ended in the slice; None
    if none did, or if they did not say so."""
    most_kv_cache_share: float | None
    """The most of these likewise."""


class EngineLoad:
    """The load of all engines of a run, at any time."""

    def __init__(self, seen: Observations) -> None:
        requests = asked(seen)
        is_in_engine = requests.engine_starts >= 0
        starts = np.where(is_in_engine, requests.engine_starts, requests.starts)
        ends = np.where(is_in_engine, requests.engine_ends, requests.ends)
        ends = np.where(ends == OPEN, seen.end_ns, ends)
        self._base_ns = seen.start_ns
        waits = requests.queued_ns >= 0
        self._says_waiting = bool(waits.any())
        begun = np.minimum(starts + np.where(waits, requests.queued_ns, 0), ends)
        self._passed = [_Passed(instants_ns - self._base_ns) for instants_ns in (starts, begun, ends)]
        """How many requests have been queued, have begun and have ended."""
        kept = [process.engine_steps for process in seen.processes if process.engine_steps]
        at_ns = np.concatenate([np.empty(0, np.int64), *(np.array(steps.ends, np.int64) for steps in kept)])
        usage = np.concatenate([np.empty(0), *(np.array(steps.kv_usage) for steps in kept)])
        known = np.flatnonzero((at_ns != OPEN) & (usage >= 0))
        order = known[np.argsort(at_ns[known], kind="stable")]
        # Decimals, as the edges of slices are: each search would make decimals of all of them again.
        self._usage_ns, self._usage = (at_ns[order] - self._base_ns).astype(np.float64), usage[order]

    def slices(self, starts_ns: NDArray[np.int64], ends_ns: NDArray[np.int64]) -> list[list[LoadSlice]]:
        """Return the load in equal parts of some times; no part of a time that is empty."""
        there = np.flatnonzero(ends_ns > starts_ns)
        edges_ns = np.linspace(starts_ns[there] - self._base_ns, ends_ns[there] - self._base_ns, SLICES + 1, axis=1)
        queued, begun, ended = (passed.until(edges_ns) for passed in self._passed)
        lengths_ns = np.diff(edges_ns)
        waiting, running = (
            (np.diff(requests) / lengths_ns).astype(np.float64).tolist() for requests in (queued - begun, begun - ended)
        )
        seconds = ((edges_ns[:, :-1] - edges_ns[:, :1]) / 1e9).tolist()
        places = np.searchsorted(self._usage_ns, edges_ns, side="right").tolist()
        found: list[list[LoadSlice]] = [[] for _ in starts_ns]
        for place, *columns, edges in zip(there.tolist(), seconds, running, waiting, places, strict=True):
            found[place] = [
                LoadSlice(
                    seconds=at,
                    running=runs,
                    waiting=waits if self._says_waiting else None,
                    kv_cache_share=float(self._usage[first:behind].mean()) if behind > first else None,
                    most_kv_cache_share=float(self._usage[first:behind].max()) if behind > first else None,
                )
                for at, runs, waits, first, behind in zip(*columns, edges[:-1], edges[1:], strict=True)
            ]
        return found


class _Passed:
    """How many instants have passed, as a function of time."""

    def __init__(self, instants_ns: NDArray[np.int64]) -> None:
        sorted_ns = np.sort(instants_ns, kind="stable")  # each engine's are in order already
        # A million requests of an hour each add up to more digits than 53 bits have, and of a month to more than 64.
        sums = np.cumsum(sorted_ns, dtype=np.longdouble)
        self._sorted_ns = sorted_ns.astype(np.float64)
        self._sums_ns = np.concatenate([np.zeros(1, np.longdouble), sums])

    def until(self, at_ns: Decimals) -> NDArray[np.longdouble]:
        """Return the integral of that number until some times."""
        passed = np.searchsorted(self._sorted_ns, at_ns)
        return np.asarray(passed * at_ns.astype(np.longdouble) - self._sums_ns[passed])
