"""Python launches kernels no faster than the GPU runs them, so that the GPU waits between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.gpu_samples import gpu_samples
from rltrace.analysis.findings.run import PerStep, Run, rows_of
from rltrace.analysis.gpu_work import BACKWARD, FORWARD, WHOLE_BACKWARD
from rltrace.analysis.intervals import Intervals, holding, union
from rltrace.analysis.lanes import Lane
from rltrace.analysis.observations import Seen

NAME = "launch_bound"
BUSY = "gpu.utilisation_percent"
"""The share of the last period in which a kernel ran (nvml.h, nvmlUtilization_t)."""

AS_LONG = 0.9
"""Share of a forward's GPU time that its launch must take. A host that is faster by more than the 10 % by which equal
work differs on these hosts (docs/measurements/index.md) gets ahead of its GPU."""

SLIGHTLY_BEHIND = 0.5
"""Of a forward, by how much the GPU may still be behind its host at the end: with a host that is ahead by a tenth, the
lead is more than that after five micro-batches."""

SETTINGS = (
    Setting("PyTorch", 'torch.compile(model, mode="reduce-overhead"): CUDA graphs launch many kernels at once'),
    Setting("your program", "larger micro-batches: as many launches for more tokens"),
    Setting("your cluster", "faster processors, and as many as processes that compute"),
)


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


def judge(run: Run) -> list[Finding]:
    """Price the time in which no kernel runs in phases whose forwards take as long to launch as to run."""
    passes = {lane: made for lane in run.ranks if (made := _passes(run, lane)) is not None}
    if not passes:
        raise UnjudgeableError("no forward was timed both on a host and on its GPU")
    bound = {name: launches for name, launches in _by_phase(run, passes) if _is_bound(launches)}
    if not bound:
        return []
    busy = _busy(run, bound)
    idle = {name: share for name in bound if (share := _idle_seconds(run, name, busy)) is not None}
    where = sorted(bound, key=lambda name: -float(idle[name].mean() if idle else bound[name].gpu_seconds))
    facts = [
        f"{name}: a forward takes {as_text(launches.host_seconds)} to launch and {as_text(launches.gpu_seconds)} to "
        f"run, and the GPU is done {as_text(launches.behind_seconds)} after the host"
        + (f"; kernels run for {busy[name]:.0%} of the phase (NVML)" if name in busy else "")
        for name, launches in ((name, bound[name]) for name in where)
    ]
    title = "The GPUs run kernels as fast as Python launches them"
    price = np.sum(list(idle.values()), axis=0) if idle else None
    if price is not None:
        title += f", and none for {as_text(price.mean())} of a step"
    return [
        run.finding(
            NAME,
            f"{title}, most in {where[0]}",
            facts,
            per_step=price,
            bound=None if price is not None else _whole_seconds(run, where),
            less_because="without its gaps a kernel runs as long as before; a collective that waits counts as running",
            basis="modelled",
            figures={f"busy_share_{name}": share for name, share in busy.items()},
            phases=where,
            settings=SETTINGS,
        )
    ]


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
        for name, rows in run.phases[lane].items():
            chosen = in_step & (holding(rows, made.host[:, 0]) >= 0)
            host, gpu = made.host[chosen], made.gpu[chosen]
            columns[name].append(np.column_stack([host @ [-1, 1], gpu @ [-1, 1], gpu[:, 1] - host[:, 1]]))
    for name, parts in columns.items():
        if len(rows := np.concatenate(parts)):
            host_seconds, gpu_seconds = (rows[:, :2].mean(axis=0) / 1e9).tolist()
            yield name, Launches(host_seconds, gpu_seconds, float(np.median(rows[:, 2])) / 1e9)


def _busy(run: Run, phases: Mapping[str, Launches]) -> dict[str, float]:
    """Return the share of each phase in which kernels ran, in the mean of the samples; of phases that have any."""
    found = defaultdict[str, list[float]](list)
    for lane, samples in gpu_samples(run, BUSY).items():
        for name in phases:
            rows = run.phases[lane].get(name)
            if rows is None:
                continue
            found[name] += samples.values[holding(rows, samples.times_ns) >= 0].tolist()
    return {name: float(np.mean(shares)) / 100 for name, shares in found.items() if shares}


def _idle_seconds(run: Run, name: str, busy: Mapping[str, float]) -> PerStep | None:
    if name not in busy:
        return None
    seconds = np.mean(list(run.phase_seconds(name).values()), axis=0)
    return np.asarray(seconds * (1 - busy[name]))


def _whole_seconds(run: Run, phases: list[str]) -> float:
    return sum(float(np.mean(list(run.phase_seconds(name).values()))) for name in phases)
