"""The host's memory, beside the devices': what each process has resident and pinned, and which owners' that is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import msgspec

from rltrace.analysis.observations import Observations, Samples, Seen
from rltrace.events import UNATTRIBUTED, pinned_of

NOT_RECORDED = "nobody told what is pinned when this was recorded"
"""Why that is unknown, where the process said nothing: a Recording of an earlier release."""


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One process's part of its host's memory."""

    process_key: str
    process: str
    rank: int | None
    host: str
    peak_resident_bytes: int | None
    """None where the process never said; shared pages count in each process that maps them."""
    peak_at_seconds: float | None
    peak_owner_bytes: dict[str, int]
    """By owner, the most of it that lay in host memory (pinned or not): an offloaded ref, a level-1 sleep's copy."""
    peak_pinned_bytes: int | None
    """The most that all of them together had page-locked at once; None where nobody told, at least that where the
    owners in `pinned_unknown` are to be added."""
    peak_owner_pinned_bytes: dict[str, int | None]
    """By owner, the most of it that was page-locked; None is unknown. `unattributed` is what torch's allocator of such
    memory had besides: tensors that nobody names, what it rounds up by, and what it keeps for the next who asks."""
    pinned_unknown: dict[str, str]
    """By owner whose pinned bytes are unknown the reason; empty where there is no GPU for which they could be."""
    is_device: bool
    """The device is the CPU: this is the device's own memory, and its ledger has these bytes already."""


def host_memory(seen: Observations) -> list[HostMemory]:
    """Every process that said what it has in host memory."""
    return [
        _host_memory(process, seen)
        for process in seen.processes
        if process.resident.values or process.on_host or process.pinned
    ]


def _host_memory(process: Seen, seen: Observations) -> HostMemory:
    peak = _peak(process.resident)
    device = process.lane.device or ""
    is_device = device.startswith("cpu")
    pinned = {owner: int(max(samples.values)) for owner, samples in process.pinned.items()}
    unknown = {} if is_device else _unknown(process, has_gpu=device.startswith("GPU"))
    return HostMemory(
        process_key=process.process.key,
        process=process.process.name,
        rank=process.process.rank,
        host=process.process.host,
        peak_resident_bytes=None if peak is None else int(process.resident.values[peak]),
        peak_at_seconds=None if peak is None else (process.resident.times_ns[peak] - seen.start_ns) / 1e9,
        peak_owner_bytes={owner: int(max(samples.values)) for owner, samples in process.on_host.items()},
        peak_pinned_bytes=_most_together(process.pinned),
        peak_owner_pinned_bytes=dict.fromkeys(process.on_host) | dict.fromkeys(unknown) | pinned,
        pinned_unknown=unknown,
        is_device=is_device,
    )


def _unknown(process: Seen, *, has_gpu: bool) -> dict[str, str]:
    """By owner with bytes in the host's memory whose pinned ones nobody told, why; of what has no owner too.

    Without a GPU nothing is pinned: then only what the process itself called unknown is.
    """
    silent = [owner for owner in (*process.on_host, UNATTRIBUTED) if owner not in process.pinned]
    told = process.process.unavailable
    reasons = {owner: told.get(pinned_of(owner), NOT_RECORDED if has_gpu else None) for owner in silent}
    return {owner: reason for owner, reason in reasons.items() if reason is not None}


def _most_together(pinned: Mapping[str, Samples]) -> int | None:
    """The largest sum of what all owners said last.

    What has no owner is said last at an edge: between two of them a copy that torch had kept, and an engine has taken,
    would count twice.
    """
    whole = pinned.get(UNATTRIBUTED)
    moments = {at for samples in pinned.values() for at in samples.times_ns} if whole is None else whole.times_ns
    sums = (sum(_said_by(moment, samples) for samples in pinned.values()) for moment in moments)
    return int(max(sums)) if moments else None


def _said_by(moment_ns: int, samples: Samples) -> float:
    """What a row said last; nothing before it has said anything."""
    index = bisect_right(samples.times_ns, moment_ns)
    return samples.values[index - 1] if index else 0.0


def _peak(samples: Samples) -> int | None:
    values = samples.values
    return max(range(len(values)), key=values.__getitem__) if values else None
