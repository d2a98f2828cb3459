"""The clock of a process: CLOCK_MONOTONIC, and the domain within which two readings compare without error."""

from __future__ import annotations

import os
import time
from pathlib import Path

from rltrace.host.interruption import own_failure

now_ns = time.monotonic_ns

Domain = tuple[str, str]
"""Boot id and time namespace."""


def domain() -> dict[str, str]:
    """Return boot id and time namespace of this process; two processes that share both share one clock.

    Two time namespaces of one boot differ by a constant, so the boot id alone is not enough (time_namespaces(7)).
    """
    return {"boot_id": _read("/proc/sys/kernel/random/boot_id"), "time_namespace": _link("/proc/self/ns/time")}


def own_domain() -> Domain:
    """Return the same as a value that can be compared."""
    said = domain()
    return said["boot_id"], said["time_namespace"]


def anchor() -> dict[str, int]:
    """Read the monotonic and the real-time clock together, and measure how far apart the two readings were.

    Returns:
        monotonic_ns, realtime_ns, and anchor_width_ns: the real time was read within that many ns of the monotonic one.
    """
    width, before, real = min(_bracketed_reading() for _ in range(5))
    return {"monotonic_ns": before + width // 2, "realtime_ns": real, "anchor_width_ns": width}


def _bracketed_reading() -> tuple[int, int, int]:
    before = now_ns()
    real = time.time_ns()
    return now_ns() - before, before, real


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except own_failure(OSError):
        return "unknown"


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except own_failure(OSError):
        return "unknown"
