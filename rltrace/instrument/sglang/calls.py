"""SGLang called from a program of its own: what generates, and what sends weights to its engine.

Source read: SGLang 0.4.6 to 0.5.23, srt/entrypoints/engine.py.
"""

from __future__ import annotations

from typing import Any

from rltrace.events import GENERATE, LOAD_WEIGHTS
from rltrace.hooks.arguments import argument
from rltrace.hooks.patching import PatchSet, end_span
from rltrace.instrument.torch.generation import begin_generation, begin_request, end_generation, end_request
from rltrace.record import spans

ENGINE = "sglang.srt.entrypoints.engine:Engine"
UPDATES = ("update_weights_from_tensor", "update_weights_from_distributed", "update_weights_from_disk")


class SglangCalls:
    """Makes each call that generates or sends weights a span."""

    name = "sglang_calls"
    supports = ("sglang >= 0.4.6",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        patches.around(f"{ENGINE}.generate", begin, end, (GENERATE,))
        patches.around(f"{ENGINE}.async_generate", begin_async, end_request, (GENERATE,))
        for method in UPDATES:
            patches.around(f"{ENGINE}.{method}", begin_update, end_span, (LOAD_WEIGHTS,))


def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Open the span of a call, which has one prompt or several."""
    return begin_generation("SGLang", sequences=_sequences(args, kwargs))


def end(opened: Any, _result: Any, error: BaseException | None) -> None:
    """Close it."""
    end_generation(opened, error)


def begin_async(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Open the span of one request."""
    return begin_request("SGLang", sequences=_sequences(args, kwargs))


def begin_update(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Open the span of weights that are sent."""
    return spans.automatic_span(LOAD_WEIGHTS, by="SGLang").__enter__()


def _sequences(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    prompts = argument("prompt", 1, args, kwargs, None) or argument("input_ids", 3, args, kwargs, None)
    return len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
