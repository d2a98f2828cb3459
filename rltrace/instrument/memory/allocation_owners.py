"""Says who owns each allocation, in the steps of which all allocations are kept: `rltrace.start_allocations`.

Source read: torch 2.11 and 2.13, torch/distributed/fsdp, torch/nn/parallel/distributed.py, torch/autograd, and of
torch's allocator c10/cuda/CUDACachingAllocator.cpp.
The text that an allocation carries is set per thread. Autograd has threads of its own, so a hook on what a backward
begins with sets the text there. Parameters, gradients and optimizer state are also known by their addresses, whoever
allocated them. In all other steps these hooks pass their calls through, and modules have no hooks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rltrace.hooks.arguments import argument, attributes
from rltrace.hooks.hook import Hook
from rltrace.hooks.patching import PatchSet
from rltrace.host import memory
from rltrace.host.interruption import own_failure
from rltrace.host.nvml import DRIVER
from rltrace.instrument.memory.sharded_models import (
    MODELS,
    Fsdp1Params,
    Fsdp2Params,
    Params,
    grads_owner,
    watch_models,
)
from rltrace.instrument.memory.work import WORK, Work
from rltrace.instrument.torch.fsdp1 import HANDLE, RUNTIME
from rltrace.instrument.torch.fsdp2 import PACKAGE
from rltrace.instrument.torch.modules import Forwards, remove
from rltrace.instrument.torch.optim import STEPS, watch_optimizer_steps
from rltrace.record.torch import allocations

GROUP = f"{PACKAGE}._fsdp_param_group:FSDPParamGroup"

GRADIENTS = (
    *attributes(GROUP, "fsdp_params"),
    *attributes(f"{PACKAGE}._fsdp_param:FSDPParam", "unsharded_accumulated_grad"),
)

ACTIVATIONS = "activations"
GATHER, BUCKET = "weight_sync.gather", "weight_sync.bucket"

SCOPES = {
    "rltrace_reference.actor:Actor.micro_batch": f"actor.{ACTIVATIONS}",
    "rltrace_reference.actor:Policy.log_probs": f"actor.{ACTIVATIONS}",
    "rltrace_reference.weight_sync:Sender.sync": GATHER,
    "rltrace_reference.cuda_ipc:CudaIpc.create": BUCKET,
    "rltrace_reference.host_staging:HostStaging.create": BUCKET,
}
"""Allocations during these calls of the reference run belong to the owner, unless a call inside says otherwise."""


class Allocations:
    """Owners' scopes of FSDP's parameters and gradients, of forward, backward, optimizer and weight sync."""

    name = "allocations"
    supports = ("torch >= 2.11",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks; there are none without a driver."""
        if DRIVER.exists():
            name_hooks(patches)


def name_hooks(patches: PatchSet, work: Work = WORK) -> None:
    """Name every place where an owner's scope begins and ends."""
    allocations.name_by(owners)
    watch_models(patches)
    forwards = ModelForwards(work)
    with patches.dormant() as switch:
        patches.use("torch.nn.modules.module:Module.register_forward_pre_hook", forwards.use)
        for method in ("unshard", "wait_for_unshard"):
            patches.around(f"{GROUP}.{method}", functools.partial(enter_params, Fsdp2Params), leave)
        for method in ("pre_unshard", "unshard"):
            patches.around(f"{HANDLE}.{method}", functools.partial(enter_params, Fsdp1Params), leave)
        patches.around(f"{GROUP}.post_backward", enter_grads, leave, reads=GRADIENTS)
        patches.around(f"{RUNTIME}:_post_backward_hook", enter_flat_grads, leave)
        patches.around("torch.autograd:backward", functools.partial(watch_roots, work), end_backward)
        patches.use(
            "torch.optim.optimizer:register_optimizer_step_pre_hook",
            functools.partial(
                watch_optimizer_steps, span=lambda *_, **__: allocations.Scope(work.owner_of("optimizer"))
            ),
            reads=STEPS,
        )
        for target, owner in SCOPES.items():
            patches.around(target, functools.partial(enter, owner), leave)
    for told in (switch, forwards.switch):
        allocations.when_kept(told)


def enter(owner: str, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> str | None:
    """Let this thread's allocations belong to the owner from here on."""
    return allocations.enter(owner)


def leave(before: str | None, _result: Any, _error: BaseException | None) -> None:
    """Let this thread's allocations belong to the owner of before."""
    allocations.leave(before)


# ---- parameters, gradients, optimizer state -----------------------------------------------------------------------


def owners() -> dict[int, str]:
    """Return the owners, by address, of what this process's models hold now."""
    return {address: owner for owner, tensors in MODELS.tensors() for address in addresses(tensors)}


def addresses(tensors: Iterable[Any]) -> Iterator[int]:
    """Return where each tensor's memory begins; for a DTensor, where this rank's shard begins.

    Tensors in host memory may be among them, because no GPU has memory at the same addresses.
    """
    return (memory.local(tensor).untyped_storage().data_ptr() for tensor in tensors)


def enter_params(params_of: Callable[[Any], Params], args: tuple[Any, ...], _kwargs: dict[str, Any]) -> str | None:
    """Begin the scope of parameters that are about to be gathered."""
    return allocations.enter(params_owner(params_of(args[0])))


def params_owner(params: Params) -> str:
    """Return the owner that these parameters have everywhere in this process."""
    return f"{MODELS.roles.subject_of(params)}.params"


def enter_grads(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> str | None:
    """Begin the scope of a group's gradients, which are computed by now; what their reduction allocates counts too."""
    return enter_reduction(Fsdp2Params(args[0]), gradients_of(args[0]))


def enter_flat_grads(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Begin the scope of a flat parameter's gradients."""
    params = Fsdp1Params(argument("handle", 1, args, kwargs))
    return enter_reduction(params, params.grads())


def enter_reduction(params: Params, gradients: Iterable[Any]) -> str | None:
    """Name these tensors as gradients, whoever allocated them, and all allocations from here on too."""
    owner = grads_owner(MODELS.roles.subject_of(params))
    allocations.name(dict.fromkeys(addresses(gradients), owner))
    return allocations.enter(owner)


def gradients_of(group: Any) -> Iterator[Any]:
    """Return the gradients of whole parameters, which backward has just computed or added to."""
    for param in group.fsdp_params:
        for grad in (getattr(getattr(param, "_unsharded_param", None), "grad", None), param.unsharded_accumulated_grad):
            if grad is not None:
                yield grad


# ---- forward ----------------------------------------------------------------------------------------------------


class ModelForwards:
    """Forwards of this process's models, with hooks on their modules while a history is kept."""

    def __init__(self, work: Work) -> None:
        """Args:
        work: Says whose they are.
        """
        self._work = work
        self._hook: Hook | None = None
        self._handles: list[Any] = []

    def use(self, hook: Hook) -> Callable[[], None]:
        """Have the hooks on modules report as this one; return what undoes it."""
        self._hook = hook
        return self._forget

    def _forget(self) -> None:
        self._hook = None
        remove(self._handles)

    def switch(self, on: bool) -> None:
        """Turn the hooks on modules on or off, which name what a forward allocates as activations. Never raises."""
        remove(self._handles)
        hook = self._hook
        if not on or hook is None:
            return
        try:
            forwards = Forwards(hook, lambda *_: allocations.Scope(self._work.owner_of(ACTIVATIONS)).__enter__())
            self._handles = forwards.attach(MODELS.modules(), str)
            if unwrapped := MODELS.unwrapped():
                self._handles += forwards.attach_to_all(Having(unwrapped))
        except own_failure() as error:
            hook.failed(error)


class Having:
    """Tells whether a module has any of these parameters, and looks it up once for each module that is called.

    It is asked about modules as they are called, because nobody can list the modules of a process: the garbage
    collector does not return those that `gc.freeze` has put aside.
    """

    def __init__(self, parameters: list[Any]) -> None:
        self._wanted = {id(parameter): parameter for parameter in parameters}
        """The parameters are kept alive, so that no other object gets the id of one."""
        self._known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def __call__(self, module: Any) -> bool:
        known = self._known.get(module)
        if known is None:
            known = self._known[module] = not self._wanted.keys().isdisjoint(map(id, module.parameters()))
        return known


# ---- backward ---------------------------------------------------------------------------------------------------


def watch_roots(work: Work, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Have the thread on which a backward begins name its allocations as activations until the backward is over."""
    tensors = argument("tensors", 0, args, kwargs)
    roots = [tensors] if hasattr(tensors, "register_hook") else list(tensors)
    enter = functools.partial(enter_backward, work)
    return [root.register_hook(enter) for root in roots if root.requires_grad]


def enter_backward(work: Work, _grad: Any) -> None:
    """Begin the scope of activations: autograd calls this on the thread that computes this device's gradients."""
    from torch.autograd import Variable

    before = allocations.enter(work.owner_of(ACTIVATIONS))
    Variable._execution_engine.queue_callback(lambda: allocations.leave(before))


def end_backward(handles: list[Any], _result: Any, _error: BaseException | None) -> None:
    """End a backward: remove the hooks from what it began with, and name the gradients that it has made.

    Without sharding, gradients are allocated among the activations. Tensors that the program has brought back to the
    GPU since the history began are named here too.
    """
    remove(handles)
    if allocations.is_kept():
        allocations.name(owners())
