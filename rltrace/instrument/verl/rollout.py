"""verl's rollout: the server of a replica, the engine's workers beneath it, agent loops and their requests."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from rltrace.hooks.arguments import keep_self
from rltrace.hooks.patching import PatchSet, end_span
from rltrace.hooks.serving import Serving
from rltrace.hooks.trajectories import name_trajectories, of_trajectory
from rltrace.instrument.torch.devices import device_of
from rltrace.record import lifecycle, spans

# ---- server -----------------------------------------------------------------------------------------------------


def identify_server(patches: PatchSet, target: str) -> None:
    """Hook a server's `__init__`."""
    patches.around(target, keep_self, become_server)


def become_server(server: Any, _result: Any, error: BaseException | None) -> None:
    """Say whose server this process is: one that shares the trainer's GPUs is on its first rank's lane."""
    if error is None:
        # Of servers that prefill or decode alone each knows its own ranks, and not where among its replica's they are.
        is_whole = getattr(server, "_disaggregation_role", "null") == "null"
        shares = server.rollout_mode.name == "HYBRID" and is_whole
        lifecycle.identify(role="server", **({"rank": first_rank(server)} if shares else {}))


def first_rank(server: Any) -> int:
    """Return the first of the trainer's ranks whose GPUs a server runs on; replicas lie one after the other."""
    config = server.config
    ranks = config.tensor_model_parallel_size * config.data_parallel_size
    ranks *= getattr(config, "pipeline_model_parallel_size", 1)
    return int(server.replica_rank * ranks + server.node_rank * gpus_per_node(server, ranks))


def gpus_per_node(server: Any, ranks: int) -> int:
    """Return the GPUs per node of a replica with this many ranks: SGLang's server knows only its number of nodes."""
    return int(getattr(server, "gpus_per_node", None) or ranks // server.nnodes)


def serve(patches: PatchSet, target: str) -> None:
    """Hook a server's `generate`, which is called once per request."""
    serving = Serving(request_args, token_args)
    patches.around(target, serving.begin, serving.end, Serving.EMITS, at_boundaries=False)


def request_args(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Describe a request as far as its call names it; verl passes its arguments by name."""
    known: dict[str, Any] = {}
    if "request_id" in kwargs:
        known["request_id"] = str(kwargs["request_id"])
    if kwargs.get("prompt_ids") is not None:
        known["prompt_tokens"] = len(kwargs["prompt_ids"])
    return known


def token_args(result: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return how many tokens a request came back with: a list of them, or what holds one."""
    tokens = getattr(result, "token_ids", result)
    return {"tokens": len(tokens)} if isinstance(tokens, (list, tuple)) else {}


# ---- engine -----------------------------------------------------------------------------------------------------


def receive_weights(patches: PatchSet, target: str) -> None:
    """Hook what the engine's worker does in a sync; by then it sees its device."""
    patches.around(target, begin_receive, end_span, ("weight_sync.receive",))


def begin_receive(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Say whose engine this process is, and open the span."""
    place = getattr(args[0], "local_rank", 0)
    lifecycle.identify(role="engine", **device_of(f"cpu-{place}", place))
    return spans.automatic_span("weight_sync.receive").__enter__()


# ---- agent loops ------------------------------------------------------------------------------------------------


def trajectory(patches: PatchSet, target: str) -> None:
    """Hook one trajectory: its agent loop, and the scoring behind it."""
    name_trajectories(patches, target, trajectory_args)


def trajectory_args(_worker: Any, _sampling_params: Any = None, trajectory: Any = None, **_: Any) -> dict[str, Any]:
    """Return the step, the sample and the repetition of a trajectory, as verl numbers them."""
    return {} if not isinstance(trajectory, dict) else {k: v for k, v in trajectory.items() if isinstance(v, int)}


def agent_loops(patches: PatchSet, target: str) -> None:
    """Hook the `__init__` of all agent loops: the class of each loop is hooked before its first loop runs.

    verl makes a loop of whatever class a configuration or `@register` names, and only then imports its module.
    """

    def watch(loop: Any, _result: Any, error: BaseException | None) -> None:
        owner = runs_in(type(loop))
        if error is None and owner is not None and owner not in watched:
            watched.add(owner)
            patches.span(f"{owner.__module__}:{owner.__qualname__}.run", "agent_loop.run", loop_args_in(owner))

    watched: weakref.WeakSet[type] = weakref.WeakSet()
    patches.around(target, keep_self, watch)


def runs_in(kind: type) -> type | None:
    """Return the class that defines the `run` of this class's loops."""
    return next((base for base in kind.__mro__ if "run" in vars(base)), None)


def loop_args_in(owner: type) -> Callable[..., dict[str, Any] | None]:
    """Return what names the loop of a call, unless the call is made by the loop's own `run`, of another class."""

    def loop_args(loop: Any, *_: Any, **__: Any) -> dict[str, Any] | None:
        return {"loop": type(loop).__name__} if runs_in(type(loop)) is owner else None

    return loop_args


def tool_call(patches: PatchSet, target: str) -> None:
    """Hook one call of a tool."""
    patches.span(target, "agent_loop.tool_call", tool_args)


def tool_args(_loop: Any, call: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return the name of the tool; its arguments are the model's text and are not recorded."""
    return {"tool": str(getattr(call, "name", "")), **of_trajectory()}


def request(patches: PatchSet, target: str) -> None:
    """Hook one request as an agent loop sees it, with its way to the server and back."""
    patches.span(target, "agent_loop.request", turn_args, token_args)


def turn_args(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Describe a request, with the trajectory that it is a turn of."""
    return {**request_args(*args, **kwargs), **of_trajectory()}
