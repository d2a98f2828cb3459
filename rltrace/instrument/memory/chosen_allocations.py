"""Keeps every allocation of the steps that `RLTRACE_ALLOCATIONS` names, in every process that uses a GPU.

In which step a process is, `torch/step_follower.py` finds out. What came and went before the first boundary inside of a
step is missing; what was allocated before and is still there is not. If the allocator's own counts say that nothing
came or went since the boundary before, as in a worker that waits while others generate, what is there is known from
that boundary on. Without the variable there is no hook.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from rltrace.events import ALLOCATIONS_KEPT, NO_GPU, allocations_of
from rltrace.hooks.hook import Hook
from rltrace.hooks.patching import PatchSet
from rltrace.host.gpu_use import has_used_gpu
from rltrace.instrument.torch import step_follower
from rltrace.record import allocation_steps, lifecycle
from rltrace.record.torch import allocations

PROGRAMS_OWN = "the program keeps its own"


class ChosenAllocations:
    """Keeps the allocations of the chosen steps, if there are any."""

    name = "chosen_allocations"
    supports = ()

    def install(self, patches: PatchSet) -> None:
        """Watch steps and phase boundaries; without a chosen step nothing is watched.

        Raises:
            ValueError: `RLTRACE_ALLOCATIONS` names no steps.
        """
        if steps := allocation_steps.parse(os.environ.get(allocation_steps.VARIABLE, "")):
            patches.use("rltrace.hooks.boundaries:watch", functools.partial(follow, steps), (ALLOCATIONS_KEPT,))


def follow(steps: frozenset[int], hook: Hook) -> Callable[[], None]:
    """Keep these steps in this process from here on; return what undoes it."""
    lifecycle.identify(chosen_steps=sorted(steps))
    return step_follower.follow(steps, AllocationKeeper(), hook)


class AllocationKeeper:
    """Keeps every allocation of this process on its current GPU."""

    line = "allocations"

    def __init__(self) -> None:
        self._last: allocations.Stillness | None = None
        """What the allocator counted at the last boundary outside of a chosen step."""

    def of(self, step: int) -> str:
        """Return what a process reports as unavailable if it kept none of a step."""
        return allocations_of(step)

    def outside(self) -> None:
        """Look what the allocator has counted until now."""
        self._last = allocations.stillness()

    def lacks(self) -> str | None:
        """Return that the process uses no GPU, as long as it does not."""
        return None if has_used_gpu() else NO_GPU

    def begin(self, step: int) -> str | None:
        """Begin; return why that is impossible, None if it is done."""
        return PROGRAMS_OWN if allocations.is_kept() else allocations.begin(self._last)

    def end(self, step: int) -> str | None:
        """Write what was kept; return why nothing was written, None if all was."""
        return allocations.end(step=step)

    def abandon(self) -> None:
        """Keep no more, and write nothing."""
        allocations.abandon()
