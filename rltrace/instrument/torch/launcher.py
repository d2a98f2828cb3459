"""What torchrun or SLURM told a process in its environment variables: its rank, and of how many on how many hosts.

Everything that the process starts inherits these variables, so that they alone do not make a process a rank.

Source read: torch 2.6 to 2.15, torch/distributed/elastic/agent/server/local_elastic_agent.py; srun's manual, section
OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_TORCHRUN = {
    "rank": ("RANK",),
    "world_size": ("WORLD_SIZE",),
    "local_rank": ("LOCAL_RANK",),
    "hosts": ("GROUP_WORLD_SIZE",),
}
_SLURM = {
    "rank": ("SLURM_PROCID",),
    "world_size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "local_rank": ("SLURM_LOCALID",),
    "hosts": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
}
"""The variables that say it; of several, the first that is there. Those of a step come first, as a job has many."""

BY_HAND = "hand"
"""Nobody launched it: its own program or a script set `RANK` and `WORLD_SIZE`."""

_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"


class Launched(NamedTuple):
    """The place of a process among those that were launched together."""

    by: str
    """"torchrun", "slurm" or "hand"."""
    rank: int
    world_size: int
    local_rank: int
    """Its place among those of its host."""
    hosts: int
    """How many hosts there are, as the launcher counts them."""


def launched(environment: Mapping[str, str]) -> Launched | None:
    """Return what the launcher said; None without one. torchrun is asked first, because srun may have started it."""
    if _OF_TORCHRUN in environment:
        return _said("torchrun", _TORCHRUN, environment)
    return _said("slurm", _SLURM, environment)


def _said(by: str, names: Mapping[str, tuple[str, ...]], environment: Mapping[str, str]) -> Launched | None:
    found = {
        field: next((environment[name] for name in variables if name in environment), "")
        for field, variables in names.items()
    }
    if not all(value.isdecimal() for value in found.values()):
        return None
    return Launched(by, **{field: int(value) for field, value in found.items()})
