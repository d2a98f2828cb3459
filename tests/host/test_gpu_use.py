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
def test_a_process_uses_a_gpu_once_it_has_had_memory_of_it(
    monkeypatch: pytest.MonkeyPatch, made: int, held_bytes: int, has_used: bool
) -> None:
    initialized(monkeypatch, {"num_device_alloc": made, "reserved_bytes": {"all": {"current": held_bytes}}})
    assert has_used_gpu() is has_used


def test_an_allocator_that_counts_nothing_is_taken_for_one_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> dict[str, Any]:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    initialized(monkeypatch, {})
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", refuse)
    assert has_used_gpu()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_uses_none() -> None:
    assert not has_used_gpu()
    assert not torch.cuda.is_initialized()
