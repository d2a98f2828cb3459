"""verl's rollout: the server of a replica, the engine's workers beneath it, agent loops and their requests."""

from __future__ import annotations

from typing import Any

from rltrace.hooks import boundaries
from rltrace.hooks.arguments import keep_self
from rltrace.hooks.patching import PatchSet, end_span
from rltrace.instrument.torch.devices import device_of
from rltrace.record import recorder

# ---- server -----------------------------------------------------------------------------------------------------


def identify_server(patches: PatchSet, target: str) -> None:
    """A hook on a server's `__init__`."""
    patches.around(target, keep_self, become_server)


def become_server(server: Any, _result: Any, error: BaseException | None) -> None:
    """Say whose server this process is: one that shares the trainer's GPUs is on its first rank's lane."""
    if error is None:
        # Of servers that prefill or decode alone each knows its own ranks, and not where among its replica's they are.
        is_whole = getattr(server, "_disaggregation_role", "null") == "null"
        shares = server.rollout_mode.name == "HYBRID" and is_whole
        recorder.identify(role="server", **({"rank": first_rank(server)} if shares else {}))


def first_rank(server: Any) -> int:
    """The first of the trainer's ranks whose GPUs a server runs on; replicas are laid out one after the other."""
    config = server.config
    ranks = config.tensor_model_parallel_size * config.data_parallel_size
    ranks *= getattr(config, "pipeline_model_parallel_size", 1)
    return int(server.replica_rank * ranks + server.node_rank * gpus_per_node(server, ranks))


def gpus_per_node(server: Any, ranks: int) -> int:
    """Of a replica with so many ranks: a server of SGLang's knows only on how many nodes it is."""
    return int(getattr(server, "gpus_per_node", None) or ranks // server.nnodes)


GENERATE = "rollout.generate"


class Generation:
    """The phase `rollout.generate` of a server: while at least one request is in flight.

    Of the requests the first and the last are edges of memory, and no other: a server answers hundreds in one thread.
    """

    def __init__(self) -> None:
        self._in_flight = 0
        self._phase: Any = None

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A request arrives."""
        known = request_args(*args, **kwargs)  # first: what it may raise must not leave a request in flight
        if not self._in_flight:
            boundaries.reached(boundaries.Edge((GENERATE,), is_end=False))
            self._phase = recorder.span(GENERATE).__enter__()
        self._in_flight += 1
        return recorder.span("server.request", **known).__enter__()

    def end(self, opened: Any, result: Any, error: BaseException | None) -> None:
        """Its tokens leave, or it is cancelled."""
        self._in_flight -= 1
        try:
            opened.set(**token_args(result))
        finally:
            end_span(opened, result, error)
            if self._in_flight == 0:
                self._phase.__exit__(None)
                boundaries.reached(boundaries.Edge((GENERATE,), error=error))


def serve(patches: PatchSet, target: str) -> None:
    """A hook on a server's `generate`, which is called once per request."""
    generation = Generation()
    patches.around(target, generation.begin, generation.end, (GENERATE, "server.request"), at_edges=False)


def request_args(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """What a request is, as far as its call names it; verl passes its arguments by name."""
    known: dict[str, Any] = {}
    if "request_id" in kwargs:
        known["request_id"] = str(kwargs["request_id"])
    if kwargs.get("prompt_ids") is not None:
        known["prompt_tokens"] = len(kwargs["prompt_ids"])
    return known


def token_args(result: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Tokens that a request came back with: a list of them, or what holds one."""
    tokens = getattr(result, "token_ids", result)
    return {"tokens": len(tokens)} if isinstance(tokens, (list, tuple)) else {}


# ---- engine -----------------------------------------------------------------------------------------------------


def receive_weights(patches: PatchSet, target: str) -> None:
    """A hook on what the engine's worker does in a sync; by then it sees its device."""
    patches.around(target, begin_receive, end_span, ("weight_sync.receive",))


def begin_receive(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Say whose engine this process is, and open the span."""
    place = getattr(args[0], "local_rank", 0)
    recorder.identify(role="engine", **device_of(f"cpu-{place}", place))
    return recorder.span("weight_sync.receive").__enter__()


# ---- agent loops ------------------------------------------------------------------------------------------------


def trajectory(patches: PatchSet, target: str) -> None:
    """A hook on one trajectory: its agent loop, and the scoring behind it."""
    patches.span(target, "agent_loop.trajectory", trajectory_args)


def trajectory_args(_worker: Any, _sampling_params: Any = None, trajectory: Any = None, **_: Any) -> dict[str, Any]:
    """Step, sample and repetition of a trajectory, as verl numbers them."""
    return {} if not isinstance(trajectory, dict) else {k: v for k, v in trajectory.items() if isinstance(v, int)}


def agent_loop(patches: PatchSet, target: str) -> None:
    """A hook on the agent loops that verl brings along."""
    patches.span(target, "agent_loop.run", loop_args)


def loop_args(loop: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Which loop it is."""
    return {"loop": type(loop).__name__}


def tool_call(patches: PatchSet, target: str) -> None:
    """A hook on one call of a tool."""
    patches.span(target, "agent_loop.tool_call", tool_args)


def tool_args(_loop: Any, call: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Name of the tool; its arguments are the model's text and are not recorded."""
    return {"tool": str(getattr(call, "name", ""))}


def request(patches: PatchSet, target: str) -> None:
    """A hook on one request as an agent loop sees it, with its way to the server and back."""
    patches.span(target, "agent_loop.request", request_args, token_args)
