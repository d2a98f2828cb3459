"""Ways to sync the weights, as data: what a run uses, and what `compare_sync` compares it with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DISK = "disk"


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way."""

    transport: str
    """Name of the transport, as in `device.py`."""
    exchange: Literal["all_gather", "per_parameter", "relay"] = "all_gather"
    """Whether every rank gathers from all others, by bucket or by parameter, or rank 0 collects and relays."""
    keep: bool = False
    """Whether the buckets stay allocated and mapped from sync to sync."""
    bucket_megabytes: float
    buckets: int = 2
    """How many buckets exist at a time."""

    @property
    def restarts_engine(self) -> bool:
        """Whether a new engine loads the weights from disk (`disk_reload.py`): no transport, no buckets."""
        return self.transport == DISK

    def __str__(self) -> str:
        if self.restarts_engine:
            return "saved to disk, loaded by a new engine"
        kept = "kept" if self.keep else "freed"
        return f"{self.transport}, {self.exchange}, {self.buckets} x {self.bucket_megabytes:g} MiB {kept}"


def alternatives(transports: list[str], bucket_megabytes: float) -> list[Strategy]:
    """Return what is worth comparing: each transport, buckets kept or freed, smaller and larger, other exchanges, the
    disk.

    Args:
        transports: Transports that the device has, the usual one first.
        bucket_megabytes: Size of the run's buckets.
    """
    usual, size = transports[0], bucket_megabytes
    return [
        Strategy(transport=usual, bucket_megabytes=size),
        Strategy(transport=usual, bucket_megabytes=size, keep=True),
        Strategy(transport=usual, bucket_megabytes=size, keep=True, buckets=4),
        Strategy(transport=usual, bucket_megabytes=size / 2, keep=True, buckets=4),
        Strategy(transport=usual, bucket_megabytes=size / 4, keep=True),
        Strategy(transport=usual, bucket_megabytes=size * 2, keep=True),
        Strategy(transport=usual, bucket_megabytes=size, keep=True, exchange="per_parameter"),
        Strategy(transport=usual, bucket_megabytes=size, keep=True, exchange="relay"),
        *(Strategy(transport=other, bucket_megabytes=size, keep=True) for other in transports[1:]),
        Strategy(transport=DISK, bucket_megabytes=size),
    ]
