"""Small parts that several tests build: a tiny configuration and a real engine in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from msgspec.structs import replace
from rltrace_reference.config import Config, RolloutConfig
from rltrace_reference.rollout import Rollout


@pytest.fixture(scope="session")
def config() -> Config:
    """The default model with few slots, so that requests wait."""
    return replace(Config(), rollout=RolloutConfig(n=4, max_tokens=6, slots=8, bucket_megabytes=0.02))


@pytest.fixture
def weights(config: Config) -> dict[str, torch.Tensor]:
    """Random parameters of the model by their names in a checkpoint, in bf16."""
    random = torch.Generator().manual_seed(1)
    return {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else (torch.randn(shape, generator=random) * 0.1).bfloat16()
        for name, shape in config.model.shapes().items()
    }


def started(config: Config) -> Iterator[Rollout]:
    """A real engine process, until it is no longer needed."""
    handle = Rollout(config, rank=0)
    handle.start()
    yield handle
    handle.close()


@pytest.fixture
def rollout(config: Config) -> Iterator[Rollout]:
    """A real engine process."""
    yield from started(config)


@pytest.fixture(scope="module")
def lasting_rollout(config: Config) -> Iterator[Rollout]:
    """A real engine process for all tests of a file that leave it as they found it, with any weights."""
    yield from started(config)
