"""Environments of real frameworks, made by `make test-frameworks`; without them these tests are skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from environments import FOLDER_VARIABLE


def made(name: str) -> Path:
    """A folder that `make test-frameworks` made; skips the test where it was not."""
    folder = Path(os.environ.get(FOLDER_VARIABLE, "not-made"), name).absolute()
    if not folder.exists():
        pytest.skip(f"needs {name} of `make test-frameworks`")
    return folder


@pytest.fixture(scope="session")
def vllm_environment() -> Path:
    """A virtual environment with a CPU build of vLLM."""
    return made("vllm")


@pytest.fixture(scope="session")
def sglang_environment() -> Path:
    """A virtual environment with SGLang."""
    return made("sglang")


@pytest.fixture(scope="session")
def trl_environment() -> Path:
    """A virtual environment with TRL."""
    return made("trl")


@pytest.fixture(scope="session")
def deepspeed_environment() -> Path:
    """A virtual environment with accelerate and DeepSpeed."""
    return made("deepspeed")


@pytest.fixture(scope="session")
def openrlhf_environment() -> Path:
    """A virtual environment with OpenRLHF, DeepSpeed and a CPU build of vLLM."""
    return made("openrlhf")


@pytest.fixture(scope="session")
def skyrl_environment() -> Path:
    """A virtual environment with SkyRL, AReaL and a CPU build of vLLM."""
    return made("skyrl")


@pytest.fixture(scope="session")
def sources() -> Path:
    """The Python sources of releases, each in a folder `<package>-<version>`."""
    return made("sources")
