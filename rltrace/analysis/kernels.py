"""Which kernels that somebody asked for are missing, and why: `rltrace exec --kernels 3`."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rltrace.analysis.allocations import GONE
from rltrace.analysis.observations import Observations
from rltrace.events import kernels_of
from rltrace.read.recording import Process


class KernelsMissed(msgspec.Struct, frozen=True, kw_only=True):
    """Why the kernels of a chosen step are not there."""

    step: int
    """Number of the step."""
    processes: list[str]
    """Names of the processes that recorded none, for this reason; empty if the step never began in any."""
    reason: str
    """Why."""


def kernels_missed(seen: Observations) -> list[KernelsMissed]:
    """Return chosen steps of which no process recorded kernels, and processes that recorded none of others."""
    processes = [one.process for one in seen.processes]
    chosen = sorted({step for process in processes for step in process.kernel_steps})
    return [missed for step in chosen for missed in _missed(step, processes)]


def _missed(step: int, processes: list[Process]) -> Iterator[KernelsMissed]:
    alike: dict[str, list[str]] = {}
    for process in processes:
        if (reason := _why_none(step, process)) is not None:
            alike.setdefault(reason, []).append(process.name)
    if not alike and not any(step in process.kernels_begun for process in processes):
        yield KernelsMissed(step=step, processes=[], reason="no such step has begun")
    for reason, names in alike.items():
        yield KernelsMissed(step=step, processes=names, reason=reason)


def _why_none(step: int, process: Process) -> str | None:
    """Return why a process has no kernels of a step; None if it has them, or never was in the step."""
    if (reason := process.unavailable.get(kernels_of(step))) is not None:
        return reason
    if step not in process.kernels_begun or step in process.kernels_written:
        return None
    return "they are not written yet" if process.is_alive else GONE
