"""The GPUs that the ledger asks: through NVML, and through torch the one that this process uses."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from typing import Any

from rltrace.host import nvml
from rltrace.host.gpu_use import has_used_gpu
from rltrace.host.parents import is_below
from rltrace.instrument.memory import cuda_ledger
from rltrace.instrument.memory.cuda_ledger import Reserved


class NvmlCard:
    """A GPU that other processes use; it implements `cuda_ledger.Card`."""

    def __init__(self, gpu: nvml.Gpu) -> None:
        self._gpu = gpu

    def card(self) -> nvml.Memory:
        return self._gpu.memory()

    def held(self) -> dict[int, int]:
        return self._gpu.bytes_by_pid()


class UnseenCard:
    """A GPU about which NVML says nothing that holds for this process; each question raises the same reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def card(self) -> nvml.Memory:
        raise nvml.UnavailableError(self._reason)

    def held(self) -> dict[int, int]:
        raise nvml.UnavailableError(self._reason)


class TorchCard:
    """The current CUDA device; it implements `cuda_ledger.OwnCard`."""

    def __init__(self, torch: Any, uuid: str, card: cuda_ledger.Card) -> None:
        self._cuda = torch.cuda
        self._index = torch.cuda.current_device()
        self.uuid = uuid
        self.card, self.held = card.card, card.held

    def torch(self) -> Reserved:
        stats = self._cuda.memory_stats_as_nested_dict(self._index)
        allocated, times = stats["allocated_bytes"]["all"], stats["allocation"]["all"]
        reserved = stats["reserved_bytes"]["all"]
        return Reserved(
            reserved["current"],
            allocated["current"],
            times["allocated"] + times["freed"],
            allocated["peak"],
            reserved["allocated"] + reserved["freed"],
        )

    def pinned_bytes(self) -> int:
        return pinned_bytes(getattr(self._cuda.memory, "host_memory_stats_as_nested_dict", dict)())

    def pools(self, addresses: Collection[int]) -> tuple[Reserved, Reserved]:
        sleeping, private = [0, 0], [0, 0]
        for segment in self._cuda.memory_snapshot():
            if segment["device"] != self._index:
                continue
            if segment["address"] in addresses:
                place = sleeping
            elif tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
                place = private
            else:
                continue
            place[0] += segment["total_size"]
            place[1] += segment["allocated_size"]
        return Reserved(*sleeping), Reserved(*private)


def pinned_bytes(stats: dict[str, Any]) -> int:
    """Return how much pinned memory torch's allocator has, handed out or kept, by its own count.

    It is not the count of what is handed out: up to torch 2.12 `active_bytes` does not fall when memory is given back
    (pytorch#171662).

    Args:
        stats: As `torch.cuda.host_memory_stats_as_nested_dict` gives them.

    Raises:
        UnavailableError: The statistics do not say it.
    """
    # Renamed in 2.10, from which on "allocated" is what "reserved" was, and no longer what is handed out.
    whole = stats.get("allocated_bytes" if "active_bytes" in stats else "reserved_bytes")
    if whole is None:
        raise nvml.UnavailableError("this torch does not count the pinned memory of its allocator, as 2.7 and later do")
    return int(whole["current"])


def open_device() -> TorchCard | None:
    """Return the device on which this process has a context; None while it has none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    try:
        gpu = nvml.whole_gpu(uuid)
    except nvml.UnavailableError as reason:  # torch knows its own rows all the same
        return TorchCard(torch, uuid, UnseenCard(str(reason))) if has_used_gpu() else None
    # NVML's list may be empty, in a container too: who has had memory of torch's has a context.
    return TorchCard(torch, uuid, NvmlCard(gpu)) if has_used_gpu() or is_listed(gpu) else None


def open_engines_card() -> NvmlCard | None:
    """Return the one GPU that processes below this one use; None if there are several, or NVML does not say.

    It is None for a part of a GPU as well: the engine itself says why the totals of its card are unknown.
    """
    try:
        used = [gpu for gpu in nvml.gpus() if any(is_below(pid, os.getpid()) for pid in gpu.bytes_by_pid())]
    except nvml.UnavailableError:
        return None
    return NvmlCard(used[0]) if len(used) == 1 and not used[0].is_divided() else None


def is_listed(gpu: nvml.Gpu) -> bool:
    """Return whether NVML lists this process as one that uses the GPU."""
    try:
        return os.getpid() in gpu.bytes_by_pid()
    except nvml.UnavailableError:
        return False
