"""Records every operator and kernel of the steps that `RLTRACE_KERNELS` names, by torch.profiler, in every process.

In which step a process is, `step_follower.py` finds out. A process that imports no torch, or uses no GPU of a machine
that has one, has no kernels; on a machine without a GPU its operators are recorded. A profiler of the program's own
goes first: if one is open, nothing is recorded, and if one is opened in the middle, ours ends there. Without the
variable there is no hook.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from rltrace.events import KERNELS_KEPT, NO_GPU, NO_TORCH, kernels_of
from rltrace.hooks.hook import Hook
from rltrace.hooks.patching import PatchSet, nothing_after
from rltrace.host.gpu_use import has_used_gpu
from rltrace.instrument.torch import step_follower
from rltrace.record import allocation_steps, lifecycle, spans
from rltrace.record.torch import kernels

PROFILER = "torch.autograd.profiler:profile"
"""What torch.profiler's own profile is made with, too."""
DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Devices of the drivers of NVIDIA's GPUs, of AMD's, and of those under WSL."""


class ChosenKernels:
    """Records the kernels of the chosen steps, if there are any."""

    name = "chosen_kernels"
    supports = ("torch >= 2.6",)

    def install(self, patches: PatchSet) -> None:
        """Watch steps, phase boundaries and the program's own profilers; without a chosen step nothing is watched.

        Raises:
            ValueError: `RLTRACE_KERNELS` names no steps.
        """
        if steps := allocation_steps.parse(os.environ.get(allocation_steps.KERNELS_VARIABLE, "")):
            patches.use("rltrace.hooks.boundaries:watch", functools.partial(follow, steps), (KERNELS_KEPT,))
            patches.around(f"{PROFILER}._prepare_trace", give_way, nothing_after)
            patches.around(f"{PROFILER}.__exit__", remember, theirs_is_over)


def follow(steps: frozenset[int], hook: Hook) -> Callable[[], None]:
    """Record the kernels of these steps in this process from here on; return what undoes it."""
    lifecycle.identify(kernel_steps=sorted(steps))
    return step_follower.follow(steps, KernelKeeper(), hook)


def give_way(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """Let the program's own profiler begin: only one can run at a time."""
    kernels.program_profiles(args[0])


def remember(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Return the profiler that ends."""
    return args[0]


def theirs_is_over(profiler: Any, _result: Any, _error: BaseException | None) -> None:
    """Forget a profiler of the program's own."""
    kernels.program_has_profiled(profiler)


class KernelKeeper:
    """Records every operator of this process, and every kernel that it launches."""

    line = "kernels"

    def of(self, step: int) -> str:
        """Return what a process reports as unavailable if it recorded none of a step."""
        return kernels_of(step)

    def outside(self) -> None:
        """Do nothing: no kernel of before matters."""

    def lacks(self) -> str | None:
        """Return why there is nothing to profile as yet; None once there is."""
        if "torch" not in sys.modules:
            return NO_TORCH
        return NO_GPU if has_gpu() and not has_used_gpu() else None

    def begin(self, step: int) -> str | None:
        """Begin; return why that is impossible, None if it is done."""
        return kernels.begin(of_all_threads=True, step=step)

    def end(self, step: int) -> str | None:
        """Write what was profiled; return what is missing, None if nothing is."""
        missing = kernels.end()
        if (current := spans.current()) is not None:
            current.append(self.line, step=step, is_written=True)
        return missing

    def abandon(self) -> None:
        """Profile no more, and write nothing."""
        kernels.abandon()


@functools.cache
def has_gpu() -> bool:
    """Return whether this machine has a GPU, by its driver's devices: to ask CUDA would make it come up."""
    return any(map(os.path.exists, DEVICES))
