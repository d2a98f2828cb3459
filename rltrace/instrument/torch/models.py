"""Whole models, in any program: `model.forward` of what the program calls itself, and copies of weights into a model.

Of each call only the outermost module is a model: what it calls in turn costs one look at its thread. Global hooks on
modules would take 2 µs of each of them, and torch.compile warns of these. Source read: torch 2.6 to 2.13,
torch/nn/modules/module.py, torch/_dynamo/variables/nn_module.py.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from rltrace.events import FORWARD, LOAD_WEIGHTS
from rltrace.hooks.boundaries import WATCHERS
from rltrace.hooks.patching import Function, Hook, PatchSet, end_span
from rltrace.host.interruption import own_failure
from rltrace.instrument.torch.autograd import TASK, is_in_backward
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
    """The models of this process, numbered from 1: what shares its first parameter, as a wrapper, has one number."""

    def __init__(self) -> None:
        self._modules: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.met = 0
        """How many modules there are; what was found out about all of them is old when this has grown."""

    def number(self, module: Any) -> int:
        """Return the number of a module's model; 0 for a module without parameters, as a loss."""
        known = self._modules.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        number = self._number_of(next(module.parameters(), None))
        self._modules[id(module)] = weakref.ref(module), number
        self.met += 1
        return number

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


class Learned:
    """Which models an optimizer holds; looked up once, and again when there are more modules."""

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
    """Where a thread is."""

    model = False
    """In a model, or in what calls models by itself, as a generation does."""
    generation = False


INSIDE = Inside()


class ForwardWatcher(Protocol):
    """What looks at each forward of a whole model from both sides; what it takes is not the forward's time."""

    def begin_forward(self) -> Any:
        """Look before it; return what `end_forward` takes."""

    def end_forward(self, token: Any, /) -> None:
        """Look behind it."""


FORWARD_WATCHERS: list[ForwardWatcher] = []

_forward = spans.automatic_typed_span(FORWARD, model=int, module=str, rows=int, columns=int)
MERGED = ("_compiled_call_impl", "_call_impl")
"""All that torch's `Module.__call__` knows; where it is so, the wrapper does it too, which saves a call of each."""


def wrap_call(original: Function, hook: Hook) -> Function:
    """Wrap `Module.__call__`: the outermost call of a thread is a model's forward, all others are passed on."""
    import torch

    inside, none_inside = INSIDE, _passes_on(original)
    enter, leave = outside_graphs(hook.timed(begin_forward)), outside_graphs(hook.timed(end_forward))

    def at_root(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inside.model = True
        try:
            opened = None
            try:
                opened = enter(module, args, kwargs, hook)
            except own_failure() as error:
                hook.failed(error)
            try:
                result = original(module, *args, **kwargs)
            except BaseException as error:
                _left(hook, leave, opened, None, error)
                raise
            _left(hook, leave, opened, result, None)
            return result
        finally:
            inside.model = False

    call = none_inside(original, inside, hook, at_root)
    frames = torch._C._dynamo.eval_frame
    for function in (call, at_root, _left):
        skip_frames(frames, function.__code__)
    call = functools.wraps(original)(call)
    # What dynamo reads in our place.
    call._torchdynamo_inline = original  # type: ignore[attr-defined]
    return call


def _passes_on(original: Function) -> Any:
    """Return what makes the wrapper: one that does what torch's function does, if that is all it does."""
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


def _left(hook: Hook, leave: Function, opened: Any, result: Any, error: BaseException | None) -> None:
    if opened is None:
        return
    try:
        leave(opened, result, error)
    except own_failure() as failure:
        hook.failed(failure)


def begin_forward(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hook: Hook) -> Any:
    """Open the span; a module without parameters has none, nor one that is called again for its backward."""
    number = 0 if is_in_backward() else MODELS.number(module)
    if not number:
        return None
    hook.row.fired()
    if WATCHERS:
        begin_phase(number)
    BETWEEN.begins()
    tokens = [watcher.begin_forward() for watcher in FORWARD_WATCHERS]
    rows, columns = shape_of(args, kwargs)
    return _forward(number, type(module).__name__, rows, columns).__enter__(), tokens


def begin_phase(number: int) -> None:
    """Tell of the phase that seems to begin with a forward."""
    from torch import is_grad_enabled

    BOUNDARIES.begins(*((UPDATE,) if is_grad_enabled() else (LOG_PROBS, number)))


def end_forward(opened: Any, result: Any, error: BaseException | None) -> None:
    """Close the span: it says whether a backward may follow."""
    span, tokens = opened
    output = None if error is not None else tensor_in(result)
    has_gradient = output is not None and output.requires_grad
    if has_gradient:
        span.args = {"gradient": True}
    span.__exit__(None if error is None else type(error), error)
    for watcher, token in zip(FORWARD_WATCHERS, tokens, strict=True):
        watcher.end_forward(token)
    BETWEEN.ends(output, has_gradient=has_gradient)


def shape_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the first two sizes of what a model is called with: the sequences of a language model and their length.

    While a model is traced or exported its sizes are symbols, and to ask for their values would bind it to these.
    """
    given = args[0] if args else kwargs.get("input_ids")
    sizes = (*getattr(given, "shape", ())[:2], 0, 0)
    return (sizes[0], sizes[1]) if sizes[0].__class__ is int and sizes[1].__class__ is int else (0, 0)


def tensor_in(result: Any) -> Any:
    """Return the first tensor of what a model returned: itself, its logits, or one of its items; None without any."""
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
