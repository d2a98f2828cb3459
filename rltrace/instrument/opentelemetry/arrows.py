"""An arrow from where a context leaves a process to the span that goes on with it in another one."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any

from rltrace.hooks.arguments import argument
from rltrace.record import spans

brought: ContextVar[Any] = ContextVar("rltrace_brought_context", default=None)
"""The context that a call brought here that has an arrow of its own."""


def leaves(trace_id: int, span_id: int) -> None:
    """Let an arrow leave from the innermost open span."""
    spans.flow(_key(trace_id, span_id), "out")


def leaves_by_propagator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let an arrow leave where the program's propagator sends a context."""
    given = argument("context", 2, args, kwargs, None)
    context = sys.modules["opentelemetry.trace"].get_current_span(given).get_span_context()
    if context.is_valid:
        leaves(context.trace_id, context.span_id)


def arrives(parent: Any) -> None:
    """Let the arrow of a remote parent arrive at the innermost open span."""
    if parent is not brought.get():
        spans.flow(_key(parent.trace_id, parent.span_id), "in")


def _key(trace_id: int, span_id: int) -> str:
    return f"otel:{trace_id:032x}:{span_id:016x}"
