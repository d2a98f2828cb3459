"""What the sampler says of each rank's GPU in the steady steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.findings.run import PerStep, Run
from rltrace.analysis.intervals import holding
from rltrace.analysis.lanes import Lane
from rltrace.events import SAMPLER, subjects


class GpuSamples(NamedTuple):
    """One counter of one GPU, sample by sample."""

    times_ns: NDArray[np.int64]
    values: NDArray[np.float64]
    step: NDArray[np.intp]
    """The place of the steady step that each was taken in."""

    def in_steps(self, values: NDArray[np.float64], steps: int) -> PerStep:
        """Return the mean of some values, one for each sample, in each step; of all of them where a step has none."""
        many = np.bincount(self.step, minlength=steps)
        sums = np.bincount(self.step, values, steps)
        return np.where(many > 0, sums / np.maximum(many, 1), values.mean())


def gpu_samples(run: Run, counter: str) -> dict[Lane, GpuSamples]:
    """Return a counter of each rank's GPU; a rank whose GPU has no sample in a steady step is left out."""
    of_device = {
        of[0]: samples
        for process in run.seen.processes
        if process.process.role == SAMPLER
        for name, samples in process.sampled.items()
        for sampled, of in [subjects(name)]
        if sampled == counter and len(of) == 1
    }
    found: dict[Lane, GpuSamples] = {}
    for lane in run.ranks:
        samples = of_device.get(lane.device or "")
        if samples is None:
            continue
        times_ns, values = np.array(samples.times_ns, np.int64), np.array(samples.values, np.float64)
        step = run.step_of(times_ns)
        inside = step >= 0
        if inside.any():
            found[lane] = GpuSamples(times_ns[inside], values[inside], step[inside])
    return found


def values_in(run: Run, samples: Mapping[Lane, GpuSamples], phase: str) -> NDArray[np.float64]:
    """Return what all ranks' samples of a counter say within a phase; nothing where nobody has sampled it."""
    parts = [
        of_rank.values[holding(run.phases[lane][phase], of_rank.times_ns) >= 0]
        for lane, of_rank in samples.items()
        if phase in run.phases[lane]
    ]
    return np.concatenate(parts) if parts else np.zeros(0)
