"""A process that uses a GPU, as torch tells it, where there is none: an allocator with a history, on the real clock.

A stand-in for what only a GPU has. Imported by programs that run under tracing, before anything else of theirs.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from allocator import DEVICE, Allocator

from rltrace.host import clock


class RealClock(Allocator):
    """On the host's clock; entries' times are torch's, whole microseconds of another one."""

    @property
    def host_ns(self) -> int:  # type: ignore[override]
        return clock.now_ns()

    @host_ns.setter
    def host_ns(self, _: int) -> None:
        """It goes by itself."""


GPU = RealClock()
_text = ""
_is_kept = False


class Tensor:
    """What is allocated for it is freed with it."""

    def __init__(self, size_bytes: int) -> None:
        self._address = GPU.allocate(size_bytes, _text)

    def __del__(self) -> None:
        GPU.ask_to_free(self._address, _text)
        GPU.complete_free(self._address, _text)


def _keep(enabled: str | None, **_: Any) -> None:
    global _is_kept
    GPU.is_kept = _is_kept = enabled is not None
    if _is_kept:
        GPU.entries.clear()


def _set_text(text: str) -> None:
    global _text
    _text = text


def come_up(*, has_text: bool = True, has_context: bool = True) -> None:
    """From here on torch says that CUDA is up.

    Args:
        has_text: False: it is a torch before 2.11.
        has_context: False: nothing was allocated but what `Tensor` does.
    """
    empty, memory = torch.empty, torch.cuda.memory
    own = os.getpid()
    torch.cuda.is_initialized = lambda: os.getpid() == own  # a forked child cannot use it
    torch.cuda.current_device = lambda: DEVICE
    torch.cuda.memory_stats = lambda _device: GPU.memory_stats()
    torch.cuda.memory_stats_as_nested_dict = lambda: {
        "num_device_alloc": has_context + GPU.stats["allocation.all.allocated"],
        "reserved_bytes": {"all": {"current": GPU.reserved_bytes(), "allocated": GPU.reserved_bytes(), "freed": 0}},
    }
    torch.empty = lambda size, **kw: empty(size, **kw) if kw.get("device") is None else Tensor(size)
    torch._C._cuda_isHistoryEnabled = lambda: _is_kept
    memory.get_allocator_backend = lambda: "native"
    memory._record_memory_history = _keep
    memory._snapshot = GPU.snapshot
    memory._get_memory_metadata = lambda: _text
    memory._set_memory_metadata = _set_text
    if not has_text:
        del memory._set_memory_metadata
