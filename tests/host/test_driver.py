"""The native question to NVIDIA's library: a library of C stands for it here, `tests/gpu/test_gpu_memory.py` asks the
real one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rltrace.host import native, nvml
from rltrace.host.nvml import Gpu, Memory, UnavailableError

SOURCE = """
struct memory { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(int *asked, struct memory *memory) {
    ++*asked;
    if (memory->version != (40 | 2 << 24)) return 25; /* NVML_ERROR_ARGUMENT_VERSION_MISMATCH */
    memory->total = 1ull << 40, memory->reserved = 3, memory->free = (1ull << 40) - 10, memory->used = 7;
    return *asked < 3 ? 0 : 15;
}
"""


class NVMLError(Exception):
    """An error of pynvml's."""


@pytest.fixture
def bindings(tmp_path: Path) -> SimpleNamespace:
    """Return what pynvml is once it has loaded this library; its own function is not to be called."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler: cc")
    source, library = tmp_path / "nvml.c", tmp_path / "nvml.so"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return SimpleNamespace(nvmlLib=ctypes.CDLL(str(library)), NVMLError=NVMLError, nvmlDeviceGetUUID=lambda _: "GPU-1")


def test_memory_is_asked_natively(bindings: SimpleNamespace) -> None:
    """Each answer is the driver's own; an error that it returns is one of pynvml's, and said as such."""
    asked = ctypes.c_int(0)
    gpu = Gpu(bindings, ctypes.pointer(asked))
    assert native.LIBRARY is not None, "make native"
    assert gpu.memory() == Memory(used_bytes=7, reserved_bytes=3, free_bytes=(1 << 40) - 10)
    assert dict(gpu.sample_memory())["gpu.used_bytes/GPU-1"] == 7
    with pytest.raises(UnavailableError, match="NVML: 15"):
        gpu.memory()
    assert asked.value == 3


def test_without_our_library(bindings: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """pynvml asks where our library was not built, or the driver has no such function."""
    bindings.nvmlMemory_v2 = 2
    bindings.nvmlDeviceGetMemoryInfo = lambda _device, version: SimpleNamespace(used=version, reserved=1, free=4)
    old = SimpleNamespace(**vars(bindings) | {"nvmlLib": ctypes.CDLL(None)})
    assert Gpu(old, ctypes.pointer(ctypes.c_int(0))).memory() == Memory(2, 1, 4)
    monkeypatch.setattr(native, "LIBRARY", None)
    assert Gpu(bindings, ctypes.pointer(ctypes.c_int(0))).memory() == Memory(2, 1, 4)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler: cc")
@pytest.mark.parametrize("given", [(), (1,), ("one", "two"), (1, 2, 3)])
def test_other_arguments_are_refused(given: tuple[Any, ...]) -> None:
    """What is no address is not called."""
    with pytest.raises(TypeError):
        native.LIBRARY.memory_of(*given)


def test_simulated_bindings_are_asked_themselves() -> None:
    """Bindings without a library of C, as tests simulate them, have no address."""
    assert nvml.memory_function(SimpleNamespace(), object()) is None
