"""The bytes of the GPUs that are taken and free; findings about memory share this."""

from __future__ import annotations

from collections.abc import Iterator

from rltrace.analysis.findings.run import Run
from rltrace.analysis.ledger import FREE
from rltrace.analysis.memory import DeviceMemory

NOT_MEASURED = "no GPU's memory was measured"
"""Why nothing can be said of it."""


def gpus(run: Run) -> Iterator[DeviceMemory]:
    """Return the devices whose size is known. A CPU is not among them, because a run does not have it to itself."""
    for device in run.summary.memory:
        if device.device is not None and not device.device.startswith("cpu") and device.at_peak_bytes.get(FREE):
            yield device


def capacity_bytes(device: DeviceMemory) -> int:
    """Return the size of a device."""
    return device.peak_bytes + device.at_peak_bytes[FREE]


def least_free_in(run: Run, phase: str) -> int | None:
    """Return how much the fullest device has free at its fullest moment in a phase; None if nobody measured it."""
    free = [
        moment.bytes[FREE]
        for device in gpus(run)
        for moment in device.phases
        if moment.phase == phase and moment.bytes.get(FREE) is not None
    ]
    return min(free, default=None)
