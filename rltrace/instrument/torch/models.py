"""Whole models, in any program: `model.forward` of what the program calls itself, and copies of weights into a model.

Only the outermost module of a call is a model; for each module inside, the hook looks once at its thread. Global hooks
on modules would take 2 µs for each module, and torch.compile warns of them.

Source read: torch 2.6 to 2.13, torch/nn/modules/module.py and torch/_dynamo/variables/nn_module.py.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from rltrace.events import FORWARD, LOAD_WEIGHTS
from rltrace.hooks.boundaries import WATCHERS
from rltrace.hooks.hook import ENTERING, NOT_ENTERED, Function, Hook
from rltrace.hooks.patching import PatchSet, end_span
from rltrace.host.interruption import own_failure
from rltrace.instrument.torch.autograd import NO_TASK, TASK
from rltrace.instrument.torch.between import BETWEEN
from rltrace.instrument.torch.dynamo import outside_graphs, skip_frames
from rltrace.instrument.torch.loop_boundaries import BOUNDARIES, LOG_PROBS, UPDATE
from rltrace.record import spans


class TorchModels:
    """Makes each forward of a whole model a span."""

    name = "torch_models"
    supports = ("torch >= 2.6",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        # Named from torch, whose dynamo is complete only when torch is imported.
        patches.wrap("torch:nn.Module.__call__", wrap_call, (FORWARD,), reads=TASK)
        patches.around("torch.nn.modules.module:Module.load_state_dict", begin_load, end_span, (LOAD_WEIGHTS,))


# ---- which model ------------------------------------------------------------------------------------------------


class Models:
    """The models of this process, numbered from 1. Modules that share their first parameter are one model."""

    def __init__(self) -> None:
        self._modules: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.met = 0
        """How many modules were met. When it has grown, what was found out about all of them is out of date."""

    def number(self, module: Any) -> int:
        """Return the number of a module's model; 0 for a module without parameters, such as a loss."""
        known = self._modules.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        number = self._number_of(next(module.parameters(), None))
        self._modules[id(module)] = weakref.ref(module), number
        self.met += 1
        return number

    def is_none(self, module: Any) -> bool:
        """Return whether a module is known to have no parameters, as an engine's sampler, which each token calls."""
        known = self._modules.get(id(module))
        return known is not None and not known[1] and known[0]() is module

    def _number_of(self, first: Any) -> int:
        """Return the number of the model with this first parameter.

        It is looked up, not kept: torch swaps no tensor that has a weak reference, so `model.to` would fail.
        """
        if first is None:
            return 0
        for module, number in self._alive():
            if number and next(module.parameters(), None) is first:
                return number
        return 1 + max((number for _, number in self._modules.values()), default=0)

    def _alive(self) -> list[tuple[Any, int]]:
        known = [(module(), number) for module, number in [*self._modules.values()]]
        return [(module, number) for module, number in known if module is not None]

    def having(self, parameters: set[int]) -> list[int]:
        """Return the models that have one of these parameters, which are given by their ids."""
        found = {
            number
            for module, number in self._alive()
            if number and any(id(parameter) in parameters for parameter in module.parameters())
        }
        return sorted(found)


MODELS = Models()

WITHOUT_ADAPTERS: list[int] = []
"""Numbers of the models that compute without their adapters now, each as often as it was told to."""


class Learned:
    """Knows which models an optimizer holds; it looks again when there are more modules."""

    def __init__(self, models: Models = MODELS) -> None:
        self._models = models
        self._known: dict[int, tuple[weakref.ref[Any], int, int, list[int]]] = {}

    def __call__(self, optimizer: Any) -> dict[str, Any]:
        """Return the number of an optimizer, and those of the models that it holds."""
        known = self._known.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            _, number, met, models = known
            if met == self._models.met:
                return {"number": number, "models": models}
        else:
            number = 1 + max((number for _, number, _, _ in self._known.values()), default=0)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        models = self._models.having(held)
        self._known[id(optimizer)] = weakref.ref(optimizer), number, self._models.met, models
        return {"number": number, "models": models}


# ---- forwards ---------------------------------------------------------------------------------------------------


class Inside(threading.local):
    """Says where a thread is."""

    model = False
    """Whether it is in a model, or in something that calls models itself, such as a generation."""
    generation = False
    first = False
    """In one of a model's first forwards, in which watchers are told of each module."""


INSIDE = Inside()


class ForwardWatcher(Protocol):
    """Looks before and after each forward of a whole model; the time that it takes is not the forward's."""

    def meet(self, model: Any, /) -> None:
        """Learn of the model, before the phase that may begin with its forward."""

    def begin_forward(self) -> Any:
        """Look before it; return what `end_forward` takes."""

    def end_forward(self, token: Any, /) -> None:
        """Look after it."""

    def inside_forward(self) -> None:
        """Look inside of one of the first, if that is worth it: this is called in front of every module."""


FORWARD_WATCHERS: list[ForwardWatcher] = []

_forward = spans.automatic_typed_span(FORWARD, model=int, module=str, rows=int, columns=int)
FIRST_FORWARDS = 3
"""Of each model, with gradients and without: they take seconds, because kernels are compiled and loaded."""
MERGED = ("_compiled_call_impl", "_call_impl")
"""The names in torch's `Module.__call__`. If there are no others, the wrapper does the same itself to save a call."""


def wrap_call(original: Function, hook: Hook) -> Function:
    """Wrap `Module.__call__`. The outermost call of a thread is a model's forward; all others are passed on."""
    import torch

    inside, none_inside, is_none = INSIDE, _passes_on(original), MODELS.is_none
    task = task_under_way(hook)
    enter, after = outside_graphs(hook.timed(begin_forward)), hook.timed(end_forward)
    leave = outside_graphs(lambda opened, result, error: hook.leave(after, opened, result, error))
    leave_by_error = outside_graphs(
        lambda opened, error, newest, is_leaving: hook.leave_by_error(
            after, opened, error, newest, is_leaving=is_leaving
        )
    )
    look = outside_graphs(hook.timed(inside_forward))

    def in_first(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            look()
        except own_failure() as error:
            hook.failed(error)
        return original(module, *args, **kwargs)

    def at_root(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if inside.first:
            return in_first(module, args, kwargs)
        # It is no model, or one that is recomputed for its backward, layer by layer: a step has hundreds of these.
        if is_none(module) or task() != NO_TASK:
            inside.model = True
            try:
                return original(module, *args, **kwargs)
            finally:
                inside.model = False
        inside.model = True
        opened, is_leaving, newest = ENTERING, False, spans.newest
        try:
            try:
                opened = enter(module, args, kwargs, hook)
                inside.first = opened is not NOT_ENTERED and opened.is_first
                inside.model = not inside.first
            except own_failure() as error:
                opened = NOT_ENTERED
                hook.failed(error)
            result = original(module, *args, **kwargs)
            is_leaving = True
            leave(opened, result, None)
            return result
        except BaseException as error:
            leave_by_error(opened, error, newest, is_leaving)
            raise
        finally:
            inside.model = inside.first = False

    call = none_inside(original, inside, hook, at_root)
    frames = torch._C._dynamo.eval_frame
    for function in (call, at_root, in_first, Models.is_none):
        skip_frames(frames, function.__code__)
    call = functools.wraps(original)(call)
    # Dynamo traces this instead of our wrapper.
    call._torchdynamo_inline = original  # type: ignore[attr-defined]
    return call


def task_under_way(hook: Hook) -> Callable[[], int]:
    """Return what says which backward this thread works for, `NO_TASK` if none."""
    import torch

    task = torch._C._current_graph_task_id
    timed = hook.timed(task)
    return task if timed is task else outside_graphs(timed)


def _passes_on(original: Function) -> Any:
    """Return what makes the wrapper: one that replaces torch's function if its body is known, else one around it."""
    code = getattr(original, "__code__", None)
    return _merged if code is not None and code.co_names == MERGED else _around


def _merged(_original: Function, inside: Inside, hook: Hook, at_root: Function) -> Function:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if not inside.model and hook.live:
            return at_root(self, args, kwargs)
        if self._compiled_call_impl is not None:
            return self._compiled_call_impl(*args, **kwargs)
        return self._call_impl(*args, **kwargs)

    return __call__


def _around(original: Function, inside: Inside, hook: Hook, at_root: Function) -> Function:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if not inside.model and hook.live:
            return at_root(self, args, kwargs)
        return original(self, *args, **kwargs)

    return __call__


class Opened(NamedTuple):
    """A forward that is under way."""

    span: Any
    tokens: list[Any]
    """Of the watchers."""
    is_first: bool
    is_without_adapters: bool


class First:
    """How many forwards of each model have begun, with gradients and without."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, bool], int] = {}

    def met(self, number: int) -> bool:
        """Count a forward of this model; return whether it is one of the first, if anybody watches."""
        from torch import is_grad_enabled

        key = number, is_grad_enabled()
        begun = self._begun[key] = self._begun.get(key, 0) + 1
        return begun <= FIRST_FORWARDS and bool(FORWARD_WATCHERS)


FIRST = First()


def begin_forward(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hook: Hook) -> Any:
    """Open the span; a module without parameters has none."""
    number = MODELS.number(module)
    if not number:
        return NOT_ENTERED
    hook.row.fired()
    for watcher in FORWARD_WATCHERS:
        watcher.meet(module)
    if WATCHERS:
        begin_phase(number)
    BETWEEN.begins()
    tokens = [watcher.begin_forward() for watcher in FORWARD_WATCHERS]
    rows, columns = shape_of(args, kwargs)
    span = _forward(number, type(module).__name__, rows, columns).__enter__()
    return Opened(span, tokens, FIRST.met(number), number in WITHOUT_ADAPTERS)


def begin_phase(number: int) -> None:
    """Tell of the phase that seems to begin with a forward."""
    from torch import is_grad_enabled

    computes = -number if number in WITHOUT_ADAPTERS else number  # without its adapters it is another model
    BOUNDARIES.begins(*((UPDATE,) if is_grad_enabled() else (LOG_PROBS, computes)))


def end_forward(opened: Any, result: Any, error: BaseException | None) -> None:
    """Close the span, which says whether a backward may follow, and whether it was without adapters."""
    span, tokens = opened.span, opened.tokens
    output = None if error is not None else tensor_in(result)
    has_gradient = output is not None and output.requires_grad
    if has_gradient:
        span.set(gradient=True)
    elif opened.is_without_adapters:
        span.set(without_adapters=True)
    span.__exit__(None if error is None else type(error), error)
    for watcher, token in zip(FORWARD_WATCHERS, tokens, strict=True):
        watcher.end_forward(token)
    BETWEEN.ends(output, has_gradient=has_gradient)


def inside_forward() -> None:
    """Tell watchers that a model is being computed."""
    for watcher in FORWARD_WATCHERS:
        watcher.inside_forward()


def shape_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the first two sizes of a model's input: for a language model, how many sequences and how long.

    While a model is traced or exported, the sizes are symbols, and asking for their values would specialize the graph.
    """
    given = args[0] if args else kwargs.get("input_ids")
    sizes = (*getattr(given, "shape", ())[:2], 0, 0)
    return (sizes[0], sizes[1]) if sizes[0].__class__ is int and sizes[1].__class__ is int else (0, 0)


def tensor_in(result: Any) -> Any:
    """Return the first tensor of a model's output: itself, its logits or one of its items; None without any."""
    for found in (result, getattr(result, "logits", None), *_items(result)):
        if hasattr(found, "requires_grad"):
            return found
    return None


def _items(result: Any) -> Iterable[Any]:
    """Return the items of a tuple, a list, a dictionary or an object."""
    if isinstance(result, dict):
        return result.values()
    return result if isinstance(result, (tuple, list)) else getattr(result, "__dict__", {}).values()


# ---- weights ----------------------------------------------------------------------------------------------------


def begin_load(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Open the span of a copy of weights into a whole model."""
    number = MODELS.number(args[0])
    return spans.automatic_span(LOAD_WEIGHTS, model=number, by="torch").__enter__() if number else None
