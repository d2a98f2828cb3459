"""torch_memory_saver, which SGLang sleeps with: memory given back and taken again, by tag.

Source read: torch_memory_saver 0.0.10. Its library counts no bytes on CUDA: they are those of the torch pool that each
tag allocates from. Up to 0.0.9 all tags share one pool, so that nobody can say what a tag holds: it is left out.
"""

from __future__ import annotations

from typing import Any

from rltrace.instrument.pools import Pools
from rltrace.patching import PatchSet

SAVER = "torch_memory_saver.entrypoint:TorchMemorySaver"


class TorchMemorySaver:
    """Memory paused and resumed."""

    name = "torch_memory_saver"
    supports = ("torch_memory_saver >= 0.0.10, < 0.0.11",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        pools = Pools(bytes_by_tag)

        def begin_pause(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return pools.begin_unmap(tags_of(args, kwargs), kept_tags())

        def begin_resume(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return pools.begin_map(tags_of(args, kwargs))

        patches.around(f"{SAVER}.pause", begin_pause, pools.end_unmap, ("cumem.unmap",))
        patches.around(f"{SAVER}.resume", begin_resume, pools.end_map, ("cumem.map",))


def tags_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str] | None:
    """The tag that a call names; None for all."""
    tag = kwargs.get("tag", args[1] if len(args) > 1 else None)
    return None if tag is None else {tag}


def bytes_by_tag() -> dict[str, int]:
    """Bytes of every pool, paused or not: segments of torch's allocator, not tensors. CUDA graphs are in none."""
    sizes: dict[str, int] = {}
    for (tag, *_), pool in _memory_pools().items():
        sizes[tag] = sizes.get(tag, 0) + sum(segment["total_size"] for segment in pool.snapshot())
    return sizes


def kept_tags() -> set[str]:
    """Tags with a pool whose bytes are copied to the host when they are paused."""
    return {tag for tag, cpu_backup, *_ in _memory_pools() if cpu_backup}


def _memory_pools() -> dict[Any, Any]:
    """torch's pools by (tag, whether it is copied to the host, ...); empty before the first region."""
    from torch_memory_saver import torch_memory_saver

    return dict(getattr(torch_memory_saver._impl, "_mem_pools", {}))
