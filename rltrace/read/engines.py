"""What tells an engine's processes apart that have no rank and are called alike: `Worker 0` of each of four engines.

An engine numbers its workers from 0, and its scheduler has no GPU. The rank or the GPU is said by another process: one
on the same device, the server that started them, or a worker that they started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

ENGINES = ("engine", "engine_worker")
"""Roles of processes that are told apart; of other programs' processes alike ones are one kind."""

UUID_LETTERS = 12
"""Of a GPU's, `GPU-d38bb060` among them: enough to tell the devices of a run apart."""


class Member(Protocol):
    """Of a process what is asked here."""

    key: str

    @property
    def role(self) -> str: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def host(self) -> str: ...
    @property
    def parent(self) -> str | None: ...
    @property
    def start_ns(self) -> int: ...
    @property
    def given_name(self) -> str: ...
    @property
    def device_uuid(self) -> str | None: ...


class Place(NamedTuple):
    """Of an engine's process without a rank of its own."""

    rank: int | None
    """The rank that it works for; of several the lowest."""
    name: str
    """What it is called."""


def places(processes: Iterable[Member]) -> dict[str, Place]:
    """Of every engine's process without a rank, by key: its name with a rank, else with its GPU, else with a number."""
    members = {process.key: process for process in processes}
    engines = sorted(
        (process for process in members.values() if process.rank is None and process.role in ENGINES),
        key=lambda process: (process.host, process.start_ns, process.key),
    )
    lowest = _lowest_ranks(members.values())
    ranks = {process.key: _rank(process, members, lowest) for process in engines}
    alike = Counter(process.given_name for process in engines if ranks[process.key] is None)
    found: dict[str, Place] = {}
    for process in engines:
        rank, name = ranks[process.key], process.given_name
        if rank is not None:
            name = f"rank {rank} {name}"
        elif alike[name] > 1:
            uuid = next((one.device_uuid for one in _family(process, members) if one.device_uuid), None)
            number = sum(name == before.given_name and before.key in found for before in engines)
            name = f"{name} on {uuid[:UUID_LETTERS]}" if uuid else f"{name} of engine {number}"
        found[process.key] = Place(rank, name)
    return found


def _lowest_ranks(processes: Iterable[Member]) -> dict[tuple[str, str | None], int]:
    """The lowest rank on each device."""
    found: dict[tuple[str, str | None], int] = {}
    for process in processes:
        if process.rank is not None:
            device = process.host, process.device_uuid
            found[device] = min(found.get(device, process.rank), process.rank)
    return found


def _rank(process: Member, members: dict[str, Member], lowest: dict[tuple[str, str | None], int]) -> int | None:
    """The lowest rank on the device of a process, or of one that it started; else of the nearest that started it."""
    devices = {(one.host, one.device_uuid) for one in _family(process, members) if one.device_uuid}
    on_device = [lowest[device] for device in devices if device in lowest]
    if on_device:
        return min(on_device)
    return next((one.rank for one in _above(process, members) if one.rank is not None), None)


def _family(process: Member, members: dict[str, Member]) -> list[Member]:
    """A process, and the engine's processes below it if it has no device itself."""
    below = [one for one in members.values() if one.role in ENGINES and process in _above(one, members)]
    return [process] if process.device_uuid else [process, *below]


def _above(process: Member, members: dict[str, Member]) -> Iterator[Member]:
    """Who started a process, the nearest first."""
    seen = {process.key}
    while (parent := members.get(process.parent or "")) is not None and parent.key not in seen:
        seen.add(parent.key)
        yield parent
        process = parent
