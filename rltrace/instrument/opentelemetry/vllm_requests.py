"""The context in which vLLM's engine is asked reaches the span that vLLM makes of the request.

A server over HTTP passes on the headers that it got. An actor that a trainer asks, as verl's, has the context of the
call and passes nothing; then vLLM's span begins a trace of its own, or is below whoever asked first, if the task that
writes all of them was made there.

Source read: vLLM 0.12, 0.29 and 0.33, v1/engine/async_llm.py and v1/engine/output_processor.py.
"""

from __future__ import annotations

import functools
from typing import Any

from rltrace.hooks.arguments import attributes
from rltrace.hooks.hook import Function, Hook
from rltrace.hooks.patching import PatchSet, nothing_after, nothing_before
from rltrace.hooks.wrapping import wrap_async_generator_function
from rltrace.host.interruption import own_failure
from rltrace.instrument.opentelemetry import context

ENGINE = "vllm.v1.engine.async_llm:AsyncLLM"
HEADERS = "trace_headers"
BY_NAME = 5
"""So many arguments, `self` counted, may come by place before the headers."""


class VllmContext:
    """The context of a trace in vLLM's requests."""

    name = "vllm_context"
    supports = ("vllm >= 0.12",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        if reason := context.refusal():
            patches.refuse(reason)
        reads = attributes(ENGINE, "observability_config")
        patches.wrap(f"{ENGINE}.generate", give_headers, context.JOINS, reads=reads)


def give_headers(original: Function, hook: Hook) -> Function:
    """Let each request have the headers of the context that it is made in."""

    @functools.wraps(original)
    def asked(*args: Any, **kwargs: Any) -> Any:
        try:
            kwargs = with_headers(args, kwargs) if hook.live else kwargs
        except own_failure() as error:
            hook.failed(error)
        return original(*args, **kwargs)

    generate = wrap_async_generator_function(asked, hook, nothing_before, nothing_after)
    generate.__wrapped__ = original  # type: ignore[attr-defined]
    return generate


def with_headers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the named arguments of a request, with headers if vLLM makes spans and nobody has passed any."""
    if len(args) > BY_NAME or kwargs.get(HEADERS) or args[0].observability_config.otlp_traces_endpoint is None:
        return kwargs
    headers = context.to_send()
    return kwargs if headers is None else {**kwargs, HEADERS: headers}
