"""FSDP2 (`fully_shard`): its collectives, and the forward and backward of each module that it shards.

Source read: torch 2.6 to 2.13, torch/distributed/fsdp/_fully_shard. Spans are of the host: on a CPU the collective
itself, on a GPU its launch.
"""

from __future__ import annotations

import functools
import os.path
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from rltrace.hooks.arguments import argument, attributes, keep_self
from rltrace.hooks.hook import Function, Hook
from rltrace.hooks.patching import PatchSet, end_span
from rltrace.hooks.wrapping import wrap_function
from rltrace.host.interruption import own_failure
from rltrace.instrument.torch.modules import Forwards, ForwardSpans, OpenForward, without_wrappers
from rltrace.instrument.torch.tensor_sizes import tensor_args
from rltrace.record import repeated, spans

PACKAGE = "torch.distributed.fsdp._fully_shard"

STATE, GROUP = f"{PACKAGE}._fsdp_state:FSDPState", f"{PACKAGE}._fsdp_param_group:FSDPParamGroup"
GATHERED = (
    *attributes(f"{PACKAGE}._fsdp_param:FSDPParam", "_param_fqn"),
    *attributes(f"{PACKAGE}._fsdp_collectives:AllGatherResult", "all_gather_output", "param_all_gather_input_dtypes"),
)
OFFLOADED = attributes(f"{PACKAGE}._fsdp_param:FSDPParam", "offload_to_cpu", "_sharded_param_data")
NAMED = attributes(GROUP, "_module_fqn")
"""What says which module a state shards."""

OpenBackward = Callable[[str], Any]
"""A function that opens what is around a backward of the module at a path."""


class Fsdp2:
    """Records collectives, forwards and backwards."""

    name = "fsdp2"
    supports = ("torch >= 2.6",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        # The names that FSDPParamGroup calls are those in its own module.
        gathers, group = Gathers(), f"{PACKAGE}._fsdp_param_group"
        patches.around(f"{group}:foreach_all_gather", gathers.begin, gathers.end, ("fsdp.all_gather",), reads=GATHERED)
        inputs = f"{PACKAGE}._fsdp_collectives:_get_param_all_gather_inputs"
        patches.span(inputs, "offload.h2d", offloaded_args, reads=OFFLOADED)
        patches.wrap(f"{GROUP}.wait_for_unshard", LoneCopies().watch, ("offload.h2d",), reads=(*OFFLOADED, *GATHERED))
        patches.wrap(f"{group}:foreach_reduce", Reductions().watch, ("fsdp.reduce_scatter",), reads=GATHERED[:1])
        patches.wrap(f"{STATE}.init", span_forwards, ("fsdp.forward",), reads=(*attributes(STATE, "_modules"), *NAMED))
        backwards = BackwardSpans()
        told = (*attributes(STATE, "_training_state"), *NAMED)
        patches.wrap(f"{STATE}._pre_backward", backwards.watch_beginnings, ("fsdp.backward",), reads=told)
        patches.wrap(f"{GROUP}.post_backward", backwards.watch_ends)


# ---- collectives ------------------------------------------------------------------------------------------------


class Launched(threading.local):
    """What this thread launched last."""

    module: str
    """The path of the module whose collective it was, for what times it on the GPU."""
    replicas: Any = None
    """The group of ranks that hold the same shard, while gradients are reduced on a mesh of two dimensions (HSDP)."""


LAUNCHED = Launched()


class Gathers:
    """All-gathers. Each one has the arguments that the first gather of the same parameters had.

    A step has six hundred of them, between calls that leave nothing of a hook in the processor's caches. So each
    function call and each attribute that a hook can do without counts.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], Any, tuple[Any, ...]]] = {}
        """The first parameter, what opens the span and its arguments, by the id of a group's list of parameters."""

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Open the span. At one rank nothing moves, and there is none."""
        fsdp_params = args[0] if args else kwargs["fsdp_params"]
        known = self._known.get(id(fsdp_params))
        if known is not None and known[0]() is fsdp_params[0]:
            LAUNCHED.module = known[2][0]
            return known[1](*known[2]).__enter__()
        group = argument("group", 1, args, kwargs)
        return FirstGather.begin(fsdp_params, group.size()) if group.size() > 1 else None

    def end(self, opened: Any, result: Any, error: BaseException | None) -> None:
        """Close the span. The first gather learns the size of the gathered tensors, all ranks' shards together."""
        if opened is None:
            return
        if isinstance(opened, FirstGather):
            if error is None:
                opened.learn(result.all_gather_output, self._known)
            opened = opened.span
        opened.__exit__(None if error is None else type(error), error)


_all_gather = spans.automatic_typed_span("fsdp.all_gather", module=str, tensors=int, ranks=int, bytes=int, dtype=str)
_replicated_all_gather = spans.automatic_typed_span(
    "fsdp.all_gather", module=str, tensors=int, ranks=int, replicas=int, bytes=int, dtype=str
)


class FirstGather(NamedTuple):
    """The first all-gather of a list of parameters, whose size is known when it is over."""

    span: Any
    fsdp_params: list[Any]
    said: dict[str, Any]

    @classmethod
    def begin(cls, fsdp_params: list[Any], ranks: int) -> FirstGather:
        """Open the span."""
        LAUNCHED.module = module_of(fsdp_params)
        said = {"module": LAUNCHED.module, "tensors": len(fsdp_params), "ranks": ranks}
        if (replicas := replicas_of(fsdp_params)) > 1:
            said["replicas"] = replicas
        return cls(spans.automatic_span("fsdp.all_gather", **said).__enter__(), fsdp_params, said)

    def learn(self, gathered: Any, known: dict[int, Any]) -> None:
        """Keep the arguments for the next gathers."""
        size = tensor_args(gathered)
        self.span.set(**size)
        opener = _replicated_all_gather if "replicas" in self.said else _all_gather
        values = (*self.said.values(), *size.values())
        known[id(self.fsdp_params)] = weakref.ref(self.fsdp_params[0]), opener, values


def replicas_of(fsdp_params: list[Any]) -> int:
    """Return how many ranks hold the same shard: more than 1 on a mesh of two dimensions."""
    return int(getattr(fsdp_params[0].mesh_info, "replicate_mesh_size", 1))


def offloaded_args(fsdp_params: list[Any]) -> dict[str, Any] | None:
    """Return the bytes of the shards that lie in the host's memory and are copied to be gathered; None if none do."""
    if not fsdp_params[0].offload_to_cpu:  # those of a group share the policy
        return None
    return {"what": SHARDS, "bytes": offloaded_bytes(fsdp_params)}


SHARDS = "shards"
"""What is copied, as `offload.h2d` says it."""


def offloaded_bytes(fsdp_params: list[Any]) -> int:
    """Return the bytes of the shards that lie in the host's memory."""
    return sum(param._sharded_param_data.nbytes for param in fsdp_params if param.offload_to_cpu)


class LoneCopies:
    """Copies of offloaded shards where one rank has them all: `FSDPParamGroup.wait_for_unshard` makes them itself.

    There is no all-gather then (torch 2.11 and 2.13), so nothing asks for its inputs.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        """The bytes of a group's shards, by the group's id: they are the same each time."""

    def watch(self, original: Function, hook: Hook) -> Function:
        """Wrap `wait_for_unshard`."""
        watched = wrap_function(original, hook, self.begin, end_span)

        @functools.wraps(original)
        def wait_for_unshard(*args: Any, **kwargs: Any) -> Any:
            try:
                is_lone = args[0].fsdp_params[0].offload_to_cpu and args[0]._all_gather_result is not None
            except own_failure():
                is_lone = False
            return (watched if is_lone else original)(*args, **kwargs)

        return wait_for_unshard

    def begin(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        """Open the span of a copy; none if an all-gather has copied."""
        group = args[0]
        if group._all_gather_result.param_all_gather_input_dtypes:
            return None
        known = self._known.get(id(group))
        if known is None or known[0]() is not group:
            known = self._known[id(group)] = weakref.ref(group), offloaded_bytes(group.fsdp_params)
        return _copy(SHARDS, known[1]).__enter__()


_copy = spans.automatic_typed_span("offload.h2d", what=str, bytes=int)


class Reductions:
    """Reduce-scatters. Parameters whose gradients nothing moves, at one rank, are known from their first on."""

    def __init__(self) -> None:
        self._alone: dict[int, weakref.ref[Any]] = {}
        """The first parameter of a group, by its id."""

    def watch(self, original: Function, hook: Hook) -> Function:
        """Wrap `foreach_reduce`."""
        alone, watched = self._alone, wrap_function(original, hook, self.begin, end_reduce)

        @functools.wraps(original)
        def foreach_reduce(*args: Any, **kwargs: Any) -> Any:
            try:
                known = alone[id(args[0][0])]() is args[0][0]
            except own_failure():
                known = False
            return (original if known else watched)(*args, **kwargs)

        return foreach_reduce

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Open the span of a reduce-scatter; none at one rank."""
        opened = open_reduce(*args, **kwargs)
        if opened is None and LAUNCHED.replicas is None:
            first = argument("fsdp_params", 0, args, kwargs)[0]
            self._alone[id(first)] = weakref.ref(first)
        return opened


def open_reduce(
    fsdp_params: list[Any], unsharded_grads: list[Any], reduce_scatter_group: Any, *_: Any, **__: Any
) -> Any:
    """Open the span of a reduce-scatter from the arguments of its call."""
    replicas = replicas_of(fsdp_params)
    ranks = 1 if reduce_scatter_group is None else reduce_scatter_group.size()
    if ranks == replicas == 1:
        return None
    LAUNCHED.module = module_of(fsdp_params)
    if replicas > 1:
        LAUNCHED.replicas = fsdp_params[0].mesh_info.replicate_process_group
    if ranks == 1:
        return None
    if replicas > 1:
        return _replicated_reduce_scatter(LAUNCHED.module, len(unsharded_grads), ranks, replicas).__enter__()
    return _reduce_scatter(LAUNCHED.module, len(unsharded_grads), ranks).__enter__()


_reduce_scatter = spans.automatic_typed_span("fsdp.reduce_scatter", module=str, tensors=int, ranks=int)
_replicated_reduce_scatter = spans.automatic_typed_span(
    "fsdp.reduce_scatter", module=str, tensors=int, ranks=int, replicas=int
)


def end_reduce(opened: Any, result: Any, error: BaseException | None) -> None:
    """Close the span with the size of the unsharded gradients that went in; a backward need not have all of them."""
    LAUNCHED.replicas = None
    if opened is None:
        return
    if error is None:
        opened.set(**tensor_args(result[0]))
    opened.__exit__(None if error is None else type(error), error)


def module_of(fsdp_params: list[Any]) -> str:
    """Return the path that the parameters' names share: the module that was sharded; "" is the root.

    It is looked up by what tells one group of a model from the others: comparing all names takes 13 µs, and a step has
    a thousand collectives.
    """
    group = fsdp_params[0]._param_fqn, fsdp_params[-1]._param_fqn, len(fsdp_params)
    path = _paths.get(group)
    if path is None:
        path = _paths[group] = common_path([param._param_fqn or "" for param in fsdp_params])
    return path


_paths: dict[tuple[str | None, str | None, int], str] = {}


def common_path(names: list[str]) -> str:
    """Return the path of the innermost module that holds all these parameters."""
    folders = [os.path.dirname(name.replace(".", "/")) for name in names]
    return without_wrappers(os.path.commonpath(folders).replace("/", "."))


def module_of_state(state: Any) -> str:
    """Return the path of the module that a state shards; "" is the root, and what has no parameters of its own."""
    return module_of_groups(groups_of(state))


def module_of_groups(groups: list[Any]) -> str:
    """Return the path of the module that a state's groups belong to."""
    return without_wrappers(groups[0]._module_fqn or "") if groups else ""


def groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of a state: one up to torch 2.11, any number in 2.13."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [group for group in [state._fsdp_param_group] if group is not None]


# ---- forward ----------------------------------------------------------------------------------------------------


def span_forwards(original: Function, hook: Hook) -> Function:
    """Wrap `FSDPState.init`, so that each forward of a sharded module is a span.

    Module hooks, not `FSDPState._post_forward`: checkpointing stops a recomputed forward by an exception as soon as it
    has what it needs, and only a hook registered with `always_call` sees that end.
    """
    return _attach(original, hook, ForwardSpans(hook))


def watch_forwards(
    original: Function, hook: Hook, opens: OpenForward, *, root_only: bool = False, waits: bool = True
) -> Function:
    """Wrap `FSDPState.init`, so that each sharded module gets a hook before and one after its forward.

    Args:
        original: `FSDPState.init`.
        hook: Gates and counts the hooks.
        opens: Opens what is around a forward.
        root_only: Whether only the root of each model is watched; hooks on other modules go at their first forward.
        waits: Whether a forward begins before FSDP waits for the gathered parameters, and not after that.
    """
    return _attach(original, hook, Forwards(hook, opens, root_only=root_only, waits=waits))


def _attach(original: Function, hook: Hook, forwards: Forwards) -> Function:
    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if hook.live:
            try:
                state = args[0]
                forwards.attach(state._modules, lambda: module_of_state(state))
            except own_failure() as error:
                hook.failed(error)
        return result

    return init


# ---- backward ---------------------------------------------------------------------------------------------------


class BackwardSpans:
    """The spans of backwards, by state and by the parameter groups of each: they end with the last group."""

    def __init__(self) -> None:
        self._of_state: dict[int, repeated.PlainStretch] = {}
        self._of_group: dict[int, repeated.PlainStretch] = {}
        self._kept: dict[int, weakref.ref[Any]] = {}
        """What forgets a state or a group once it is gone."""

    def watch_beginnings(self, original: Function, hook: Hook) -> Function:
        """Wrap `FSDPState._pre_backward`, which unshards; a module with several outputs is told once per output."""
        begin = hook.timed(repeated.beginning(hook, self._of_state, self._meet, _is_told_again))

        @functools.wraps(original)
        def pre_backward(*args: Any, **kwargs: Any) -> Any:
            if hook.live:
                begin(args[0])
            return original(*args, **kwargs)

        return pre_backward

    def watch_ends(self, original: Function, hook: Hook) -> Function:
        """Wrap `FSDPParamGroup.post_backward`, after which a backward is over."""
        end = hook.timed(repeated.ending(hook, self._of_group))

        @functools.wraps(original)
        def post_backward(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                if hook.live:
                    end(args[0])

        return post_backward

    def _meet(self, state: Any) -> repeated.PlainStretch | None:
        """Return the span of a state's backwards; None if it has no parameters."""
        groups = groups_of(state)
        if not groups:
            return None
        said = repeated.Said("fsdp.backward", {"module": module_of_groups(groups)})
        stretch = repeated.Stretch(said, len(groups))
        self._keep(self._of_state, state, stretch)
        for group in groups:
            self._keep(self._of_group, group, stretch)
        return stretch

    def _keep(self, known: dict[int, repeated.PlainStretch], of: Any, stretch: repeated.PlainStretch) -> None:
        known[id(of)] = stretch
        # All in C, so that no error from outside is lost there. The dead reference is what `pop` returns by default.
        self._kept[id(of)] = weakref.ref(of, functools.partial(known.pop, id(of)))


class Backwards:
    """The open backwards, by parameter group. They may end on another thread than they began on."""

    def __init__(self, opens: OpenBackward) -> None:
        self._opens = opens
        self._open: dict[int, UnfinishedBackward] = {}

    def watch_beginnings(self, original: Function, hook: Hook) -> Function:
        """Wrap `FSDPState._pre_backward`, so that a state's backward opens once it has unsharded."""
        return wrap_function(original, hook, self.look, self.begin_unsharded)

    def look(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """Return the state, and whether this is a repetition: a module with several outputs is told once per output."""
        return args[0], _is_told_again(args[0])

    def begin_unsharded(self, looked: tuple[Any, bool], _result: Any, error: BaseException | None) -> None:
        """Open the backward of a state that has just unsharded."""
        groups = groups_of(looked[0])
        if error is not None or not groups:
            return
        if (unfinished := self._open.get(id(groups[0]))) is not None:
            if looked[1]:
                return
            unfinished.span.__exit__(RuntimeError)  # a backward that raised left it open
        opened = UnfinishedBackward(self._opens(module_of_groups(groups)), len(groups))
        for group in groups:
            self._open[id(group)] = opened

    def watch_ends(self, original: Function, hook: Hook) -> Function:
        """Wrap `FSDPParamGroup.post_backward`, after which a backward is over."""
        is_open, end = self._open, hook.timed(self.end)

        @functools.wraps(original)
        def post_backward(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                if is_open and id(args[0]) in is_open and hook.live:
                    hook.leave(end, hook.enter(keep_self, args, kwargs), None, None)

        return post_backward

    def end(self, group: Any, _result: Any, _error: BaseException | None) -> None:
        """Close the backward once all groups of its state have reduced their gradients."""
        opened = self._open.pop(id(group), None)
        if opened is None:
            return
        opened.groups -= 1
        if opened.groups == 0:
            opened.span.__exit__(None)


def _is_told_again(state: Any) -> bool:
    return bool(state._training_state._name_ == "PRE_BACKWARD")


@dataclass(slots=True)
class UnfinishedBackward:
    """What is open, and how many parameter groups it still waits for."""

    span: Any
    groups: int


# ---- memory -----------------------------------------------------------------------------------------------------


class Shards:
    """This rank's shards of a model's parameters, or its plain parameters before the model is sharded.

    These are not `model.parameters()`, which are the gathered copies while a module is unsharded. The model is walked
    once, because that takes longer than asking its parameters, and it is not kept alive.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self._fsdp_params: list[weakref.ref[Any]] = []

    def __call__(self) -> list[Any]:
        """Return the shards as they are now."""
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
