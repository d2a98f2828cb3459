"""The host's memory, beside the devices': what each process has resident, and which owners' bytes lie there."""

from __future__ import annotations

import msgspec

from rltrace.analysis.observations import Observations, Samples, Seen


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
    is_device: bool
    """The device is the CPU: this is the device's own memory, and its ledger has these bytes already."""


def host_memory(seen: Observations) -> list[HostMemory]:
    """Every process that said what it has in host memory."""
    return [_host_memory(process, seen) for process in seen.processes if process.resident.values or process.on_host]


def _host_memory(process: Seen, seen: Observations) -> HostMemory:
    peak = _peak(process.resident)
    device = process.lane.device or ""
    return HostMemory(
        process_key=process.process.key,
        process=process.process.name,
        rank=process.process.rank,
        host=process.process.host,
        peak_resident_bytes=None if peak is None else int(process.resident.values[peak]),
        peak_at_seconds=None if peak is None else (process.resident.times_ns[peak] - seen.start_ns) / 1e9,
        peak_owner_bytes={owner: int(max(samples.values)) for owner, samples in process.on_host.items()},
        is_device=device.startswith("cpu"),
    )


def _peak(samples: Samples) -> int | None:
    values = samples.values
    return max(range(len(values)), key=values.__getitem__) if values else None
