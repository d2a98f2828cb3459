"""Whether a process uses a GPU, as torch's allocator counts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rltrace.host.gpu_use import has_used_gpu


def initialized(monkeypatch: pytest.MonkeyPatch, stats: dict[str, Any]) -> None:
    """torch as it is where CUDA was initialized, with these counts of its allocator."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: stats)


@pytest.mark.parametrize(
    ("made", "held_bytes", "has_used"),
    [(0, 0, False), (3, 0, True), (0, 1 << 21, True)],
    ids=["none yet", "all given back", "its counts were reset"],
)
def test_gpu_is_used_once_it_gave_memory(
    monkeypatch: pytest.MonkeyPatch, made: int, held_bytes: int, has_used: bool
) -> None:
    """A process uses a GPU once it has had memory of it."""
    initialized(monkeypatch, {"num_device_alloc": made, "reserved_bytes": {"all": {"current": held_bytes}}})
    assert has_used_gpu() is has_used


def test_uncounting_allocator_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator that counts nothing is assumed to be in use."""

    def refuse() -> dict[str, Any]:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    initialized(monkeypatch, {})
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", refuse)
    assert has_used_gpu()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_uses_none() -> None:
    assert not has_used_gpu()
    assert not torch.cuda.is_initialized()
