"""vLLM behind a server or an actor, which a trainer asks to generate, to sleep and to wake up.

In: `AsyncLLM` in the process that answers. Out: its phases, on the lane of the GPU that Ray or a launcher gave it. A
trainer's instrumentation names these hooks where its own server is imported: an `AsyncLLM` of another program has no
phases of a step.

Source read: vLLM 0.23 and 0.29, v1/engine/async_llm.py.
"""

from __future__ import annotations

import os
from typing import Any

from rltrace.events import WAKE_UPS, wake_up_of
from rltrace.hooks.arguments import argument
from rltrace.hooks.patching import PatchSet, end_span, nothing_before
from rltrace.hooks.serving import Serving
from rltrace.instrument.torch.devices import on_gpu
from rltrace.record import lifecycle, spans

ENGINE = "vllm.v1.engine.async_llm:AsyncLLM"


def name_hooks(patches: PatchSet) -> None:
    """Name the hooks on an engine's calls."""
    serving = Serving(request_args, lambda _nothing: {})  # it yields its answers
    patches.around(f"{ENGINE}.__init__", nothing_before, become_server)
    patches.around(f"{ENGINE}.generate", serving.begin, serving.end, Serving.EMITS, at_boundaries=False)
    patches.span(f"{ENGINE}.sleep", "rollout.sleep", sleep_args)
    patches.around(f"{ENGINE}.wake_up", begin_wake_up, end_span, WAKE_UPS)
    patches.span(f"{ENGINE}.collective_rpc", "engine.collective_rpc", rpc_args)


def become_server(_token: Any, _result: Any, error: BaseException | None) -> None:
    """Say that this process answers requests, and on which GPU; without one it has a lane of its own."""
    if error is None:
        lifecycle.identify(role="server", **(on_gpu() if os.environ.get("CUDA_VISIBLE_DEVICES") else {}))


def request_args(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return by which id the engine knows a request."""
    request_id = argument("request_id", 3, args, kwargs, None)
    return {} if request_id is None else {"request_id": str(request_id)}


def sleep_args(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return how deep the engine is to sleep."""
    return {"level": argument("level", 1, args, kwargs, 1)}


def rpc_args(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return what each of the engine's workers is asked to do: to receive weights, often."""
    method = argument("method", 1, args, kwargs)
    return {"method": method if isinstance(method, str) else getattr(method, "__name__", "")}


def begin_wake_up(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Open the phase of what wakes up."""
    tags = argument("tags", 1, args, kwargs, None)
    return spans.automatic_span(wake_up_of(tags), tags=None if tags is None else list(tags)).__enter__()
