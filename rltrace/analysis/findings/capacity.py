"""How many bytes of the GPUs are taken, and how many are free."""

from __future__ import annotations

from collections.abc import Iterator

from rltrace.analysis.findings.run import Run
from rltrace.analysis.ledger import FREE
from rltrace.analysis.memory import DeviceMemory

NOT_MEASURED = "no GPU's memory was measured"
"""Why nothing can be said of it."""


def gpus(run: Run) -> Iterator[DeviceMemory]:
    """Return the devices whose size is known: a CPU has none that a run could fill alone."""
    for device in run.summary.memory:
        if device.device is not None and not device.device.startswith("cpu") and device.at_peak_bytes.get(FREE):
            yield device


def capacity_bytes(device: DeviceMemory) -> int:
    """Return the size of a device."""
    return device.peak_bytes + device.at_peak_bytes[FREE]


def least_free_in(run: Run, phase: str) -> int | None:
    """Return what the fullest device has free in a phase when that holds most; None if nobody measured it."""
    free = [
        moment.bytes[FREE]
        for device in gpus(run)
        for moment in device.phases
        if moment.phase == phase and moment.bytes.get(FREE) is not None
    ]
    return min(free, default=None)
