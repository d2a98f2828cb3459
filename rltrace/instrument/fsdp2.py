"""FSDP2 (`fully_shard`): its collectives, and the forward and backward of each module that it shards.

Source read: torch 2.6 to 2.13, torch/distributed/fsdp/_fully_shard. Spans are of the host: on a CPU the collective
itself, on a GPU its launch.
"""

from __future__ import annotations

import functools
import os.path
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rltrace import recorder
from rltrace.patching import Function, Hook, PatchSet

PACKAGE = "torch.distributed.fsdp._fully_shard"

MakeSpan = Callable[..., Any]
"""`recorder.span`, or what measures the same place on the device."""
Wanted = Callable[[str], bool]
"""Whether the module at a path is watched; `module_of_state` says what a path is."""


def every(_path: str) -> bool:
    """All of them are."""
    return True


def only_root(path: str) -> bool:
    """The whole model is."""
    return not path


class Fsdp2:
    """Collectives, forward and backward."""

    name = "fsdp2"
    supports = ("torch >= 2.6, < 2.14",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        # The names that FSDPParamGroup calls are those in its own module.
        patches.span(f"{PACKAGE}._fsdp_param_group:foreach_all_gather", "fsdp.all_gather", gather_args, gather_bytes)
        patches.span(f"{PACKAGE}._fsdp_param_group:foreach_reduce", "fsdp.reduce_scatter", reduce_args, reduce_bytes)
        patches.wrap(f"{PACKAGE}._fsdp_state:FSDPState.init", watch_forwards, ("fsdp.forward",))
        backwards = Backwards()
        patches.around(
            f"{PACKAGE}._fsdp_state:FSDPState._pre_backward", backwards.begin, leave_open, ("fsdp.backward",)
        )
        patches.around(f"{PACKAGE}._fsdp_param_group:FSDPParamGroup.post_backward", keep_group, backwards.end)


# ---- collectives ------------------------------------------------------------------------------------------------


def gather_args(fsdp_params: list[Any], group: Any, *_: Any, **__: Any) -> dict[str, Any] | None:
    """Arguments of an all-gather; none at one rank, where nothing moves."""
    ranks = group.size()
    return {"module": module_of(fsdp_params), "tensors": len(fsdp_params), "ranks": ranks} if ranks > 1 else None


def gather_bytes(result: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Size of the gathered tensors, all ranks' shards together."""
    return tensor_args(result.all_gather_output)


def reduce_args(
    fsdp_params: list[Any], unsharded_grads: list[Any], reduce_scatter_group: Any, *_: Any, **__: Any
) -> dict[str, Any] | None:
    """Arguments of a reduce-scatter; none at one rank, where nothing moves."""
    ranks = 1 if reduce_scatter_group is None else reduce_scatter_group.size()
    return {"module": module_of(fsdp_params), "tensors": len(unsharded_grads), "ranks": ranks} if ranks > 1 else None


def reduce_bytes(result: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Size of the unsharded gradients that go in."""
    return tensor_args(result[0])


def tensor_args(tensor: Any) -> dict[str, Any]:
    """Bytes and dtype of a tensor."""
    return {"bytes": tensor.numel() * tensor.element_size(), "dtype": str(tensor.dtype).removeprefix("torch.")}


def module_of(fsdp_params: list[Any]) -> str:
    """The path that the parameters' names have in common, which is the module that was sharded; "" is the root."""
    paths = [os.path.dirname((param._param_fqn or "").replace(".", "/")) for param in fsdp_params]
    return without_wrappers(os.path.commonpath(paths).replace("/", "."))


@functools.cache
def without_wrappers(path: str) -> str:
    """A module's path as the model's author knows it, without checkpoint and compile wrappers."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})


def module_of_state(state: Any) -> str:
    """The path of the module that a state shards; "" is the root, and what has no parameters of its own."""
    return module_of_groups(groups_of(state))


def module_of_groups(groups: list[Any]) -> str:
    """The same of a state's groups."""
    return without_wrappers(groups[0]._module_fqn or "") if groups else ""


def groups_of(state: Any) -> list[Any]:
    """Parameter groups of a state: one up to torch 2.11, any number in 2.13."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [group for group in [state._fsdp_param_group] if group is not None]


# ---- forward ----------------------------------------------------------------------------------------------------


def watch_forwards(
    original: Function, hook: Hook, span: MakeSpan = recorder.span, wanted: Wanted = every, *, waits: bool = True
) -> Function:
    """Wrap `FSDPState.init`, so that each sharded module gets a hook before and one after its forward.

    Module hooks, not `FSDPState._post_forward`: checkpointing stops a recomputed forward by an exception as soon as it
    has what it needs, and only a hook registered with `always_call` sees that end.

    Args:
        original: `FSDPState.init`.
        hook: That this is one of.
        span: Makes what is opened.
        wanted: Chooses modules.
        waits: Whether it begins before FSDP waits for the gathered parameters; else behind that.
    """
    forwards = Forwards(hook, span, wanted, waits=waits)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if hook.live:
            try:
                state = args[0]
                forwards.attach(state._modules, lambda: module_of_state(state))
            except Exception as error:
                hook.failed(error)
        return result

    return init


class Forwards:
    """The open forward spans of each thread, innermost last."""

    def __init__(
        self, hook: Hook, span: MakeSpan = recorder.span, wanted: Wanted = every, *, waits: bool = True
    ) -> None:
        self._hook = hook
        self._span = span
        self._wanted = wanted
        self._waits = waits
        self._open = threading.local()

    def attach(self, modules: Iterable[Any], path: Callable[[], str]) -> list[Any]:
        """Register the hooks on modules that are sharded together; returns what removes them.

        Args:
            modules: All of them.
            path: Says where in their model they lie, from their first forward on. Those that are not wanted are left
                alone then.
        """
        from torch import _disable_dynamo  # a compiled model must not trace into the tracer

        handles: list[Any] = []

        def before(module: Any, _args: Any) -> None:
            self._hook.enter(self._begin, (path, module, handles), {})

        def after(module: Any, _args: Any, _result: Any) -> None:
            self._hook.leave(self._end, module, None, None)

        for module in modules:
            # Behind FSDP's own hook, which reshards; before the forward in front of it or behind it.
            handles.append(module.register_forward_pre_hook(_disable_dynamo(before), prepend=self._waits))
            handles.append(module.register_forward_hook(_disable_dynamo(after), always_call=True))
        return handles

    def _begin(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        import torch

        path_now, module, handles = args
        path = path_now()
        if not self._wanted(path):
            remove(handles)
            return
        in_backward = torch._C._current_graph_task_id() != -1
        late = {"recompute": True} if in_backward else {}
        opened = self._span("fsdp.forward", module=path, **late).__enter__()
        self._stack().append((module, opened))

    def _end(self, module: Any, _result: Any, _error: BaseException | None) -> None:
        stack = self._stack()
        if all(entry[0] is not module for entry in stack):
            return
        while stack:
            inner, opened = stack.pop()
            opened.__exit__(None)
            if inner is module:
                return

    def _stack(self) -> list[tuple[Any, Any]]:
        stack: list[tuple[Any, Any]] = self._open.__dict__.setdefault("stack", [])
        return stack


def remove(handles: list[Any]) -> None:
    """Take hooks on modules away."""
    while handles:
        handles.pop().remove()


# ---- backward ---------------------------------------------------------------------------------------------------


class Backwards:
    """The open backward spans, by parameter group: they may end on another thread than they began on."""

    def __init__(self, span: MakeSpan = recorder.span, wanted: Wanted = every) -> None:
        self._span = span
        self._wanted = wanted
        self._open: dict[int, OpenBackward] = {}

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open the span of a state that is about to unshard for its backward."""
        self._begin(*self.look(args, kwargs))

    def look(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """The state, and whether it is told a second time: a module with several outputs is told once per output."""
        return args[0], args[0]._training_state.name == "PRE_BACKWARD"

    def begin_unsharded(self, looked: tuple[Any, bool], _result: Any, error: BaseException | None) -> None:
        """Open the span of a state that has just unsharded."""
        if error is None:
            self._begin(*looked)

    def _begin(self, state: Any, is_told_again: bool) -> None:
        groups = groups_of(state)
        path = module_of_groups(groups)
        if not groups or not self._wanted(path):
            return
        if (unfinished := self._open.get(id(groups[0]))) is not None:
            if is_told_again:
                return
            unfinished.span.__exit__(RuntimeError)  # a backward that raised left it open
        opened = OpenBackward(self._span("fsdp.backward", module=path).__enter__(), len(groups))
        self._open.update((id(group), opened) for group in groups)

    def end(self, group: Any, _result: Any, _error: BaseException | None) -> None:
        """Close the span once all groups of its state have reduced their gradients."""
        opened = self._open.pop(id(group), None)
        if opened is None:
            return
        opened.groups -= 1
        if opened.groups == 0:
            opened.span.__exit__(None)


@dataclass
class OpenBackward:
    """A backward span and how many parameter groups it still waits for."""

    span: Any
    groups: int


def keep_group(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Remember whose backward ends."""
    return args[0]


def leave_open(_token: Any, _result: Any, _error: BaseException | None) -> None:
    """The span goes on until the gradients are reduced."""


# ---- memory -----------------------------------------------------------------------------------------------------


class Shards:
    """This rank's shards of a model's parameters; its plain parameters before the model is sharded.

    Not `model.parameters()`: while a module is unsharded those are the gathered copies. The model is walked once, which
    takes longer than asking its parameters, and is not kept alive.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self._fsdp_params: list[weakref.ref[Any]] = []

    def __call__(self) -> list[Any]:
        """The shards as they are now."""
        model = self._model()
        if model is None:
            return []
        if not self._fsdp_params and _state_of(model) is not None:
            self._fsdp_params = [weakref.ref(param) for param in _fsdp_params_of(model)]
        if not self._fsdp_params:
            return list(model.parameters())
        return [param.sharded_param for known in self._fsdp_params if (param := known()) is not None]


def _fsdp_params_of(model: Any) -> list[Any]:
    states = {id(state): state for state in map(_state_of, model.modules()) if state is not None}
    return [param for state in states.values() for group in groups_of(state) for param in group.fsdp_params]


def _state_of(module: Any) -> Any:
    get_state = getattr(type(module), "_get_fsdp_state", None)
    return None if get_state is None else get_state(module)
