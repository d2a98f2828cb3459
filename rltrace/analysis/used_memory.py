"""The used memory of a GPU over time: one line of all who looked, whose points say where they come from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.lanes import Lane
from rltrace.analysis.observations import Observations
from rltrace.analysis.seen.samples import NO_POINTS, Points, Samples, points
from rltrace.events import subject

SAMPLED_USED, SAMPLED_RESERVED = "gpu.used_bytes", "gpu.reserved_bytes"


class UsedMemory(NamedTuple):
    """What was used of a GPU, with what its driver reserves; each point holds until the next. Shape (N,) points."""

    times_ns: NDArray[np.int64]
    bytes: NDArray[np.float64]
    is_sampled: NDArray[np.bool_]
    """Whether the host's sampler saw it; else a process of the run looked, where its memory turned."""

    def at(self, times_ns: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return what was used at some moments; NaN before the first point."""
        behind = np.searchsorted(self.times_ns, times_ns, side="right")
        return np.concatenate([[np.nan], self.bytes])[behind]

    def looked(self) -> UsedMemory:
        """Return the points of the run's own processes."""
        looked = ~self.is_sampled
        return UsedMemory(self.times_ns[looked], self.bytes[looked], self.is_sampled[looked])


def used_memory(seen: Observations, lane: Lane) -> UsedMemory:
    """Return the line of a lane's GPU; it is empty where nobody looked."""
    looked = [points(process.used) for process in seen.on(lane)]
    sampled = [sampled_points(process.sampled, str(lane.device)) for process in seen.samplers]
    times_ns, size_bytes = (np.concatenate(columns) for columns in zip(NO_POINTS, *looked, *sampled, strict=True))
    is_sampled = np.arange(len(times_ns)) >= len(times_ns) - sum(len(one.times_ns) for one in sampled)
    order = np.lexsort((is_sampled, size_bytes, times_ns))
    return UsedMemory(times_ns[order], size_bytes[order], is_sampled[order])


def sampled_points(sampled: dict[str, Samples], device: str) -> Points:
    """Return the totals that a host's sampler read of a GPU.

    Args:
        sampled: Its counters.
        device: The GPU's uuid.
    """
    used = sampled.get(subject(SAMPLED_USED, device))
    if used is None:
        return NO_POINTS
    reserved = sampled.get(subject(SAMPLED_RESERVED, device), Samples())
    reserved_bytes = reserved.values[0] if len(reserved.values) else 0.0  # the driver's own stays as it is
    found = points(used)
    return found._replace(values=found.values + reserved_bytes)
