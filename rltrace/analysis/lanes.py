"""Lanes: a rank is a device, not a process; its lane is assembled from all processes that work on the device."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rltrace.read.recording import Process

DRIVER_ROLE = "driver"


class Lane(msgspec.Struct, frozen=True):
    """What the figures are given for: a rank, the driver, or a process that is neither."""

    name: str
    """`rank 0`, `driver`, or what the process is called."""
    rank: int | None
    host: str | None
    """Its host; None if the processes of a rank do not name their device and run on several hosts."""
    device: str | None
    """Uuid of its device; None if no process of the lane names one."""

    @property
    def is_driver(self) -> bool:
        return self.rank is None and self.device is None and self.name == DRIVER_ROLE


def lanes(processes: Sequence[Process]) -> dict[str, Lane]:
    """Return the lane of every process, by the process's key.

    A process that names only its rank is on the lane of the device that another process of this rank named.
    """
    device_of_rank: dict[int, tuple[str, str]] = {}
    for process in processes:
        device = _device(process)
        if device is not None and process.rank is not None:
            device_of_rank.setdefault(process.rank, device)
    keys = {process.key: _key(process, device_of_rank) for process in processes}
    members: dict[object, list[Process]] = {}
    for process in processes:
        members.setdefault(keys[process.key], []).append(process)
    made = {key: _lane(together) for key, together in members.items()}
    return {process.key: made[keys[process.key]] for process in processes}


def order(lane: Lane) -> tuple[bool, bool, int, str]:
    """Sort key: the driver, then ranks by number, then the others by name."""
    return not lane.is_driver, lane.rank is None, lane.rank or 0, lane.name


def _device(process: Process) -> tuple[str, str] | None:
    device = process.device
    if not device or not device.get("uuid"):
        return None
    return str(device.get("host") or process.host), str(device["uuid"])


def _key(process: Process, device_of_rank: dict[int, tuple[str, str]]) -> object:
    device = _device(process) or (device_of_rank.get(process.rank) if process.rank is not None else None)
    if device is not None:
        return device
    if process.rank is not None:
        return process.rank
    return DRIVER_ROLE if process.role == DRIVER_ROLE else process.key


def _lane(processes: list[Process]) -> Lane:
    ranks = sorted(process.rank for process in processes if process.rank is not None)
    devices = [device for device in map(_device, processes) if device is not None]
    hosts = {process.host for process in processes}
    host, uuid = devices[0] if devices else (hosts.pop() if len(hosts) == 1 else None, None)
    if ranks:
        name = f"rank {ranks[0]}"
    elif uuid is not None:
        name = f"device {uuid}"
    elif processes[0].role == DRIVER_ROLE:
        name = DRIVER_ROLE
    else:
        name = f"{processes[0].name} {processes[0].pid}"
    return Lane(name, ranks[0] if ranks else None, host, uuid)
