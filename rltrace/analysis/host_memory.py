"""The host's memory beside the devices': what each process has resident and pinned, and which owners it belongs to."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from rltrace.analysis.observations import Observations
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.samples import Samples, points
from rltrace.events import UNATTRIBUTED, pinned_of

NOT_RECORDED = "pinned memory was not measured in this Recording"
"""Why pinned memory is unknown if the process did not say: the Recording is of an earlier release."""


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One process's part of its host's memory."""

    process_key: str
    """The process's folder in the Recording."""
    process: str
    """What the process is called."""
    rank: int | None
    """Its rank; None if it has none."""
    host: str
    """Its host."""
    peak_resident_bytes: int | None
    """Most memory that the whole process had resident; shared pages count in each process that maps them. None if the
    process never said."""
    peak_at_seconds: float | None
    """When that was, counted from the beginning of the Recording."""
    peak_owner_bytes: dict[str, int]
    """By owner, the most that lay in host memory, pinned or not: an offloaded ref, the copy of a level-1 sleep."""
    peak_pinned_bytes: int | None
    """The most that all owners together had page-locked at once; a lower bound if `pinned_unknown` names an owner, None
    if it is unknown."""
    peak_owner_pinned_bytes: dict[str, int | None]
    """By owner, the most that was page-locked; None if unknown. `unattributed` is what torch's pinned allocator holds
    besides: tensors of no owner, rounding to powers of two, and what it keeps for reuse. It is negative if somebody
    else pinned an owner's memory."""
    pinned_unknown: dict[str, str]
    """By owner whose pinned bytes are unknown, the reason."""
    is_device: bool
    """Whether the device is the CPU: `memory` has the same bytes, so do not add the two."""


def host_memory(seen: Observations) -> list[HostMemory]:
    """Return every process that said what it has in host memory."""
    return [
        _host_memory(process, seen)
        for process in seen.processes
        if process.resident.values or process.on_host or process.pinned
    ]


def _host_memory(process: Seen, seen: Observations) -> HostMemory:
    peak = _peak(process.resident)
    device = process.lane.device or ""
    is_device = device.startswith("cpu")
    pinned = _most(process.pinned)
    unknown = {} if is_device else _unknown(process, has_gpu=device.startswith("GPU"))
    return HostMemory(
        process_key=process.process.key,
        process=process.process.name,
        rank=process.process.rank,
        host=process.process.host,
        peak_resident_bytes=None if peak is None else int(process.resident.values[peak]),
        peak_at_seconds=None if peak is None else (process.resident.times_ns[peak] - seen.start_ns) / 1e9,
        peak_owner_bytes=_most(process.on_host),
        peak_pinned_bytes=_most_together(process.pinned),
        peak_owner_pinned_bytes=dict.fromkeys(process.on_host) | dict.fromkeys(unknown) | pinned,
        pinned_unknown=unknown,
        is_device=is_device,
    )


def _unknown(process: Seen, *, has_gpu: bool) -> dict[str, str]:
    """Return why the pinned bytes of each owner in the host's memory are unknown, if they are; unattributed ones
    included.

    Without a GPU nothing is pinned: then only what the process itself called unknown is unknown.
    """
    silent = [owner for owner in (*process.on_host, UNATTRIBUTED) if owner not in process.pinned]
    told = process.process.unavailable
    reasons = {owner: told.get(pinned_of(owner), NOT_RECORDED if has_gpu else None) for owner in silent}
    return {owner: reason for owner, reason in reasons.items() if reason is not None}


def _most_together(pinned: Mapping[str, Samples]) -> int | None:
    """Return the largest sum of what all owners said last.

    Unattributed bytes are said at phase boundaries only: in between, a copy that torch had kept and an engine has taken
    would count twice.
    """
    telling = [points(pinned[UNATTRIBUTED])] if UNATTRIBUTED in pinned else [*map(points, pinned.values())]
    moments_ns = np.concatenate([np.empty(0, np.int64), *(one.times_ns for one in telling)])
    sums = sum((points(samples).at(moments_ns) for samples in pinned.values()), np.zeros(len(moments_ns)))
    return int(sums.max()) if len(moments_ns) else None


def _most(rows: Mapping[str, Samples]) -> dict[str, int]:
    """Return the most of each row."""
    return {owner: int(np.max(samples.values)) for owner, samples in rows.items()}


def _peak(samples: Samples) -> int | None:
    return int(np.argmax(samples.values)) if samples.values else None
