"""What an earlier Recording measured, and a plan may take over: all that does not follow from shapes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from rltrace.analysis.memory import DeviceMemory
from rltrace.analysis.plan.cards import Card
from rltrace.analysis.summary import Summary

NOT_FROM_SHAPES = ("cuda.context", "nccl", "rollout.graphs", "rollout.activations")
"""Owners whose bytes a plan takes from a Recording, if there is one."""
TAKEN_WITHIN = 32 << 20
"""How far they may be off then: two Recordings of one configuration differ by at most 26 MiB in each of these."""


class Measured(msgspec.Struct, frozen=True):
    """Figures of a Recording."""

    path: str
    card: Card
    bytes: dict[str, int]
    """The most of each owner in `NOT_FROM_SHAPES`; what nobody measured is not there."""
    kv_cache_bytes: int
    sync_bytes_per_second: float | None = None
    wake_bytes_per_second: float | None = None


def measured(path: str, devices: Sequence[DeviceMemory], name: str = "") -> Measured | None:
    """Return what a Recording measured on its fullest GPU; None if it had none whose size is known."""
    gpus = [one for one in devices if one.device and not one.device.startswith("cpu") and "free" in one.at_peak_bytes]
    if not gpus:
        return None
    gpu = max(gpus, key=lambda one: one.peak_bytes)
    reserved = gpu.at_peak_bytes.get("driver.reserved", 0)
    card = Card(name or (gpu.device or ""), gpu.peak_bytes + gpu.at_peak_bytes["free"], reserved, bool(reserved))
    peaks = {owner: peak.bytes for owner, peak in gpu.owner_peaks.items()}
    peaks |= {"rollout.activations": gpu.at_peak_bytes.get("rollout.activations", 0)}
    kept = {owner: peaks[owner] for owner in NOT_FROM_SHAPES if peaks.get(owner) and owner not in gpu.unknown}
    return Measured(path, card, kept, peaks.get("rollout.kv_cache", 0))


def of_summary(path: str, summary: Summary) -> Measured | None:
    """Return what the figures of a Recording say, the rates of its syncs and wake-ups included."""
    found = measured(path, summary.memory)
    if found is None:
        return None
    synced = [sync.gigabytes_per_second for sync in summary.weight_sync if sync.step and sync.gigabytes_per_second]
    woken = [one.gigabytes_per_second for one in summary.sleeps if "wake" in one.name and one.gigabytes_per_second]
    return msgspec.structs.replace(
        found,
        sync_bytes_per_second=median(synced) * 1e9 if synced else None,
        wake_bytes_per_second=median(woken) * 1e9 if woken else None,
    )
