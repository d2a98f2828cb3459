"""What a span of OpenTelemetry says, as arguments of ours: bounded, without secrets, and without prompts and answers.

Numbers and truth values are kept as they are. A text is cut, and secrets in it are replaced. One whose key names what
people or models wrote becomes its length: a Recording has no text of prompts. A key without a dot gets `otel.` in
front, so that nobody takes it for an argument of ours.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rltrace.events import OPENTELEMETRY
from rltrace.record import redaction
from rltrace.record.encoding import MOST_LETTERS, plain_text, text_of

MOST_ATTRIBUTES = 32
MOST_ITEMS = 16
"""Of an attribute that is a list, and of links and events."""

_WRITTEN = re.compile(
    r"(?:^|[._])(?:prompts?|completions?|contents?|messages?|inputs?|outputs?|value|text|arguments|result|query|body"
    r"|statement|system_instructions|documents?|question|answer|reasoning)$",
    re.I,
)
"""How keys end whose texts people or models wrote, by conventions of OpenTelemetry, OpenInference and Traceloop."""

_PLAIN = frozenset({int, float, bool})
_PLAIN_KEY, _SECRET_KEY, _WRITTEN_KEY = range(3)


def attributes(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return attributes as arguments."""
    said: dict[str, Any] = {}
    if not given:
        return said
    for key, value in given.items() if len(given) <= MOST_ATTRIBUTES else _first(given):
        name, kind = _key(key)
        said[name] = value if value.__class__ in _PLAIN else _value(value, kind)
    if len(given) > MOST_ATTRIBUTES:
        said["attributes_left_out"] = len(given) - MOST_ATTRIBUTES
    return said


def _first(given: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return itertools.islice(given.items(), MOST_ATTRIBUTES)


def name_of(name: Any) -> str:
    """Return what a span is called."""
    return _name(name) if isinstance(name, str) else OPENTELEMETRY + text_of(name)


@functools.lru_cache(1024)
def _name(name: str) -> str:
    return OPENTELEMETRY + _text(name)


def ids(context: Any, parent: Any) -> dict[str, Any]:
    """Return the ids by which a span is known elsewhere.

    Args:
        context: Of the span.
        parent: The context of the span that it is below; None if it begins a trace.
    """
    known = {"trace_id": hex_32(context.trace_id), "span_id": hex_16(context.span_id)}
    if parent is not None:
        known["parent_id"] = hex_16(parent.span_id)
    return known


@functools.lru_cache(256)
def hex_32(trace_id: int) -> str:
    """Return the id of a trace as it is written elsewhere; many spans have the same."""
    return f"{trace_id:032x}"


@functools.lru_cache(256)
def hex_16(span_id: int) -> str:
    """Return the id of a span as it is written elsewhere: a parent's comes once for each child."""
    return f"{span_id:016x}"


def links(given: Iterable[Any] | None) -> dict[str, Any]:
    """Return the spans that a span is linked to, each as the ids of its trace and of itself."""
    if not given:
        return {}
    contexts = (link.context for link in itertools.islice(given, MOST_ITEMS))
    return {"links": [f"{hex_32(context.trace_id)}-{hex_16(context.span_id)}" for context in contexts]}


def kind(given: Any) -> dict[str, Any]:
    """Return what kind a span is, unless it is an internal one as most are."""
    return {} if given is None or given.value == 0 else {"kind": given.name.lower()}


def events(given: Iterable[Any]) -> dict[str, Any]:
    """Return the names of what happened within a span, and the types of the exceptions among it."""
    exceptions = [_exception_type(event) for event in given if event.name == "exception"]
    others = [_text(event.name) for event in given if event.name != "exception"]
    known = {"exceptions": exceptions[:MOST_ITEMS], "events": others[:MOST_ITEMS]}
    return {name: values for name, values in known.items() if values}


def error(status: Any, given: Sequence[Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the error with which a span ended: its status says so, or an exception that left it.

    Args:
        status: Of the span.
        given: Its events.
        attributes: As they were given.
    """
    code = getattr(status, "status_code", None)
    is_error = getattr(code, "name", None) == "ERROR"
    exception = next((_said_of(event) for event in reversed(given) if event.name == "exception"), None)
    has_escaped = exception is not None and str(exception.get("exception.escaped")) == "True"
    if not is_error and (getattr(code, "name", None) == "OK" or not has_escaped):
        return {}
    exception = exception or {}
    kind = exception.get("exception.type") or attributes.get("error.type") or "Error"
    message = getattr(status, "description", None) or exception.get("exception.message")
    return {"error": _class_name(kind), **error_message(message)}


def error_message(message: Any) -> dict[str, str]:
    """Return the first line of an error's message as an argument; nothing if there is none."""
    line = text_of(message).strip().partition("\n")[0].rstrip() if message else ""
    return {"error_message": redaction.text(line)} if line else {}


def _exception_type(event: Any) -> str:
    return _class_name(_said_of(event).get("exception.type") or "Exception")


def _class_name(name: Any) -> str:
    """Return the name of a class without its module, as our own spans have it."""
    return _text(str(name)).rpartition(".")[2]


def _said_of(event: Any) -> Mapping[str, Any]:
    return event.attributes or {}


@functools.lru_cache(4096)
def _key(key: str) -> tuple[str, int]:
    """Return what an attribute is called as an argument, and what kind of value it has."""
    name = plain_text(str(key)[:MOST_LETTERS])
    kind = _SECRET_KEY if redaction.is_secret(name) else _WRITTEN_KEY if _WRITTEN.search(name) else _PLAIN_KEY
    return name if "." in name else OPENTELEMETRY + name, kind


def _value(value: Any, kind: int) -> Any:
    if value.__class__ is str and kind == _PLAIN_KEY:
        return _said(value if len(value) <= MOST_LETTERS else value[:MOST_LETTERS])
    if isinstance(value, (int, float)):
        return value
    if kind == _SECRET_KEY:
        return redaction.REDACTED
    if isinstance(value, str):
        return f"{len(value)} letters" if kind == _WRITTEN_KEY else _text(value)
    if isinstance(value, (list, tuple)):
        if kind == _WRITTEN_KEY and any(isinstance(item, str) for item in value):
            return f"{len(value)} texts"
        return [_text(item) if isinstance(item, str) else _number(item) for item in value[:MOST_ITEMS]]
    return _number(value)


def _number(value: Any) -> Any:
    """Return a number as it is. Of anything else it is the type: to print a tensor would wait for its GPU."""
    return value if isinstance(value, (int, float)) else f"<{type(value).__qualname__}>"


def _text(text: str) -> str:
    return _said(text[:MOST_LETTERS])


@functools.lru_cache(4096)
def _said(text: str) -> str:
    return redaction.text(plain_text(text))
