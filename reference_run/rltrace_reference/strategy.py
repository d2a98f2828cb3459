"""Ways to sync the weights, as data: what a run uses, and what `compare_sync` compares it with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DISK = "disk"
BROADCASTS = ("gloo", "nccl")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way."""

    transport: str
    """Name of the transport, as in `device.py`; or `disk`, or the backend of a group that engines are in too."""
    exchange: Literal["all_gather", "per_parameter", "relay"] = "all_gather"
    """Whether every rank gathers from all others, by bucket or by parameter, or rank 0 collects and relays."""
    direct: bool = False
    """Whether each parameter is memory of its own that the engine maps, instead of a part of a bucket."""
    keep: bool = False
    """Whether the buckets stay allocated and mapped from sync to sync."""
    bucket_megabytes: float
    buckets: int = 2
    """How many buckets exist at a time."""

    @property
    def restarts_engine(self) -> bool:
        """Whether a new engine loads the weights from disk (`disk_reload.py`): no transport, no buckets."""
        return self.transport == DISK

    @property
    def broadcasts(self) -> bool:
        """Whether rank 0 broadcasts into the engines (`engine_group.py`): no transport, no buckets."""
        return self.transport in BROADCASTS

    @property
    def least_ranks(self) -> int:
        """Return with how many ranks it is another way than the usual one."""
        return 1 if self.exchange == "all_gather" else 2

    def __str__(self) -> str:
        if self.restarts_engine:
            return "saved to disk, loaded by a new engine"
        if self.broadcasts:
            return f"{self.transport} broadcast from rank 0 into the engines, by parameter"
        if self.direct:
            return f"{self.transport}, each parameter mapped by itself"
        kept = "kept" if self.keep else "freed"
        return f"{self.transport}, {self.exchange}, {self.buckets} x {self.bucket_megabytes:g} MiB {kept}"


def alternatives(transports: list[str], bucket_megabytes: float) -> list[Strategy]:
    """Return what is worth comparing: each transport, buckets kept or freed, smaller and larger, other exchanges, no
    buckets, the disk, and broadcasts into the engines.

    Args:
        transports: Transports that the device has, the usual one first.
        bucket_megabytes: Size of the run's buckets.
    """
    usual, size = transports[0], bucket_megabytes
    on_gpu = usual != "shared_memory"
    return [
        Strategy(transport=usual, bucket_megabytes=size),
        Strategy(transport=usual, bucket_megabytes=size, keep=True),
        Strategy(transport=usual, bucket_megabytes=size, keep=True, buckets=4),
        Strategy(transport=usual, bucket_megabytes=size / 2, keep=True, buckets=4),
        Strategy(transport=usual, bucket_megabytes=size / 4, keep=True),
        Strategy(transport=usual, bucket_megabytes=size * 2, keep=True),
        Strategy(transport=usual, bucket_megabytes=size, keep=True, exchange="per_parameter"),
        Strategy(transport=usual, bucket_megabytes=size, keep=True, exchange="relay"),
        Strategy(transport=usual, bucket_megabytes=size, direct=True),
        *(Strategy(transport=other, bucket_megabytes=size, keep=True) for other in transports[1:]),
        Strategy(transport=DISK, bucket_megabytes=size),
        Strategy(transport="gloo", bucket_megabytes=size),
        *([Strategy(transport="nccl", bucket_megabytes=size)] if on_gpu else []),  # last: NCCL may refuse it
    ]
