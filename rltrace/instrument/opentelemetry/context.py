"""The W3C context of a trace, which crosses to another process with a call or a request.

What is sent is `traceparent` and `tracestate` of the program's current span; baggage stays where it is. Where a program
has no span, `RLTRACE_TRACE_CONTEXT=1` begins a trace at each call or request: within a trajectory it is always the same
one, whose id is that of the trajectory, twice.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from rltrace.events import OPENTELEMETRY
from rltrace.hooks.environment import TRACE_CONTEXT_VARIABLE
from rltrace.hooks.trajectories import of_trajectory
from rltrace.instrument.opentelemetry import arrows

JOINS = (OPENTELEMETRY,)
"""How the names of spans begin that a context joins."""
TRACEPARENT, TRACESTATE = "traceparent", "tracestate"

_API = "opentelemetry.trace"
_FORM = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")

_without_api: ContextVar[dict[str, str] | None] = ContextVar("rltrace_trace_context", default=None)
"""What was brought to a process that does not have the API, to be sent on."""


def refusal() -> str | None:
    """Return why no context is to be sent, if none is."""
    return f"{TRACE_CONTEXT_VARIABLE}=0" if os.environ.get(TRACE_CONTEXT_VARIABLE) == "0" else None


def to_send() -> dict[str, str] | None:
    """Return the headers of the current context; None where there is none."""
    api = sys.modules.get(_API)
    context = None if api is None else api.get_current_span().get_span_context()
    if context is not None and context.is_valid:
        return _headers(context)
    brought = _without_api.get()
    return brought if brought is not None or os.environ.get(TRACE_CONTEXT_VARIABLE) != "1" else _new()


def leave(headers: Mapping[str, str]) -> None:
    """Let an arrow leave with a context that is sent."""
    found = _FORM.fullmatch(headers[TRACEPARENT])
    if found:
        arrows.leaves(int(found[1], 16), int(found[2], 16))


def bring(headers: Mapping[str, str]) -> Any:
    """Make a context that has come with a call the current one; return what takes it back."""
    found = _FORM.fullmatch(headers.get(TRACEPARENT, ""))
    if found is None:
        return None
    try:
        api, contexts = importlib.import_module(_API), importlib.import_module("opentelemetry.context")
    except ImportError:
        return None, _without_api.set(dict(headers)), None
    state = headers.get(TRACESTATE)
    context = api.SpanContext(
        int(found[1], 16),
        int(found[2], 16),
        is_remote=True,
        trace_flags=api.TraceFlags(int(found[3], 16)),
        trace_state=api.TraceState.from_header([state]) if state else None,
    )
    attached = contexts.attach(api.set_span_in_context(api.NonRecordingSpan(context)))
    return contexts, attached, arrows.brought.set(context)


def take_back(token: Any) -> None:
    """Make the context current again that was before `bring`."""
    if token is None:
        return
    contexts, attached, brought = token
    if contexts is None:
        _without_api.reset(attached)
    else:
        contexts.detach(attached)
        arrows.brought.reset(brought)


def _headers(context: Any) -> dict[str, str]:
    headers = {TRACEPARENT: f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"}
    if context.trace_state:
        headers[TRACESTATE] = context.trace_state.to_header()
    return headers


def _new() -> dict[str, str]:
    trace_id = of_trajectory().get("trajectory", "") * 2 or secrets.token_hex(16)
    return {TRACEPARENT: f"00-{trace_id}-{secrets.token_hex(8)}-01"}
