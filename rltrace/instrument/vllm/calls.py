"""vLLM called from a program of its own: what generates, and what copies weights into the engine of this process.

Source read: vLLM 0.26, entrypoints/llm.py, v1/engine/async_llm.py and model_executor/models/utils.py. What the engine
does for a call is in `engine.py`.
"""

from __future__ import annotations

import threading
from typing import Any

from rltrace.events import GENERATE, LOAD_WEIGHTS
from rltrace.hooks.arguments import argument
from rltrace.hooks.patching import PatchSet, end_span
from rltrace.instrument.torch.generation import begin_generation, begin_request, end_generation, end_request
from rltrace.record import spans

LLM = "vllm.entrypoints.llm:LLM"
ASYNC = "vllm.v1.engine.async_llm:AsyncLLM"
LOADER = "vllm.model_executor.models.utils:AutoWeightsLoader"


class VllmCalls:
    """Makes each call that generates or copies weights a span."""

    name = "vllm_calls"
    supports = ("vllm >= 0.8.5",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        patches.around(f"{LLM}.generate", begin, end, (GENERATE,))
        patches.around(f"{LLM}.chat", begin_chat, end, (GENERATE,))
        patches.around(f"{ASYNC}.generate", begin_async, end_request, (GENERATE,))
        loads = Loads()
        patches.around(f"{LOADER}.load_weights", loads.begin, loads.end, (LOAD_WEIGHTS,))


def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Open the span of a call, which has one prompt or several."""
    prompts = argument("prompts", 1, args, kwargs, None)
    return begin_generation("vLLM", sequences=len(prompts) if isinstance(prompts, (list, tuple)) else 1)


def begin_chat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Open the span of a call; it may call `generate`."""
    return begin_generation("vLLM", sequences=conversations(argument("messages", 1, args, kwargs)))


def conversations(messages: Any) -> int:
    """Return how many conversations these are: a list of messages is one, and a list of such lists is several."""
    is_several = isinstance(messages, (list, tuple)) and bool(messages) and isinstance(messages[0], (list, tuple))
    return len(messages) if is_several else 1


def end(opened: Any, _result: Any, error: BaseException | None) -> None:
    """Close it."""
    end_generation(opened, error)


def begin_async(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Open the span of one request, by whose id the engine knows it."""
    request_id = argument("request_id", 3, args, kwargs, None)
    known = {} if request_id is None else {"request_id": str(request_id)}
    return begin_request("vLLM", sequences=1, **known)


class Loads(threading.local):
    """Copies of weights; a model's loader calls those of its parts."""

    def __init__(self) -> None:
        self.depth = 0

    def begin(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        """Open the span of the outermost one."""
        self.depth += 1
        return spans.automatic_span(LOAD_WEIGHTS, by="vLLM").__enter__() if self.depth == 1 else None

    def end(self, opened: Any, result: Any, error: BaseException | None) -> None:
        """Close it."""
        self.depth -= 1
        end_span(opened, result, error)
