"""What a run on GPUs needs is looked for before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from rltrace_reference import config as configuration
from rltrace_reference import device
from rltrace_reference.config import Config, UnmetNeedError

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


def install(engine: str, site: Path, version: str) -> None:
    folder = site / f"{engine}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {engine}\nVersion: {version}\n")


def test_no_gpu_is_refused(on_gpus: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU is refused."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # where there is one, it is not seen
    with pytest.raises(ConfigError, match=r"device: cuda, and torch .* sees no GPU .*; use device: cpu"):
        device.check(on_gpus)


class Nvml(SimpleNamespace):
    """Three GPUs as NVML tells of them: by number and by name, each with the bytes in use."""

    nvmlMemory_v2 = 2  # noqa: N815

    def __init__(self, used_gib: list[float]) -> None:
        super().__init__()
        self.used_gib = used_gib
        self.nvmlInit = self.nvmlShutdown = lambda: None
        self.nvmlDeviceGetCount = lambda: len(used_gib)
        self.nvmlDeviceGetHandleByIndex = lambda index: index
        self.nvmlDeviceGetHandleByUUID = lambda name: int(name.removeprefix("GPU-"))
        self.nvmlDeviceGetUUID = lambda index: f"GPU-{index}"
        self.nvmlDeviceGetMemoryInfo = lambda index, version: SimpleNamespace(used=int(used_gib[index] * 2**30))
        self.nvmlDeviceGetComputeRunningProcesses = lambda index: [SimpleNamespace(pid=77, usedGpuMemory=1)]


@pytest.fixture
def gpus(site: Path, monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """Three that are free, and a vLLM that is known."""
    nvml = Nvml([0.5, 0.5, 0.5])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device.torch.cuda, "device_count", lambda: 3)
    install("vllm", site, "0.26.0")
    return nvml


def test_one_gpu_per_rank(on_gpus: Config, gpus: Nvml) -> None:
    """As many GPUs as ranks are enough, and fewer are not."""
    device.check(replace(on_gpus, ranks=3))
    with pytest.raises(ConfigError, match="ranks: 4, and there are 3 GPUs; use ranks: 3 or fewer"):
        device.check(replace(on_gpus, ranks=4))


def test_used_gpu_is_named(on_gpus: Config, gpus: Nvml) -> None:
    """A GPU that somebody uses is named with its user, unless it is not needed or is forced."""
    gpus.used_gib[1] = 20.0
    device.check(replace(on_gpus, ranks=1))
    with pytest.raises(ConfigError, match=r"20\.0 GiB of GPU 1 \(GPU-1\) are in use by process 77; .*--force"):
        device.check(replace(on_gpus, ranks=2))
    device.check(replace(on_gpus, ranks=2, force=True))


@pytest.mark.parametrize(("visible", "number"), [("2, GPU-1", 1), ("1", 0), ("0,2", None)])
def test_gpus_in_cudas_order(
    on_gpus: Config, gpus: Nvml, monkeypatch: pytest.MonkeyPatch, visible: str, number: int | None
) -> None:
    """GPUs are those that CUDA shows, in its order."""
    gpus.used_gib[1] = 20.0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    two = replace(on_gpus, ranks=2)
    if number is None:
        device.check(two)
        return
    with pytest.raises(ConfigError, match=rf"GiB of GPU {number} \(GPU-1\)"):
        device.check(two)


@pytest.mark.parametrize("version", ["0.24.0", "0.26.0"])
def test_known_versions_of_vllm_are_accepted(version: str, site: Path, on_gpus: Config) -> None:
    install("vllm", site, version)
    device.check_engine(on_gpus)


@pytest.mark.parametrize("version", ["0.31.0", "0.240.0", "0.2"])
def test_other_vllm_is_refused(version: str, site: Path, on_gpus: Config) -> None:
    """Another version of vLLM is refused with the way to try it."""
    install("vllm", site, version)
    with pytest.raises(
        ConfigError, match=rf"vllm {version}, and this has been run with 0\.24 and 0\.26 only; .*--force"
    ):
        device.check_engine(on_gpus)


def test_other_vllm_can_be_tried(site: Path, on_gpus: Config) -> None:
    """Another version of vLLM can be tried."""
    install("vllm", site, "0.31.0")
    device.check_engine(replace(on_gpus, force=True))


def with_sglang(config: Config) -> Config:
    return replace(config, rollout=replace(config.rollout, engine="sglang"))


@pytest.mark.parametrize("version", ["0.5.12", "0.5.12.post1"])
def test_known_versions_of_sglang_are_accepted(version: str, site: Path, on_gpus: Config) -> None:
    install("sglang", site, version)
    device.check_engine(with_sglang(on_gpus))


def test_other_sglang_is_what_the_machine_lacks(site: Path, on_gpus: Config) -> None:
    """Another version of SGLang is refused, as a machine's lack and not as a mistake of the configuration."""
    install("sglang", site, "0.5.120")
    with pytest.raises(
        UnmetNeedError, match=r"sglang 0\.5\.120, and this has been run with 0\.5\.12 only; install that"
    ):
        device.check_engine(with_sglang(on_gpus))


def test_an_absent_engine_is_what_the_machine_lacks(on_gpus: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "RELEASES", {"no-such-engine": ("1.2",)})
    absent = replace(on_gpus, rollout=replace(on_gpus.rollout, engine="no-such-engine"))
    with pytest.raises(
        UnmetNeedError, match=r"no-such-engine, which is not installed; install no-such-engine==1\.2\.\*"
    ) as lack:
        device.check_engine(absent)
    assert lack.value.lacks == "no-such-engine is not installed"
