"""A GPU's bytes by owner, at every phase boundary of any framework: sharded models, their optimizers, communicators.

What an engine holds is said by its own instrumentation.

Source read: torch 2.6 to 2.13, torch/distributed/fsdp and distributed_c10d.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rltrace.hooks import boundaries
from rltrace.hooks.arguments import argument
from rltrace.hooks.hook import Function, Hook
from rltrace.hooks.patching import PatchSet
from rltrace.hooks.wrapping import wrap_function
from rltrace.host.nvml import DRIVER
from rltrace.instrument.memory.cards import open_device, open_engines_card
from rltrace.instrument.memory.cuda_ledger import CONTEXT, NCCL, CudaLedger
from rltrace.instrument.memory.growth import Growth
from rltrace.instrument.memory.sharded_models import MODELS
from rltrace.instrument.memory.turn_hooks import loading, name_turns
from rltrace.instrument.memory.turns import Turns, beating
from rltrace.instrument.memory.uncaught_errors import watch_uncaught
from rltrace.instrument.memory.work import WORK

PROCESS_GROUP = "torch.distributed.distributed_c10d:ProcessGroup"

COLLECTIVES = (
    "allreduce",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "broadcast",
    "barrier",
    "alltoall",
    "alltoall_base",
    "send",
    "recv",
)
"""Methods of a process group; a release that does not have one of them says so."""


class CudaMemory:
    """Every process that uses a GPU samples what it holds there."""

    name = "cuda_memory"
    supports = ("torch >= 2.6",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks; there are none without a driver."""
        if DRIVER.exists():
            name_hooks(patches, LEDGER, TURNS)


OnDevice = Callable[[Any], AbstractContextManager[None]]


@contextmanager
def on_device(device: Any) -> Iterator[None]:
    """Enter a device that has its context: else NCCL would make it, and it would count as the communicator's."""
    import torch

    with torch.cuda.device(device):
        torch.cuda.synchronize()
        yield


def name_hooks(patches: PatchSet, ledger: CudaLedger, turns: Turns, on_device: OnDevice = on_device) -> None:
    """Name the hooks that meet models, optimizers and communicators where they are made, and look at each boundary."""
    ledger.tensors[MODELS], ledger.between_passes[MODELS] = MODELS, MODELS.between_passes
    ledger.trains = lambda: MODELS.met
    patches.when_imported("torch.cuda", lambda _: boundaries.watch(ledger.reached))
    patches.when_imported("torch.cuda", lambda _: boundaries.watch(turns.pass_boundary))
    watch_uncaught(patches, ledger.out_of_memory)
    name_turns(patches, turns, loading(ledger, turns.work))
    for method in COLLECTIVES:
        patches.wrap(f"{PROCESS_GROUP}.{method}", first_collectives(ledger, turns))
    # FSDP1 and DDP begin with it: several tensors at once, in C++, which calls none of the above.
    patches.wrap("torch.distributed.utils:_sync_params_and_buffers", first_collectives(ledger, turns))
    eager, split = eager_connections(ledger, turns, on_device), Connections(ledger, turns, splits)
    patches.around("torch.distributed:_Backend.eager_connect_single_device", eager.begin, eager.end)
    patches.around(f"{PROCESS_GROUP}.split_group", split.begin, split.end)


class Connections(Growth):
    """Calls that make a communicator, half a GiB: what follows is often seconds of imports, in which nobody looks."""

    def __init__(self, ledger: CudaLedger, turns: Turns, is_watched: Callable[..., bool]) -> None:
        super().__init__(ledger, NCCL, is_watched)
        self._turns = turns

    def end(self, before_bytes: int | None, _result: Any = None, _error: BaseException | None = None) -> None:
        """Give the communicator its bytes, and look."""
        super().end(before_bytes)
        if before_bytes is not None:
            self._turns.turn()


def first_collectives(ledger: CudaLedger, turns: Turns) -> Callable[[Function, Hook], Function]:
    """Return a wrapper of a collective, whose first call in each group makes the communicator and its channels.

    Each later call is only a beat, because a step has seven hundred of them.
    """
    known: set[str] = set()
    beat = beating(turns)

    def connects(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the call is about a GPU's tensors; the host's tensors need no communicator of NCCL's."""
        if not any(map(is_on_gpu, (*args[1:], *kwargs.values()))):
            return False
        known.add(args[0].group_name)
        return True

    connections = Connections(ledger, turns, connects)

    def watch(original: Function, hook: Hook) -> Function:
        watched = wrap_function(original, hook, connections.begin, connections.end)
        later = hook.timed(beat)

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if not hook.live:
                return original(*args, **kwargs)
            if args[0].group_name in known:
                hook.leave(later, None, None, None)
                return original(*args, **kwargs)
            return watched(*args, **kwargs)

        return collective

    return watch


def eager_connections(ledger: CudaLedger, turns: Turns, on_device: OnDevice) -> Connections:
    """Return what watches communicators that are made with their group and not by a first collective.

    That is so for a group that is bound to a device.

    `init_process_group` and `new_group` end in this call (torch 2.6 to 2.13), and in 2.6 `split_group`.
    """

    def connects(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the device is a GPU; a process without a context gets one before anybody looks."""
        device = argument("device", 1, args, kwargs)
        if device is None or device.type != "cuda":
            return False
        if not ledger.in_use:
            with on_device(device):
                ledger.device(is_sure=True)
        return True

    return Connections(ledger, turns, connects)


def splits(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    """Return whether a communicator is split from one of GPUs; torch 2.9 to 2.13 do that in C++."""
    device = getattr(args[0], "bound_device_id", None)
    return device is not None and device.type == "cuda"


def is_on_gpu(value: Any) -> bool:
    """Return whether a tensor, or the first one in nested lists, is on a GPU, or a barrier's options name a GPU."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return getattr(getattr(value, "device", None), "type", None) == "cuda"


LEDGER = CudaLedger(open_device, open_engines_card)
"""The ledger of this process."""

KERNELS = Growth(LEDGER, CONTEXT)
"""What it grows by outside of torch's allocator while a model is made, or an engine starts: kernels that CUDA loads."""

TURNS = Turns(LEDGER, WORK)
"""Looks at the ledger between boundaries."""
