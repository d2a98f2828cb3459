"""Hooks on the places where memory turns between phase boundaries; `turns.py` says which of them are worth a look.

Source read: torch 2.6 to 2.13, torch/autograd, torch/optim, torch/nn/modules/module.py, torch/distributed/fsdp.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from rltrace.events import Turn
from rltrace.hooks.patching import Hook, PatchSet, nothing_before
from rltrace.instrument.memory.cuda_ledger import CONTEXT, CudaLedger, Growth
from rltrace.instrument.memory.sharded_models import ROLES, watch_models
from rltrace.instrument.memory.turns import Turns, at, beating
from rltrace.instrument.torch.dynamo import outside_graphs
from rltrace.instrument.torch.fsdp2 import PACKAGE
from rltrace.instrument.torch.optim import watch_optimizer_steps
from rltrace.record import spans

TRANSFORMERS = "transformers.modeling_utils:PreTrainedModel"


def name_turns(patches: PatchSet, turns: Turns, loading: Loading) -> None:
    """Name the hooks on forwards, backwards, optimizers, moves of modules and the allocator's cache."""
    watch_models(patches, functools.partial(watch_forwards, turns, loading))
    passes = Backwards(turns, loading)
    patches.around("torch.autograd:backward", passes.begin, passes.end)
    patches.around(f"{PACKAGE}._fsdp_param_group:FSDPParamGroup.post_backward", nothing_before, beating(turns))
    patches.use(
        "torch.optim.optimizer:register_optimizer_step_pre_hook",
        # What a look takes is no time of the step.
        functools.partial(watch_optimizer_steps, span=functools.partial(OptimizerStep, turns, loading), outermost=True),
    )
    patches.around("torch.optim.optimizer:Optimizer.zero_grad", nothing_before, at(turns, Turn.ZERO_GRAD))
    for module in ("torch.cuda", "torch.cuda.memory"):
        patches.around(f"{module}:empty_cache", at(turns, Turn.EMPTY_CACHE), at(turns, Turn.EMPTY_CACHE))
    for call in ("synchronize", "mem_get_info"):  # a program asks there too, after what took long
        patches.around(f"torch.cuda:{call}", nothing_before, beating(turns))
    patches.around(f"{TRANSFORMERS}.from_pretrained", nothing_before, at(turns, Turn.MOVED))
    moves = ModuleMoves(turns)
    patches.around("torch.nn.modules.module:Module._apply", moves.begin, moves.end)


class Loading:
    """The first calls of each kind, in which CUDA loads the kernels that they launch: they stay with the context."""

    CALLS = 3
    """The second one has kernels of its own, for it finds state that the first one left."""

    def __init__(self, ledger: CudaLedger) -> None:
        self._ledger = ledger
        self._calls: dict[Any, int] = {}

    def span(self, kind: str, /, **args: Any) -> Growth | spans.NoSpan:
        """Return what to enter and leave around a call; its kind is told by the arguments and the model's owner."""
        if not self._ledger.in_use:
            return spans.NoSpan()
        key = kind, ROLES.acting, *args.items()
        self._calls[key] = self._calls.get(key, 0) + 1
        return self._ledger.growth(CONTEXT) if self._calls[key] <= self.CALLS else spans.NoSpan()


class Backwards:
    """Looks around each backward: behind the one, activations are gone and gradients are there."""

    def __init__(self, turns: Turns, loading: Loading) -> None:
        self._turns, self._loading = turns, loading

    def begin(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        """Look before the call."""
        self._turns.begin_backward()
        return self._loading.span("backward").__enter__()

    def end(self, opened: Any, _result: Any, _error: BaseException | None) -> None:
        """Look after it."""
        opened.__exit__(None)
        self._turns.end_backward()


class OptimizerStep:
    """A step of an optimizer, looked at from both sides."""

    def __init__(self, turns: Turns, loading: Loading, kind: str, /, **args: Any) -> None:
        self._turns = turns
        self._loaded = loading.span(kind, **args)

    def __enter__(self) -> OptimizerStep:
        self._turns.reached(Turn.OPTIMIZER_BEGIN)
        self._loaded.__enter__()
        return self

    def __exit__(self, kind: object = None, error: object = None, traceback: object = None, /) -> None:
        self._loaded.__exit__(None)
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


def watch_forwards(turns: Turns, loading: Loading, state: Any, hook: Hook) -> None:
    """Look around the forwards of the module that is the root of its model; the others' are beats.

    Which one is the root shows in its first forward.
    """
    from torch import is_grad_enabled

    turns.beat()  # sharding it has moved it to the GPU
    known = weakref.ref(state)
    opened: list[Any] = []
    beat = beating(turns)

    def is_root() -> bool:
        root = known()
        return root is not None and bool(root._is_root)

    def begin(*_: Any) -> Any:
        has_gradients = is_grad_enabled()
        turns.begin_forward(has_gradients=has_gradients)
        return loading.span("forward", gradients=has_gradients).__enter__()  # with gradients to come: other kernels

    def end(token: Any, *_: Any) -> None:
        token.__exit__(None)
        turns.end_forward(has_gradients=is_grad_enabled())

    def before(_module: Any, _args: Any) -> None:
        if is_root():
            opened[:] = [hook.enter(begin, (), {})]
        else:
            hook.leave(beat, None, None, None)

    def after(_module: Any, _args: Any, _result: Any) -> None:
        while opened:
            hook.leave(end, opened.pop(), None, None)

    for module in state._modules:
        module.register_forward_pre_hook(outside_graphs(before))
        module.register_forward_hook(outside_graphs(after))
