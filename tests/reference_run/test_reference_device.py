"""What a run on GPUs needs is looked for before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from rltrace_reference import config as configuration
from rltrace_reference import device
from rltrace_reference.config import Config

from rltrace.errors import ConfigError


@pytest.fixture
def on_gpus(tmp_path: Path) -> Config:
    file = tmp_path / "gpu.yaml"
    file.write_text("{device: cuda, ranks: 1}")
    return configuration.load(file, vocabulary=13)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose packages are seen before all others."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install_vllm(site: Path, version: str) -> None:
    folder = site / f"vllm-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def test_a_machine_without_a_gpu_is_refused(on_gpus: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # where there is one, it is not seen
    with pytest.raises(ConfigError, match=r"device: cuda, and torch .* sees no GPU .*; use device: cpu"):
        device.check(on_gpus)


@pytest.mark.parametrize("version", ["0.24.0", "0.26.0"])
def test_known_versions_of_vllm_are_accepted(version: str, site: Path, on_gpus: Config) -> None:
    install_vllm(site, version)
    device.check_vllm(on_gpus)


def test_another_version_of_vllm_is_refused_with_the_way_to_try_it(site: Path, on_gpus: Config) -> None:
    install_vllm(site, "0.31.0")
    with pytest.raises(ConfigError, match=r"vllm 0\.31\.0, and this has been run with 0\.24 and 0\.26 only; .*--force"):
        device.check_vllm(on_gpus)


def test_another_version_of_vllm_can_be_tried(site: Path, on_gpus: Config) -> None:
    install_vllm(site, "0.31.0")
    device.check_vllm(replace(on_gpus, force=True))
