"""Hooks on the places where memory turns between phase boundaries; `turns.py` says which of them are worth a look.

Source read: torch 2.6 to 2.13, torch/autograd, torch/optim, torch/nn/modules/module.py, torch/distributed/fsdp.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from rltrace.events import Turn
from rltrace.hooks.patching import Hook, PatchSet, nothing_before
from rltrace.instrument.memory.cuda_ledger import CONTEXT, CudaLedger
from rltrace.instrument.memory.growth import Growth
from rltrace.instrument.memory.sharded_models import watch_models
from rltrace.instrument.memory.turns import Turns, at, beating
from rltrace.instrument.memory.work import Work
from rltrace.instrument.torch.dynamo import outside_graphs
from rltrace.instrument.torch.fsdp2 import PACKAGE
from rltrace.instrument.torch.models import FORWARD_WATCHERS
from rltrace.instrument.torch.optim import STEPS, watch_optimizer_steps

TRANSFORMERS = "transformers.modeling_utils:PreTrainedModel"


def name_turns(patches: PatchSet, turns: Turns, loading: Growth) -> None:
    """Name the hooks on forwards, backwards, optimizers, moves of modules and the allocator's cache."""
    FORWARD_WATCHERS.append(Forwards(turns, loading))
    watch_models(patches, functools.partial(beat_in_forwards, turns))
    passes = Backwards(turns, loading)
    patches.around("torch.autograd:backward", passes.begin, passes.end)
    patches.around(f"{PACKAGE}._fsdp_param_group:FSDPParamGroup.post_backward", nothing_before, beating(turns))
    patches.use(
        "torch.optim.optimizer:register_optimizer_step_pre_hook",
        # What a look takes is no time of the step.
        functools.partial(watch_optimizer_steps, span=functools.partial(OptimizerStep, turns, loading), outermost=True),
        reads=STEPS,
    )
    patches.around("torch.optim.optimizer:Optimizer.zero_grad", nothing_before, at(turns, Turn.ZERO_GRAD))
    for module in ("torch.cuda", "torch.cuda.memory"):
        patches.around(f"{module}:empty_cache", at(turns, Turn.EMPTY_CACHE), at(turns, Turn.EMPTY_CACHE))
    for call in ("synchronize", "mem_get_info"):  # a program asks there too, after what took long
        patches.around(f"torch.cuda:{call}", nothing_before, beating(turns))
    patches.around(f"{TRANSFORMERS}.from_pretrained", nothing_before, at(turns, Turn.MOVED))
    moves = ModuleMoves(turns)
    patches.around("torch.nn.modules.module:Module._apply", moves.begin, moves.end)


FIRST_CALLS = 3
"""Of each kind: the second one has kernels of its own, for it finds state that the first one left."""


def loading(ledger: CudaLedger, work: Work) -> Growth:
    """Return what watches the first calls of each kind, in which CUDA loads the kernels that they launch.

    These stay with the context. A call's kind is what `begin` is told of it, and whose model it is about.
    """
    calls: Counter[Any] = Counter()

    def is_first(*kind: Any) -> bool:
        if not ledger.in_use:
            return False
        calls[work.subject, kind] += 1
        return calls[work.subject, kind] <= FIRST_CALLS

    return Growth(ledger, CONTEXT, is_first)


class Backwards:
    """Looks around each backward: behind the one, activations are gone and gradients are there."""

    def __init__(self, turns: Turns, loading: Growth) -> None:
        self._turns, self._loading = turns, loading

    def begin(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        """Look before the call."""
        self._turns.begin_backward()
        return self._loading.begin("backward")

    def end(self, before_bytes: int | None, _result: Any, _error: BaseException | None) -> None:
        """Look after it."""
        self._loading.end(before_bytes)
        self._turns.end_backward()


class OptimizerStep:
    """A step of an optimizer, looked at from both sides."""

    def __init__(self, turns: Turns, loading: Growth, kind: str, /, **args: Any) -> None:
        self._turns, self._loading = turns, loading
        self._kind = kind, *args.items()

    def __enter__(self) -> OptimizerStep:
        self._turns.reached(Turn.OPTIMIZER_BEGIN)
        self._before_bytes = self._loading.begin(*self._kind)
        return self

    def __exit__(self, kind: object = None, error: object = None, traceback: object = None, /) -> None:
        self._loading.end(self._before_bytes)
        self._turns.reached(Turn.OPTIMIZER_END)


class ModuleMoves:
    """Looks behind each call that moves, casts or makes the tensors of a whole module: `to`, `cuda`, `to_empty`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._depth = 0

    def begin(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Go into a module: it calls the same of its children."""
        self._depth += 1

    def end(self, _token: Any, _result: Any, _error: BaseException | None) -> None:
        """Come out of one."""
        self._depth -= 1
        if self._depth:
            self._turns.beat()
        else:
            self._turns.reached(Turn.MOVED)


class Forwards:
    """Looks around each forward of a whole model."""

    def __init__(self, turns: Turns, loading: Growth) -> None:
        self._turns, self._loading = turns, loading

    def begin_forward(self) -> int | None:
        """Look before it."""
        from torch import is_grad_enabled

        has_gradients = is_grad_enabled()
        self._turns.begin_forward(has_gradients=has_gradients)
        return self._loading.begin("forward", has_gradients)  # with gradients to come: other kernels

    def end_forward(self, before_bytes: int | None, /) -> None:
        """Look behind it."""
        from torch import is_grad_enabled

        self._loading.end(before_bytes)
        self._turns.end_forward(has_gradients=is_grad_enabled())


def beat_in_forwards(turns: Turns, state: Any, hook: Hook) -> None:
    """Make each forward of a module that FSDP2 shards a beat."""
    turns.beat()  # sharding it has moved it to the GPU
    beat = beating(turns)

    def before(_module: Any, _args: Any) -> None:
        hook.leave(beat, None, None, None)

    for module in state._modules:
        module.register_forward_pre_hook(outside_graphs(before))
