"""The hosts of a run: their processors and GPUs, as each host's sampler said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rltrace.read.recording import Process


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a host is."""

    host: str
    """Name of the host."""
    cpu: str | None
    """Model of its processors."""
    cpus: int | None
    """How many processors the run could use."""
    gpus: dict[str, str]
    """Model of each GPU that the run could use, by uuid."""
    driver: str | None
    """Version of the GPU driver."""


def machines(processes: Iterable[Process]) -> list[Machine]:
    """Return one machine for each process that has said what its machine is."""
    return [_machine(process.host, said) for process in processes if (said := process.machine) is not None]


def _machine(host: str, said: dict[str, Any]) -> Machine:
    gpus = {gpu["uuid"]: gpu["name"] for gpu in said.get("gpus") or ()}
    return Machine(host=host, cpu=said.get("cpu"), cpus=said.get("cpus"), gpus=gpus, driver=said.get("driver"))


def described(found: Sequence[Machine]) -> dict[str, str]:
    """Return what all hosts together are: `gpus`, `driver` and `processors`, as far as known."""
    models = Counter(model for machine in found for model in machine.gpus.values())
    drivers = {machine.driver: None for machine in found if machine.driver}
    processors = {f"{machine.cpus} of {machine.cpu}": None for machine in found if machine.cpu}
    said = {
        "gpus": ", ".join(f"{many} {model}" for model, many in models.items()),
        "driver": ", ".join(drivers),
        "processors": ", ".join(processors),
    }
    return {name: text for name, text in said.items() if text}
