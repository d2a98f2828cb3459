"""Calls as spans of OpenTelemetry's SDK, which its exporters encode."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from rltrace.events import OPENTELEMETRY, OUT_OF_MEMORY, STEP
from rltrace_exporters.otlp import generation
from rltrace_exporters.otlp.calls import Call, Totals
from rltrace_exporters.otlp.identifiers import span_id
from rltrace_exporters.otlp.resources import Source

SCOPE = InstrumentationScope("rltrace", schema_url=generation.SCHEMA)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)
_INT64 = 1 << 63
_ERROR_ARGUMENTS = frozenset({"error", "error_message"})


def context(trace: int, span: int) -> SpanContext:
    """Return what identifies a span."""
    return SpanContext(trace, span, is_remote=False, trace_flags=_SAMPLED)


def id_of(call: Call, run_id: str, twin: int = 0) -> int:
    """Return a call's span id.

    Args:
        call: The call.
        run_id: The run's id.
        twin: How many calls there are before it that say the same in everything that an id is made of, as those of a
            damaged Recording may.
    """
    length_ns = 0 if call.was_open else call.end_ns - call.start_ns
    where = (call.source, call.thread, call.task, call.key_ns, length_ns, call.name)
    return span_id(run_id, *where, *([twin] if twin else []))


def span_of(
    call: Call, own: SpanContext, parent: SpanContext | None, links: Iterable[SpanContext], source: Source
) -> ReadableSpan:
    """Return a call as a span.

    Args:
        call: The call.
        own: What identifies it.
        parent: The span that it is inside of.
        links: Spans in which arrows to it begin.
        source: Its process.
    """
    operation = generation.operation(call)
    said = _attributes(call)
    kind = SpanKind.INTERNAL
    if operation is not None:
        said |= generation.attributes(call, operation, source.engine)
    if call.name not in (STEP,) and not call.is_phase:
        kind = generation.kind(call)
    status, events = _outcome(call, source)
    if status is not _UNSET and call.args.get("error") is not None:
        said["error.type"] = str(call.args["error"])
    return ReadableSpan(
        name=_text(generation.name(call, operation)),
        context=own,
        parent=parent,
        resource=source.resource,
        attributes=said,
        events=events,
        links=[Link(sender) for sender in links],
        kind=kind,
        status=status,
        start_time=call.start_ns,
        end_time=call.end_ns,
        instrumentation_scope=SCOPE,
    )


def span_of_run(
    own: SpanContext, resource: Resource, start_ns: int, end_ns: int, attributes: dict[str, Any]
) -> ReadableSpan:
    """Return the span of a run, which what is in no step belongs to."""
    return ReadableSpan(
        name="run",
        context=own,
        resource=resource,
        attributes=attributes,
        start_time=start_ns,
        end_time=end_ns,
        instrumentation_scope=SCOPE,
        status=_UNSET,
    )


def _attributes(call: Call) -> dict[str, Any]:
    own = _of_the_program if call.name.startswith(OPENTELEMETRY) else _ours
    said = {_text(own(key)): value_of(value) for key, value in call.args.items() if key not in _ERROR_ARGUMENTS}
    said["rltrace.name"] = _text(call.name)
    said["thread.id"] = call.thread
    said |= totals_of(call.totals)
    if call.is_phase:
        said["rltrace.phase"] = _text(call.name)
    if call.was_open:
        said["rltrace.open"] = True
    return said


def _ours(key: str) -> str:
    return f"rltrace.{key}"


def _of_the_program(key: str) -> str:
    """Return the key that a program gave to an attribute of a span which it made through OpenTelemetry's API."""
    if key.startswith(OPENTELEMETRY):
        return key.removeprefix(OPENTELEMETRY)
    return key if "." in key else _ours(key)


def made_as(call: Call) -> SpanContext | None:
    """Return what identifies the span that a call is recorded from, if the program made it through OpenTelemetry's API;
    the program may send it too."""
    if not call.name.startswith(OPENTELEMETRY):
        return None
    try:
        trace, span = int(str(call.args["trace_id"]), 16), int(str(call.args["span_id"]), 16)
    except (KeyError, ValueError):
        return None
    return context(trace, span) if 0 < trace < 1 << 128 and 0 < span < 1 << 64 else None


def totals_of(totals: Totals) -> dict[str, Any]:
    """Return attributes for calls that are not sent by themselves."""
    said: dict[str, Any] = {}
    for name, (count, taken_ns) in sorted(totals.items()):
        said[f"rltrace.inside.{_text(name)}.count"] = count
        said[f"rltrace.inside.{_text(name)}.seconds"] = taken_ns / 1e9
    return said


def value_of(value: Any) -> Any:
    """Return an argument as a value that OTLP has; what is nested is JSON."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if -_INT64 <= value < _INT64 else str(value)
    return _text(json.dumps(value, default=str))


def _text(value: str) -> str:
    return value.encode(errors="replace").decode() if not value.isascii() else value


def _outcome(call: Call, source: Source) -> tuple[Status, list[Event]]:
    """Return whether it failed, and the exception as an event."""
    if call.has_failed:
        kind = str(call.args.get("error") or OUT_OF_MEMORY)
        message = call.args.get("error_message")
        said = {"exception.type": kind} | ({} if message is None else {"exception.message": _text(str(message))})
        words = kind if message is None else f"{kind}: {message}"
        return Status(StatusCode.ERROR, _text(words)), [Event("exception", said, timestamp=call.end_ns)]
    if call.was_open and source.killed_by is not None:
        return Status(StatusCode.ERROR, f"its process was killed by signal {source.killed_by}"), []
    return _UNSET, []
