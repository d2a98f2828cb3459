"""Hooks on the places where memory turns between phase boundaries; `turns.py` says which of them are worth a look.

Source read: torch 2.6 to 2.13, torch/autograd, torch/optim, torch/nn/modules/module.py, torch/distributed/fsdp.
"""

from __future__ import annotations

import functools
from collections import Counter
from importlib.util import find_spec
from typing import Any

from rltrace.events import EMPTY_CACHE, Turn
from rltrace.hooks import boundaries
from rltrace.hooks.arguments import keep_self
from rltrace.hooks.hook import Function, Hook
from rltrace.hooks.patching import PatchSet, end_span, nothing_after, nothing_before
from rltrace.hooks.wrapping import wrap_function
from rltrace.host import memory
from rltrace.host.clock import now_ns
from rltrace.host.interruption import own_failure
from rltrace.instrument.memory.cuda_ledger import CONTEXT, CudaLedger
from rltrace.instrument.memory.growth import Growth
from rltrace.instrument.memory.sharded_models import MODELS, watch_models
from rltrace.instrument.memory.turns import Turns, at, beating, saying_peak, turning
from rltrace.instrument.memory.work import Work
from rltrace.instrument.torch.dynamo import outside_graphs
from rltrace.instrument.torch.fsdp2 import PACKAGE
from rltrace.instrument.torch.models import FORWARD_WATCHERS
from rltrace.instrument.torch.optim import STEPS, watch_optimizer_steps
from rltrace.record import spans

MODULE = "torch.nn.modules.module:Module"
TRANSFORMERS = "transformers.modeling_utils:PreTrainedModel"

ASKS = (
    "torch.cuda:synchronize",
    "torch.accelerator:synchronize",
    "torch.cuda:mem_get_info",
    "torch.accelerator.memory:get_memory_info",
)
"""A program asks there too, after what took long; and the last two make the context, if there is none."""


def name_turns(patches: PatchSet, turns: Turns, loading: Growth) -> None:
    """Name the hooks on forwards, backwards, optimizers, moves of modules and the allocator's cache."""
    FORWARD_WATCHERS.append(Forwards(turns, loading))
    watch_models(patches, functools.partial(beat_in_forwards, turns))
    passes = Backwards(turns, loading)
    patches.around("torch.autograd:backward", passes.begin, passes.end)
    sharding = Sharding(turns)
    patches.around(f"{PACKAGE}._fsdp_param_group:FSDPParamGroup.__init__", sharding.begin, sharding.end)
    patches.wrap(f"{PACKAGE}._fsdp_state:FSDPState._pre_backward", functools.partial(beat_before, turns))
    patches.wrap(f"{PACKAGE}._fsdp_param_group:FSDPParamGroup.post_backward", functools.partial(beat_afterwards, turns))
    patches.use(
        "torch.optim.optimizer:register_optimizer_step_pre_hook",
        # What a look takes is no time of the step.
        functools.partial(watch_optimizer_steps, span=functools.partial(OptimizerStep, turns, loading), outermost=True),
        reads=STEPS,
    )
    patches.around("torch.optim.optimizer:Optimizer.zero_grad", nothing_before, at(turns, Turn.ZERO_GRAD))
    emptying = Emptying(turns)
    for api in ("torch.cuda", "torch.accelerator"):
        patches.around(f"{api}.memory:empty_cache", emptying.begin, emptying.end, (EMPTY_CACHE,))
        patches.around(f"{api}.memory:reset_peak_memory_stats", saying_peak(turns), nothing_after)
    # The states that an optimizer's first step makes are there, and the step goes on for most of a second.
    groups = "torch.optim.optimizer:Optimizer._group_tensors_by_device_and_dtype"
    patches.wrap(groups, functools.partial(turn_before, turns))
    # It waits for the GPU; what was computed from the logits meanwhile, such as their entropy, is there.
    patches.wrap("torch.nested:narrow", functools.partial(turn_before, turns))
    for call in ASKS:
        patches.around(call, nothing_before, beating(turns))
    patches.around("torch._inductor.graph:GraphLowering.run", beating(turns), nothing_after)  # to compile takes seconds
    if find_spec("triton"):  # torch for a CPU comes without it
        patches.around("triton.compiler:compile", beating(turns), nothing_after)
    # First weights are broadcast one by one, and sharded.
    patches.around("torch.distributed.distributed_c10d:broadcast", nothing_before, beating(turns))
    patches.around(f"{TRANSFORMERS}.from_pretrained", nothing_before, at(turns, Turn.MOVED))
    # It has taken what the whole model needs; to read the model into that takes half a second.
    patches.around("transformers.modeling_utils:caching_allocator_warmup", nothing_before, turning(turns))
    for method in (f"{MODULE}.eval", f"{TRANSFORMERS}.eval", f"{MODULE}.requires_grad_"):  # so a ref is put aside
        patches.around(method, keep_self, meet_made)
    moves = ModuleMoves(turns)
    patches.around(f"{MODULE}._apply", moves.begin, moves.end)


TO_HOST = frozenset({"cpu", "pin_memory"})
"""Calls of a tensor that send it to the host."""

FIRST_CALLS = 3
"""How many calls of each kind are watched: the second one has kernels of its own, because the first one left state."""


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


def meet_made(module: Any, _result: Any, error: BaseException | None) -> None:
    """Meet a model that is put aside on a GPU: the boundaries before its first forward count it too."""
    if error is None and not boundaries.are_told() and is_on_gpu(module):
        MODELS.meet_used(module, has_gradients=False)


def is_on_gpu(module: Any) -> bool:
    """Return whether a module's first parameter is a plain tensor on a GPU."""
    first = next(module.parameters(), None)
    return first is not None and first.is_cuda and memory.local(first) is first


class Backwards:
    """Looks before and after each backward, in which activations go and gradients come."""

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


class Sharding:
    """Asks while FSDP2 shards a group of parameters whose shards go to the host.

    An embedding's shard is on the card from the first moment on; to send it to the host and pin it there takes seconds.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    @functools.cached_property
    def _asking(self) -> Any:
        """What is asked of each of torch's calls; it is made where torch has been imported."""
        from torch.overrides import TorchFunctionMode

        turns = self._turns

        class Asking(TorchFunctionMode):  # type: ignore[misc]
            def __torch_function__(
                self, function: Function, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                try:
                    if function.__name__ in TO_HOST:
                        turns.turn()
                except own_failure():
                    pass
                return function(*args, **(kwargs or {}))

        return Asking()

    def begin(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        """Watch torch's calls on this thread."""
        self._turns.beat_if_due()
        return self._asking.__enter__()

    def end(self, asking: Any, _result: Any, _error: BaseException | None) -> None:
        """Watch them no more."""
        asking.__exit__(None, None, None)
        self._turns.beat_if_due()


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


class Emptying:
    """Torch gives its cached memory back to the driver, whoever asks for that; looked at from both sides."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def begin(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        """Look before the call, and open its span."""
        self._turns.reached(Turn.EMPTY_CACHE)
        return spans.automatic_span(EMPTY_CACHE).__enter__()

    def end(self, opened: Any, result: Any, error: BaseException | None) -> None:
        """Close the span, and look after the call."""
        end_span(opened, result, error)
        self._turns.reached(Turn.EMPTY_CACHE)


class ModuleMoves:
    """Looks after each call that moves, casts or makes the tensors of a whole module: `to`, `cuda`, `to_empty`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._depth = 0

    def begin(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Enter a module, which calls the same method of its children."""
        self._depth += 1

    def end(self, _token: Any, _result: Any, _error: BaseException | None) -> None:
        """Leave a module; look if it is the outermost one."""
        self._depth -= 1
        if self._depth:
            self._turns.beat()
        else:
            self._turns.reached(Turn.MOVED)


class Forwards:
    """Looks before and after each forward of a whole model."""

    def __init__(self, turns: Turns, loading: Growth) -> None:
        self._turns, self._loading = turns, loading

    def meet(self, model: Any, /) -> None:
        """Meet the model, unless a trainer's hook has names for those that it knows."""
        from torch import is_grad_enabled

        if not boundaries.are_told():
            MODELS.meet_used(model, has_gradients=is_grad_enabled())

    def begin_forward(self) -> int | None:
        """Look before it."""
        from torch import is_grad_enabled

        has_gradients = is_grad_enabled()
        self._turns.begin_forward(has_gradients=has_gradients)
        return self._loading.begin("forward", has_gradients)  # with gradients to come: other kernels

    def end_forward(self, before_bytes: int | None, /) -> None:
        """Look after it."""
        from torch import is_grad_enabled

        self._loading.end(before_bytes)
        self._turns.end_forward(has_gradients=is_grad_enabled())

    def inside_forward(self) -> None:
        """Ask whether it has grown: the first forward of a kind takes seconds, in which its kernels are loaded."""
        self._turns.beat_if_due()


def beat_in_forwards(turns: Turns, state: Any, hook: Hook) -> None:
    """Make each forward of a module that FSDP2 shards a beat."""
    turns.beat()  # sharding it has moved it to the GPU
    beat = hook.timed(turns.beat)

    def before(_module: Any, _args: Any) -> None:
        if now_ns() >= turns.beat_due_ns:
            try:
                beat()
            except own_failure() as error:
                hook.failed(error)

    for module in state._modules:
        module.register_forward_pre_hook(outside_graphs(before))


def beat_before(turns: Turns, original: Function, hook: Hook) -> Function:
    """Make the beginning of each call a beat: in a first backward, the first module takes a second to load kernels."""
    beating_now = wrap_function(original, hook, beating(turns), nothing_after)
    return when_due(turns, original, beating_now)


def beat_afterwards(turns: Turns, original: Function, hook: Hook) -> Function:
    """Make the end of each call a beat. A step has hundreds, most of which come before the next beat is due."""
    beating_now = wrap_function(original, hook, nothing_before, beating(turns))
    return when_due(turns, original, beating_now)


def turn_before(turns: Turns, original: Function, hook: Hook) -> Function:
    """Make the beginning of each call a turn; dynamo, which may trace the call, does not see that."""
    turning_now = wrap_function(original, hook, turning(turns), nothing_after)
    turning_now._torchdynamo_inline = original  # type: ignore[attr-defined]
    return turning_now


def when_due(turns: Turns, original: Function, beating_now: Function) -> Function:
    """Return what calls the one until a beat is due, and then the other."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (beating_now if now_ns() >= turns.beat_due_ns else original)(*args, **kwargs)

    return call
