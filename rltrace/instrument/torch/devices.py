"""Finds which device a process works for, without initializing CUDA."""

from __future__ import annotations

import functools
import os
import socket
from typing import Any

from rltrace.host.interruption import own_failure


def device_of(without_gpu: str, place: int = 0) -> dict[str, Any]:
    """Return the `device` of this process for `identify`; nothing where NVML cannot be asked.

    Args:
        without_gpu: Name of the device where CUDA shows none.
        place: Which of the GPUs that CUDA shows this process.
    """
    return on_gpu(place) if os.environ.get("CUDA_VISIBLE_DEVICES") else on_cpu(without_gpu)


def on_cpu(name: str) -> dict[str, Any]:
    """Return the `device` of a process that uses no GPU, by a name of its own."""
    return {"device": {"host": socket.gethostname(), "uuid": name}}


def on_gpu(place: int = 0) -> dict[str, Any]:
    """Return the `device` of a process that uses a GPU; `place` counts the GPUs that CUDA shows it."""
    try:
        return {"device": {"host": socket.gethostname(), "uuid": gpu_uuid(place)}}
    except own_failure():  # a rank without a device is still a rank
        return {}


def gpu_uuid(place: int = 0) -> str:
    """Return the UUID of one of the GPUs that CUDA shows this process, without initializing CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = str(place) if visible is None else visible.split(",")[place]
    return _uuid_of(int(name)) if name.isdigit() else name


@functools.cache
def _uuid_of(index: int) -> str:
    """Return the UUID of a GPU by its number in the machine. It is cached: verl's engines say theirs at each sync."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)))
    finally:
        pynvml.nvmlShutdown()
