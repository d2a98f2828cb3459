"""Tells whether this process uses a GPU, in a way that never makes it use one.

A process that does not use CUDA must not get a context of half a gigabyte because somebody watches it.
"""

from __future__ import annotations

import sys

from rltrace.host.interruption import own_failure


def has_used_gpu() -> bool:
    """Return whether torch's allocator has had memory of this thread's current GPU.

    Whether CUDA is initialized says less: asking which GPUs there are initializes it and makes no context, as verl's
    trainer and servers do. The first allocation or stream makes a context: 520 MiB of the first GPU (H200).

    Source read: torch 2.11, torch/cuda/memory.py and c10/cuda/CUDACachingAllocator.cpp.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return False
    try:
        stats = cuda.memory_stats_as_nested_dict()
    except own_failure(RuntimeError):  # an allocator of the program's own, which counts nothing, or a GPU that is lost
        return True
    return bool(stats.get("num_device_alloc")) or stats["reserved_bytes"]["all"]["current"] > 0
