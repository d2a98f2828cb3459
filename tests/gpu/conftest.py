"""Tests of this folder need NVIDIA GPUs and vLLM; elsewhere they are skipped with the reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch


def reason_to_skip() -> str | None:
    """What is missing here, if anything."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # What pytest's own process does on a GPU leaves a context there until it ends, of which no ledger knows: last.
    items.sort(key=lambda item: item.get_closest_marker("in_this_process") is not None)
    reason = reason_to_skip()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
