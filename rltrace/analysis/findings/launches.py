"""Phases in which Python launches kernels no faster than the GPU runs them.

A host that is faster is held up all the same once it is about a thousand launches ahead, because the driver's queue is
full. From then on its launches take as long as the kernels of a GPU that never waits. Two things tell it from a slow
host: kernels run all the time, and the first forward of a phase, which finds an empty queue, is launched quickly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.findings.gpu_samples import gpu_samples, values_in
from rltrace.analysis.findings.run import PerStep, Run, rows_of
from rltrace.analysis.gpu_work import BACKWARD, FORWARD, WHOLE_BACKWARD
from rltrace.analysis.intervals import Intervals, holding, union
from rltrace.analysis.lanes import Lane
from rltrace.analysis.observations import once
from rltrace.analysis.seen.process import Seen

AS_LONG = 0.9
"""Share of a forward's GPU time that its launch must take. A host that is faster by more than the 10 % by which equal
work differs on these hosts (docs/measurements/index.md) gets ahead of its GPU."""

FIRST_AS_LONG = 0.7
"""The same share of a phase's first forward. Where launches bound the phases of an 8B run it is 0.83 to 0.95."""

BUSY = "gpu.utilisation_percent"
"""The share of the last period in which a kernel ran (nvml.h, nvmlUtilization_t)."""

ALWAYS_BUSY_PERCENT = 99
"""Of a phase's samples, the median where the GPU waits for no launch; in phases of that 8B run it is 96 to 98."""

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
    first_share: float
    """Of the phase's first forwards, how much of their GPU time their launch takes."""
    behind_seconds: float
    """By how much the GPU is done later than the host: the median forward."""


@once
def launch_bound_phases(run: Run) -> dict[str, Launches] | None:
    """Return the phases whose forwards take as long to launch as to run; None if no forward was timed both ways."""
    passes = {lane: made for lane in run.ranks if (made := _passes(run, lane)) is not None}
    if not passes:
        return None
    busy = gpu_samples(run, BUSY)
    return {
        name: launches
        for name, launches in _by_phase(run, passes)
        if _is_bound(launches) and not _is_always_busy(values_in(run, busy, name))
    }


def forwards_in(run: Run, phase: str) -> float:
    """Return how many forwards a rank's GPU runs in a phase of a step; 0 if none was timed."""
    return max((row.count for row in run.summary.gpu_work if row.work == FORWARD and row.phase == phase), default=0)


def mean_seconds(run: Run, phase: str) -> PerStep:
    """Return how long a phase takes in each step, in the mean of the ranks."""
    return np.asarray(np.mean(list(run.phase_seconds(phase).values()), axis=0))


def _is_bound(launches: Launches) -> bool:
    is_as_long = launches.host_seconds >= AS_LONG * launches.gpu_seconds and launches.first_share >= FIRST_AS_LONG
    return is_as_long and launches.behind_seconds <= SLIGHTLY_BEHIND * launches.gpu_seconds


def _is_always_busy(percent: NDArray[np.float64]) -> bool:
    """Return whether kernels run in a phase all the time; not where nobody has sampled it."""
    return len(percent) > 0 and float(np.median(percent)) >= ALWAYS_BUSY_PERCENT


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
            phase = holding(rows, host[:, 0])
            is_first = np.diff(phase, prepend=-1) != 0
            columns[name].append(np.column_stack([lengths, is_first])[phase >= 0])
    for name, parts in columns.items():
        if len(rows := np.concatenate(parts)):
            host_seconds, gpu_seconds = (rows[:, :2].mean(axis=0) / 1e9).tolist()
            first_host, first_gpu = rows[rows[:, 3] == 1, :2].sum(axis=0).tolist()
            first_share = first_host / first_gpu if first_gpu else 0.0
            yield name, Launches(host_seconds, gpu_seconds, first_share, float(np.median(rows[:, 2])) / 1e9)
