"""What follows from the device of a run: collectives, transport, caches, and what can be checked before it starts."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from typing import Any

import torch

from rltrace.errors import ConfigError
from rltrace_reference.config import Config, UnmetNeedError
from rltrace_reference.weight_sync import Transport

RELEASES = {"vllm": ("0.24", "0.26"), "sglang": ("0.5.12",)}
"""Releases of each engine that this has been run with."""
USED_BYTES = 2 << 30
"""How much may be in use on a GPU that is ours: other people's contexts, but not their models."""


def of(config: Config) -> torch.device:
    """Return where the actor computes."""
    return torch.device("cuda" if config.device == "cuda" else "cpu")


def backend(config: Config) -> str:
    """Return the collectives, in the words of torch.distributed."""
    return "cpu:gloo,cuda:nccl" if config.device == "cuda" else "gloo"


def transport_name(config: Config) -> str:
    """Return how buckets pass from the worker to the engine."""
    return "cuda_ipc" if config.device == "cuda" else "shared_memory"


def transport(name: str) -> Transport:
    """Return the transport of this name."""
    if name == "shared_memory":
        from rltrace_reference.shared_memory import SharedMemory

        return SharedMemory()
    if name == "host_staging":
        from rltrace_reference.host_staging import HostStaging

        return HostStaging()
    from rltrace_reference.cuda_ipc import CudaIpc

    return CudaIpc()


def empty_cache(config: Config) -> None:
    """Release what this process's allocator holds without using it."""
    if config.device == "cuda":
        torch.cuda.empty_cache()
    else:
        trim_heap()


def trim_heap() -> None:
    """Release what the C library's allocator holds without using it: on a CPU it is the cache."""
    ctypes.CDLL(None).malloc_trim(0)


def check(config: Config) -> None:
    """Check what a run on GPUs needs, before anything is started.

    Raises:
        ConfigError: there are fewer GPUs than ranks, or one is in use by others.
        UnmetNeedError: the engine is missing or of another version.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device: cuda, and torch {torch.__version__} sees no GPU (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); use device: cpu, or torch and a driver for CUDA"
        )
    gpus = torch.cuda.device_count()
    if gpus < config.ranks:
        raise ConfigError(f"ranks: {config.ranks}, and there are {gpus} GPUs; use ranks: {gpus} or fewer")
    check_engine(config)
    if not config.force:
        _check_free(config.ranks)


def check_engine(config: Config) -> None:
    """Raise an UnmetNeedError if the engine is not installed, or in a release that this has not been run with."""
    engine = config.rollout.engine
    known = RELEASES[engine]
    try:
        version = importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        raise UnmetNeedError(
            f"rollout.engine: {engine}, which is not installed; install {engine}=={known[-1]}.* beside torch "
            f"{torch.__version__}",
            f"{engine} is not installed",
        ) from None
    if not config.force and not f"{version}.".startswith(tuple(f"{release}." for release in known)):
        raise UnmetNeedError(
            f"rollout.engine: {engine} {version}, and this has been run with {' and '.join(known)} only; install "
            f"{'one of these' if len(known) > 1 else 'that'}, or try it with --force",
            f"{engine} {version} is installed, not {' or '.join(known)}",
        )


def _check_free(ranks: int) -> None:
    """Raise a ConfigError for the first GPU of ours that somebody else uses."""
    import pynvml

    pynvml.nvmlInit()
    try:
        for number, handle in enumerate(_visible(pynvml)[:ranks]):
            used = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used
            if used > USED_BYTES:
                raise ConfigError(
                    f"device: {used / 2**30:.1f} GiB of GPU {number} ({pynvml.nvmlDeviceGetUUID(handle)}) are in use "
                    f"by {_users(pynvml, handle)}; wait for it, choose others by CUDA_VISIBLE_DEVICES, or try it with "
                    "--force"
                )
    finally:
        pynvml.nvmlShutdown()


def total_bytes() -> int:
    """Return the size of the first GPU, without a CUDA context that would take some of it."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(_visible(pynvml)[0]).total)
    finally:
        pynvml.nvmlShutdown()


def _visible(nvml: Any) -> list[Any]:
    """Return NVML's handles of the GPUs that CUDA shows this process, in its order."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
        for name in (part.strip() for part in named.split(","))
        if name
    ]


def _users(nvml: Any, handle: Any) -> str:
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    if not processes:
        return "processes that cannot be seen from here"
    most = max(processes, key=lambda process: process.usedGpuMemory or 0)
    return f"process {most.pid}" + (f" and {len(processes) - 1} others" if len(processes) > 1 else "")
