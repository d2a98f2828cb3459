"""Requests, turns and tools in the words of the conventions for generative AI: OpenTelemetry's semantic conventions
1.41.0, the last release before these moved to a repository of their own, which has none of its own schemas yet."""

from __future__ import annotations

from typing import Any

from opentelemetry.trace import SpanKind

from rltrace.events import AGENT_REQUEST, GENERATE, REQUEST, SERVER_REQUEST, TOOLS, TRAJECTORIES
from rltrace_exporters.otlp.calls import REQUESTS, Call

SCHEMA = "https://opentelemetry.io/schemas/1.41.0"
INVOKE_AGENT, TEXT_COMPLETION, EXECUTE_TOOL = "invoke_agent", "text_completion", "execute_tool"
UNNAMED_PROVIDER = "rltrace"
"""The provider's name if no engine is known: the convention requires one."""

_KINDS = {
    AGENT_REQUEST: SpanKind.CLIENT,
    SERVER_REQUEST: SpanKind.SERVER,
    GENERATE: SpanKind.CLIENT,
}


def operation(call: Call) -> str | None:
    """Return the operation that a call is; None if it is none, or a part of one.

    A request is one operation, that of its outermost span. Else backends would count its tokens two or three times.
    """
    if call.name in TRAJECTORIES:
        return INVOKE_AGENT
    if call.name in TOOLS:
        return EXECUTE_TOOL
    if call.name in REQUESTS or call.name == GENERATE:
        return None if _is_in_a_request(call) else TEXT_COMPLETION
    return None


def kind(call: Call) -> SpanKind:
    """Return the kind of its span."""
    return _KINDS.get(call.name, SpanKind.INTERNAL)


def name(call: Call, is_operation: str | None) -> str:
    """Return what its span is called."""
    if is_operation is None:
        return call.name
    of = tool(call) if is_operation == EXECUTE_TOOL else _model(call)
    return f"{is_operation} {of}" if of else is_operation


def attributes(call: Call, is_operation: str, provider: str | None) -> dict[str, Any]:
    """Return what the conventions say of it.

    Args:
        call: It.
        is_operation: Which operation it is.
        provider: The engine that answers.
    """
    said: dict[str, Any] = {"gen_ai.operation.name": is_operation}
    if is_operation == EXECUTE_TOOL:
        said |= {"gen_ai.tool.name": tool(call), "gen_ai.tool.type": "function"}
    else:
        said["gen_ai.provider.name"] = provider or UNNAMED_PROVIDER
    asked = {
        "gen_ai.usage.input_tokens": call.args.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": call.args.get("tokens"),
        "gen_ai.usage.cache_read.input_tokens": call.args.get("cached_tokens"),
        "gen_ai.response.id": call.args.get("request_id"),
        "gen_ai.request.model": _model(call),
        "gen_ai.conversation.id": call.args.get("trajectory"),
        "gen_ai.response.time_to_first_chunk": first_token_seconds(call),
    }
    ids = ("gen_ai.response.id", "gen_ai.conversation.id")
    return said | {key: str(value) if key in ids else value for key, value in asked.items() if value is not None}


def tool(call: Call) -> str:
    """Return the name of a tool."""
    return str(call.args.get("tool") or call.name)


def first_token_seconds(call: Call) -> float | None:
    """Return how long after its beginning a request's first token came; None if nobody recorded that."""
    after_ns = call.args.get("first_token_ns")
    return after_ns / 1e9 if isinstance(after_ns, int) and call.name == REQUEST else None


def _model(call: Call) -> str | None:
    model = call.args.get("model")
    return model if isinstance(model, str) else None


def _is_in_a_request(call: Call) -> bool:
    above = call.parent
    while above is not None:
        if above.name in REQUESTS or above.name == GENERATE:
            return True
        above = above.parent
    return False
