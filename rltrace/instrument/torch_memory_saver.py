"""torch_memory_saver, which SGLang sleeps with: memory given back and taken again, by tag.

Source read: torch_memory_saver 0.0.10. Its library counts no bytes on CUDA: they are those of the torch pool that each
tag allocates from. Up to 0.0.9 all tags share one pool, so nobody can say what a tag holds, and it is left out.
Copies in the host's memory are its library's own, and are pinned if the pool was made so (csrc/cpu_backup.h:
cudaMallocHost, or mmap).
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from rltrace.hooks.arguments import argument, attributes
from rltrace.hooks.patching import PatchSet, nothing_after
from rltrace.host.interruption import own_failure
from rltrace.host.memory import OnHost
from rltrace.instrument.memory.cuda_memory import LEDGER
from rltrace.instrument.memory.pools import OWNERS, Pools

SAVER = "torch_memory_saver.entrypoint:TorchMemorySaver"

POOLS = (
    *attributes(SAVER, "_impl"),
    *attributes("torch_memory_saver.entrypoint:_TorchMemorySaverImpl", "_mem_pools", "_binary_wrapper"),
)
"""What says which pools there are."""


class TorchMemorySaver:
    """Records memory that is paused and resumed."""

    name = "torch_memory_saver"
    supports = ("torch_memory_saver >= 0.0.10",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        pools = Pools(bytes_by_tag, addresses, LEDGER.free_bytes, LEDGER.out_of_memory, Copies())

        def meet_pools(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if OWNERS.keys() & (tags_of(args, kwargs) or set()):  # a trainer may use it too, by other tags
                LEDGER.engine = pools

        def begin_pause(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return pools.begin_unmap(tags_of(args, kwargs), kept_tags())

        def begin_resume(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return pools.begin_map(tags_of(args, kwargs))

        patches.around(f"{SAVER}.region", meet_pools, nothing_after, reads=POOLS)
        patches.around(f"{SAVER}.pause", begin_pause, pools.end_unmap, ("cumem.unmap",), reads=POOLS)
        patches.around(f"{SAVER}.resume", begin_resume, pools.end_map, ("cumem.map",), reads=POOLS)


def tags_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str] | None:
    """Return the tag that a call names; None for all."""
    tag = argument("tag", 1, args, kwargs, None)
    return None if tag is None else {tag}


def bytes_by_tag() -> dict[str, int]:
    """Return the bytes of every pool, paused or not: segments of torch's allocator. CUDA graphs are in none."""
    sizes: dict[str, int] = {}
    for (tag, *_), pool in _memory_pools().items():
        sizes[tag] = sizes.get(tag, 0) + _size_bytes(pool)
    return sizes


def addresses() -> Collection[int]:
    """Return where the segments of all pools begin."""
    return segments().keys()


def segments() -> dict[int, tuple[int, str]]:
    """Return the bytes and the tag of every segment of a pool, asleep or awake, by its address."""
    return {
        segment["address"]: (segment["total_size"], tag)
        for (tag, *_), pool in _memory_pools().items()
        for segment in snapshot(pool)
    }


def snapshot(pool: Any) -> Any:
    """Return the segments of a pool, without the history of its allocations where torch can leave it out."""
    try:
        return pool.snapshot(include_traces=False)
    except own_failure(TypeError):
        return pool.snapshot()


class Copies:
    """Knows which pools have copies in the host's memory; with `retain_cpu_backup` they outlast a resumption."""

    def __init__(self) -> None:
        self._there: set[Any] = set()
        """Keys of pools."""

    def __call__(self, asleep: Collection[str]) -> dict[str, OnHost]:
        """Return the copies by tag, after a pause or a resumption."""
        pools = {key: pool for key, pool in _memory_pools().items() if key[1]}
        kept = self._there if self._there and _is_retained() else set()
        self._there = {key for key in pools if key[0] in asleep or key in kept}
        found: dict[str, OnHost] = {}
        for key in self._there:
            size_bytes = _size_bytes(pools[key])
            before = found.get(key[0], OnHost(0, 0))
            found[key[0]] = OnHost(before.size_bytes + size_bytes, _sum(before.pinned_bytes, _pinned(key, size_bytes)))
        return found


def _pinned(key: Any, size_bytes: int) -> int | None:
    """Return how much of a pool's copy is pinned; None if the key does not say how it is copied."""
    return {"pinned": size_bytes, "mmap": 0}.get(str(key[3])) if len(key) > 3 else None


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _is_retained() -> bool:
    from torch_memory_saver import torch_memory_saver

    return bool(torch_memory_saver._impl._binary_wrapper.cdll.tms_get_retain_cpu_backup())


def _size_bytes(pool: Any) -> int:
    return sum(segment["total_size"] for segment in snapshot(pool))


def kept_tags() -> set[str]:
    """Return the tags of pools whose bytes are copied to the host when they are paused."""
    return {tag for tag, cpu_backup, *_ in _memory_pools() if cpu_backup}


def _memory_pools() -> dict[Any, Any]:
    """Return torch's pools by (tag, whether it is copied to the host, ...); empty before the first region."""
    saver = getattr(sys.modules.get("torch_memory_saver"), "torch_memory_saver", None)
    return dict(getattr(getattr(saver, "_impl", None), "_mem_pools", {}))
