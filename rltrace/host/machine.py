"""What this machine is, to compare two Recordings. On Linux; elsewhere less is known."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from rltrace.host.interruption import own_failure

_CPUS = Path("/proc/cpuinfo")


def machine() -> dict[str, Any]:
    """Return the processor and the GPUs of this machine.

    Returns:
        `cpu`: the model, None if the system does not say; `cpus`: how many this process may use; `gpus`: `uuid` and
            `name` of each; `driver`: version of the GPUs' driver, None without one.
    """
    gpus, driver = _gpus()
    return {"cpu": _cpu(), "cpus": _count(), "gpus": gpus, "driver": driver}


def _cpu() -> str | None:
    try:
        lines = (line.partition(":") for line in _CPUS.read_text().splitlines())
        return next(value.strip() for key, _, value in lines if key.strip() == "model name")
    except own_failure(OSError, StopIteration):  # ARM's Linux names none
        return platform.processor() or platform.machine() or None


def _count() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _gpus() -> tuple[list[dict[str, str]], str | None]:
    from rltrace.host import nvml

    try:
        return [{"uuid": gpu.uuid, "name": gpu.name()} for gpu in nvml.gpus()], nvml.driver_version()
    except nvml.UnavailableError:
        return [], None
