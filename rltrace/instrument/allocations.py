"""Whose each allocation is, on the steps on which all of them are kept: `rltrace.start_allocations`.

Source read: torch 2.11 and 2.13, torch/distributed/fsdp/_fully_shard, torch/autograd, and of torch's allocator
c10/cuda/CUDACachingAllocator.cpp.
The text that an allocation carries belongs to a thread, and autograd has threads of its own: a hook on what backward
begins with sets it there. Gradients and optimizer state are known by their addresses too, whoever allocated them. On
any other step these hooks pass their calls through, and modules have none.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from rltrace import allocations, memory
from rltrace.instrument.fsdp2 import PACKAGE, Forwards, groups_of, remove
from rltrace.instrument.sharded_models import ROLES, Fsdp2Params, watch_optimizers
from rltrace.instrument.torch_optim import watch_optimizer_steps
from rltrace.nvml import DRIVER
from rltrace.patching import Function, Hook, PatchSet

GROUP = f"{PACKAGE}._fsdp_param_group:FSDPParamGroup"

GRADS, OPTIMIZER, ACTIVATIONS = "actor.grads", "actor.optimizer", "actor.activations"
GATHER, BUCKET = "weight_sync.gather", "weight_sync.bucket"

SCOPES = {
    "rltrace_reference.actor:Actor.micro_batch": ACTIVATIONS,
    "rltrace_reference.actor:Policy.log_probs": ACTIVATIONS,
    "rltrace_reference.weight_sync:Sender.sync": GATHER,
    "rltrace_reference.cuda_ipc:CudaIpc.create": BUCKET,
    "rltrace_reference.host_staging:HostStaging.create": BUCKET,
}
"""Calls of the reference run whose allocations are an owner's, as far as no call inside says otherwise."""


class Allocations:
    """Owners' scopes of FSDP2's parameters, of forward, backward, optimizer and weight sync."""

    name = "allocations"
    supports = ("torch >= 2.11, < 2.14",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks; without a driver there are none."""
        if DRIVER.exists():
            name_hooks(patches)


def name_hooks(patches: PatchSet) -> None:
    """Name every place where an owner's scope begins and ends."""
    known = Known()
    allocations.name_by(known)
    patches.wrap(f"{PACKAGE}._fsdp_state:FSDPState.init", known.watch_states)
    watch_optimizers(patches)
    with patches.dormant() as switch:
        for method in ("unshard", "wait_for_unshard"):
            patches.around(f"{GROUP}.{method}", enter_params, leave)
        patches.around(f"{GROUP}.post_backward", enter_grads, leave)
        patches.around("torch.autograd:backward", watch_roots, forget_roots)
        patches.use(
            "torch.optim.optimizer:register_optimizer_step_pre_hook",
            functools.partial(watch_optimizer_steps, span=lambda *_, **__: allocations.Scope(OPTIMIZER)),
        )
        for target, owner in SCOPES.items():
            patches.around(target, functools.partial(enter, owner), leave)
    for told in (switch, known.switch):
        allocations.when_kept(told)


def enter(owner: str, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> str | None:
    """From here on allocations are the owner's."""
    return allocations.enter(owner)


def leave(before: str | None, _result: Any, _error: BaseException | None) -> None:
    """They are again whose they were."""
    allocations.leave(before)


# ---- parameters, gradients, optimizer state -----------------------------------------------------------------------


class Known:
    """Sharded modules that were met, and whose their tensors are and those of the optimizers."""

    def __init__(self) -> None:
        self._states: weakref.WeakKeyDictionary[Any, Forwards] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []

    def watch_states(self, original: Function, hook: Hook) -> Function:
        """Wrap `FSDPState.init`, to know what is sharded."""
        forwards = Forwards(hook, lambda *_: allocations.Scope(ACTIVATIONS).__enter__())

        @functools.wraps(original)
        def init(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if hook.live:
                self._states[args[0]] = forwards
            return result

        return init

    def switch(self, on: bool) -> None:
        """From here on what a forward allocates are activations, or not any more."""
        remove(self._handles)
        if on:
            for state, forwards in self._states.items():
                self._handles += forwards.attach(state._modules, str)

    def __call__(self) -> dict[int, str]:
        """Owners by address of what is allocated now."""
        owners: dict[int, str] = {}
        for optimizer in ROLES.optimizers():
            owners |= addresses(memory.optimizer_tensors(optimizer), OPTIMIZER)
        for group in (group for state in list(self._states) for group in groups_of(state)):
            owners |= addresses(parameters_of(group), params_owner(group))
            owners |= addresses(sharded_gradients_of(group), GRADS)
        return owners


def enter_params(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> str | None:
    """A group is about to gather its parameters."""
    return allocations.enter(params_owner(args[0]))


def params_owner(group: Any) -> str:
    """As everywhere in this process."""
    return f"{ROLES.subject_of(Fsdp2Params(group))}.params"


def parameters_of(group: Any) -> Iterator[Any]:
    """This rank's shards, and what was gathered and is still there."""
    for param in group.fsdp_params:
        yield param.sharded_param
        yield from param.all_gather_outputs


def sharded_gradients_of(group: Any) -> Iterator[Any]:
    """Gradients of this rank's shards."""
    return (param.sharded_param.grad for param in group.fsdp_params)


def gradients_of(group: Any) -> Iterator[Any]:
    """Gradients of whole parameters, which backward has just computed or added to."""
    for param in group.fsdp_params:
        yield getattr(getattr(param, "_unsharded_param", None), "grad", None)
        yield getattr(param, "unsharded_accumulated_grad", None)


def addresses(tensors: Iterable[Any], owner: str) -> dict[int, str]:
    """The owner by the address of each tensor's memory; of a DTensor, of this rank's shard."""
    local = map(memory.local, tensors)
    return {tensor.untyped_storage().data_ptr(): owner for tensor in local if getattr(tensor, "is_cuda", False)}


def enter_grads(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> str | None:
    """A group's gradients are computed; what their reduction allocates are gradients too."""
    allocations.name(addresses(gradients_of(args[0]), GRADS))
    return allocations.enter(GRADS)


# ---- backward ---------------------------------------------------------------------------------------------------


def watch_roots(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Let the thread on which backward begins know that its allocations are activations, until it is through."""
    tensors = kwargs["tensors"] if "tensors" in kwargs else args[0]
    roots = [tensors] if hasattr(tensors, "register_hook") else list(tensors)
    return [root.register_hook(enter_backward) for root in roots if root.requires_grad]


def enter_backward(_grad: Any) -> None:
    """Called by autograd, on the thread that computes this device's gradients."""
    from torch.autograd import Variable

    before = allocations.enter(ACTIVATIONS)
    Variable._execution_engine.queue_callback(lambda: allocations.leave(before))


def forget_roots(handles: list[Any], _result: Any, _error: BaseException | None) -> None:
    """Backward is over: what it began with needs no hook any more."""
    remove(handles)
