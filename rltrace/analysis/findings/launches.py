"""Phases in which Python launches kernels no faster than the GPU runs them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.findings.run import PerStep, Run, rows_of
from rltrace.analysis.gpu_work import BACKWARD, FORWARD, WHOLE_BACKWARD
from rltrace.analysis.intervals import Intervals, holding, union
from rltrace.analysis.lanes import Lane
from rltrace.analysis.observations import once
from rltrace.analysis.seen.process import Seen

AS_LONG = 0.9
"""Share of a forward's GPU time that its launch must take. A host that is faster by more than the 10 % by which equal
work differs on these hosts (docs/measurements/index.md) gets ahead of its GPU."""

SLIGHTLY_BEHIND = 0.5
"""Of a forward, by how much the GPU may still be behind its host at the end: with a host that is ahead by a tenth, the
lead is more than that after five micro-batches."""


class Passes(NamedTuple):
    """Forwards of one rank, each as its host launched it and as its GPU ran it; times in nanoseconds."""

    host: Intervals
    gpu: Intervals


class Launches(NamedTuple):
    """How long the forwards of a phase take to launch and to run, all ranks together."""

    host_seconds: float
    gpu_seconds: float
    behind_seconds: float
    """By how much the GPU is done later than the host: the median forward."""


@once
def launch_bound_phases(run: Run) -> dict[str, Launches] | None:
    """Return the phases whose forwards take as long to launch as to run; None if no forward was timed both ways."""
    passes = {lane: made for lane in run.ranks if (made := _passes(run, lane)) is not None}
    if not passes:
        return None
    return {name: launches for name, launches in _by_phase(run, passes) if _is_bound(launches)}


def forwards_in(run: Run, phase: str) -> float:
    """Return how many forwards a rank's GPU runs in a phase of a step; 0 if none was timed."""
    return max((row.count for row in run.summary.gpu_work if row.work == FORWARD and row.phase == phase), default=0)


def mean_seconds(run: Run, phase: str) -> PerStep:
    """Return how long a phase takes in each step, in the mean of the ranks."""
    return np.asarray(np.mean(list(run.phase_seconds(phase).values()), axis=0))


def _is_bound(launches: Launches) -> bool:
    is_as_long = launches.host_seconds >= AS_LONG * launches.gpu_seconds
    return is_as_long and launches.behind_seconds <= SLIGHTLY_BEHIND * launches.gpu_seconds


def _passes(run: Run, lane: Lane) -> Passes | None:
    """Return the forwards of a rank's models; None if its host and its GPU do not have as many of them."""
    found = []
    for process in run.members[lane]:
        if FORWARD not in process.device_spans:
            continue
        spans = process.device_spans[FORWARD]
        of_part = np.array(spans.of_part, bool)
        gpu = spans.rows(run.seen.end_ns)[~of_part]
        host = _outside_backwards(run, process)
        if len(gpu) and len(gpu) == len(host):
            found.append(Passes(host, gpu[np.argsort(gpu[:, 0])]))
    return Passes(*(np.concatenate(rows) for rows in zip(*found, strict=True))) if found else None


def _outside_backwards(run: Run, process: Seen) -> Intervals:
    """Return the forwards that a host launched, without those that are repeated for a backward."""
    forwards = union(rows_of([process], FORWARD, run))
    backwards = union(*(rows_of([process], name, run) for name in (BACKWARD, WHOLE_BACKWARD)))
    return forwards[holding(backwards, forwards[:, 0]) < 0]


def _by_phase(run: Run, passes: Mapping[Lane, Passes]) -> Iterator[tuple[str, Launches]]:
    columns = defaultdict[str, list[NDArray[np.int64]]](list)
    for lane, made in passes.items():
        in_step = run.step_of(made.host[:, 0]) >= 0
        host, gpu = made.host[in_step], made.gpu[in_step]
        lengths = np.column_stack([host[:, 1] - host[:, 0], gpu[:, 1] - gpu[:, 0], gpu[:, 1] - host[:, 1]])
        for name, rows in run.phases[lane].items():
            columns[name].append(lengths[holding(rows, host[:, 0]) >= 0])
    for name, parts in columns.items():
        if len(rows := np.concatenate(parts)):
            host_seconds, gpu_seconds = (rows[:, :2].mean(axis=0) / 1e9).tolist()
            yield name, Launches(host_seconds, gpu_seconds, float(np.median(rows[:, 2])) / 1e9)
