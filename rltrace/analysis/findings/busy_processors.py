"""All processors of a host are busy, so whoever needs one waits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run
from rltrace.analysis.observations import Seen
from rltrace.events import SAMPLER

NAME = "busy_processors"
CPU = "host.cpu_percent"

SATURATED = 95.0
"""Per cent of all processors that are in use between two samples, of which there is one a second. A second is long
beside a scheduler's slices, so at 95 % threads have queued in it (Gregg, Systems Performance, ch. 6)."""

LEAST_SHARE = 0.5
"""Share of the samples that must be above it, so that the median is."""

SETTINGS = (
    Setting("your program", "OMP_NUM_THREADS, torch.set_num_threads: as many threads in all as processors"),
    Setting("your cluster", "more processors per GPU, or fewer workers beside the trainer"),
)


def judge(run: Run) -> list[Finding]:
    """Name the hosts whose processors are busy for most of a step; what that costs cannot be told."""
    samplers = [process for process in run.seen.processes if process.process.role == SAMPLER and CPU in process.sampled]
    if not samplers:
        raise UnjudgeableError("no host's processors were sampled")
    return [found for sampler in samplers for found in _of_host(run, sampler)]


def _of_host(run: Run, sampler: Seen) -> Iterator[Finding]:
    samples = sampler.sampled[CPU]
    values = np.array(samples.values)[run.step_of(np.array(samples.times_ns, np.int64)) >= 0]
    share = float((values >= SATURATED).mean()) if len(values) else 0.0
    if share >= LEAST_SHARE:
        yield run.finding(
            NAME,
            f"All processors of {sampler.process.host} are in use for {share:.0%} of the steps",
            [f"{len(values)} samples in steps: {values.mean():.0f} % in the mean, {values.min():.0f} % at least"],
            bound=share * float(run.step_seconds.mean()),
            less_because="what computes needs a processor anyway: lost is the time in the queue, which nobody counts",
            basis="modelled",
            figures={"saturated_share": share},
            settings=SETTINGS,
        )
