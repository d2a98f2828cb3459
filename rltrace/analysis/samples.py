"""What each host's sampler saw of processors, memory, processes and GPUs, and what it could not see and why."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from rltrace.analysis.observations import Observations
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.samples import Samples
from rltrace.events import subjects


class Sampled(msgspec.Struct, frozen=True):
    """One counter of a sampler."""

    mean: float
    """Mean over the samples."""
    least: float
    """Smallest sample."""
    most: float
    """Largest sample."""


class HostSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was sampled on one host."""

    host: str
    """Name of the host."""
    samples: int
    """How many times it was sampled."""
    sampler_cpu_share: float | None
    """Share of one processor that the sampler itself used, 0 to 1; None with fewer than two samples."""
    counters: dict[str, Sampled]
    """Counters of the host, such as `host.cpu_percent`; the end of the name is the unit."""
    processes: dict[str, dict[str, Sampled]]
    """Counters of each process, by the process's name: `process.uss_bytes` is memory that only it has,
    `process.pss_bytes` adds its part of shared memory."""
    gpus: dict[str, dict[str, Sampled]]
    """Counters of each GPU by uuid, such as `gpu.power_watts`; `gpu.process_bytes rank 0 engine` is one process's
    part."""
    unavailable: dict[str, str]
    """What could not be sampled, with the reason; such a counter is missing and never zero."""


def host_samples(seen: Observations) -> list[HostSamples]:
    """Return the samples of each sampler that the run had."""
    names = {process.process.key: process.process.name for process in seen.processes}
    return [_host(process, names) for process in seen.samplers]


def _host(sampler: Seen, names: dict[str, str]) -> HostSamples:
    counters: dict[str, Sampled] = {}
    processes: dict[str, dict[str, Sampled]] = {}
    gpus: dict[str, dict[str, Sampled]] = {}
    for full, samples in sorted(sampler.sampled.items()):
        name, of = subjects(full)
        figures = _figures(samples)
        if not of:
            counters[name] = figures
        elif name.startswith("gpu."):
            uuid, *process = of
            label = " ".join([name, *(names.get(key, key) for key in process)])
            gpus.setdefault(uuid, {})[label] = figures
        else:
            processes.setdefault(names.get(of[0], of[0]), {})[name] = figures
    counters.pop(_CPU, None)
    return HostSamples(
        host=sampler.process.host,
        samples=max((len(samples.values) for samples in sampler.sampled.values()), default=0),
        sampler_cpu_share=_slope(sampler.sampled.get(_CPU)),
        counters=counters,
        processes=processes,
        gpus=gpus,
        unavailable=sampler.process.unavailable,
    )


_CPU = "sampler.cpu_seconds"


def _figures(samples: Samples) -> Sampled:
    values = np.array(samples.values)
    of: Callable[[Callable[..., float]], float] = lambda function: float(function(values))  # noqa: E731
    return Sampled(of(np.mean), of(np.min), of(np.max))


def _slope(samples: Samples | None) -> float | None:
    """Return the growth of a total per second, from its first sample to its last."""
    if samples is None or len(samples.values) < 2:
        return None
    seconds = (samples.times_ns[-1] - samples.times_ns[0]) / 1e9
    return (samples.values[-1] - samples.values[0]) / seconds if seconds > 0 else None
