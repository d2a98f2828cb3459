"""Says who owns each allocation of an engine, in the steps of which all are kept: what all engines have in common."""

from __future__ import annotations

import functools
import os
from typing import Any, Protocol

from rltrace.events import UNATTRIBUTED
from rltrace.hooks.patching import PatchSet
from rltrace.instrument.memory.allocation_owners import enter, leave
from rltrace.instrument.memory.pools import OWNERS
from rltrace.instrument.torch import step_follower
from rltrace.record import allocation_steps
from rltrace.record.torch import allocations

ACTIVATIONS = "rollout.activations"


class EnginePools(allocations.ForeignPools, Protocol):
    """The memory of an engine about which torch's history is wrong."""

    def owners(self) -> dict[int, str]:
        """Return the owner of every segment, asleep or awake, by address."""


def keep_pools(pools: EnginePools) -> None:
    """Have the pools of this process in every history, by owner."""
    allocations.keep_beside(pools)
    allocations.name_by(pools.owners)


def name_executions(patches: PatchSet, target: str) -> None:
    """Hook what executes the engine's model once: what it allocates belongs to the engine."""
    if os.environ.get(allocation_steps.VARIABLE) or os.environ.get(allocation_steps.KERNELS_VARIABLE):
        patches.around(target, enter_execution, leave)
        return
    with patches.dormant() as switch:
        patches.around(target, functools.partial(enter, ACTIVATIONS), leave)
    allocations.when_kept(switch)


def enter_execution(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Look for a chosen step, and begin the engine's scope: its server's generations are no phases of its own."""
    step_follower.look()
    return enter(ACTIVATIONS, args, kwargs)


def owner_of(tag: str) -> str:
    """Return the owner of a pool with this tag."""
    return OWNERS.get(tag, UNATTRIBUTED)
