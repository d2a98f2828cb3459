"""Tests of this folder need NVIDIA GPUs and an engine; elsewhere they are skipped with the reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

ENGINES: dict[str, tuple[str, ...]] = {
    "test_gpu_sglang": ("sglang",),
    "test_gpu_verl": ("vllm", "sglang"),
    "test_gpu_cuda_time": (),
    "test_gpu_kernels": (),
    "test_gpu_loops": (),
    "test_gpu_pairs": (),
}
"""Of which engines a test file needs one; none if there is none, and vLLM where the file is not here."""


def reason_to_skip(path: Path) -> str | None:
    """What a test file misses here, if anything."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    engines = ENGINES.get(path.stem, ("vllm",))
    return (
        None
        if not engines or any(map(importlib.util.find_spec, engines))
        else f"{' nor '.join(engines)} is not installed"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # What pytest's own process does on a GPU leaves a context there until it ends, of which no ledger knows: last.
    items.sort(key=lambda item: item.get_closest_marker("in_this_process") is not None)
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if (reason := reason_to_skip(item.path)) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
