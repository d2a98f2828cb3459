"""Spans of a program that has OpenTelemetry's API and no SDK.

There all spans of a tracer are one object that does nothing. To know when each of them ends, every call gets an object
of its own. It is of a class below the API's own, has the same context, does not record either as far as the program can
tell, and nobody injects it into a request.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rltrace.hooks.hook import Function, Hook
from rltrace.hooks.patching import PatchSet
from rltrace.host.interruption import own_failure
from rltrace.instrument.opentelemetry import said
from rltrace.instrument.opentelemetry.times import Begun

API = "opentelemetry.trace"


def watch_tracer(original: Function, hook: Hook) -> Function:
    """Let each call return a span that tells when it ends."""
    parameters = [name for name in inspect.signature(original).parameters if name != "self"]

    @functools.wraps(original)
    def start_span(self: Any, *args: Any, **kwargs: Any) -> Any:
        span = original(self, *args, **kwargs)
        watched = _watched(span, hook, dict(zip(parameters, args, strict=False)) | kwargs)
        return span if watched is None else watched

    return start_span


def name_older_hooks(patches: PatchSet, emits: tuple[str, ...]) -> None:
    """Name the hook on `with` for older releases, where its span is not one that `start_span` returns.

    Only there is it needed: as the function itself says, which is a generator below the API's decorator.
    """
    from opentelemetry.trace import NoOpTracer

    made: Any = NoOpTracer.start_as_current_span
    if "start_span" not in made.__wrapped__.__code__.co_names:
        patches.wrap(f"{API}:NoOpTracer.start_as_current_span", watch_with, emits)


def watch_with(original: Function, hook: Hook) -> Function:
    """Let each `with` have a span that tells when it ends, where it would have the one that does nothing.

    The API's own function makes the context manager, and one of the same class is returned: it is a decorator too.
    """
    parameters = [name for name in inspect.signature(original).parameters if name != "self"]

    def opened(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with original(self, *args, **kwargs) as span:
            given = dict(zip(parameters, args, strict=False)) | kwargs
            watched = _watched(span, hook, given)
            if watched is None:
                yield span
                return
            with _current_in_its_place(watched, span, given.get("end_on_exit", True)):
                yield watched

    @functools.wraps(original)
    def start_as_current_span(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        return type(made)(opened, args, kwargs) if hook.live else made

    return start_as_current_span


def _current_in_its_place(watched: Any, span: Any, is_ended: bool) -> Any:
    """Return the `with` of a span of ours, which is the current one where the span that does nothing would be.

    Below a span from elsewhere it is not: that one stays the current one, and is handed on.
    """
    api: Any = sys.modules[API]
    current = api.get_current_span()
    if current is span or isinstance(current, NoOpSpan):
        return api.use_span(watched, end_on_exit=is_ended)
    return watched if is_ended else contextlib.nullcontext()


def _watched(span: Any, hook: Hook, given: dict[str, Any]) -> Any:
    """Return a span that tells when it ends, in place of one that does nothing; None for any other."""
    try:
        api = sys.modules[API]
        if not hook.live or not isinstance(span, api.NonRecordingSpan):
            return None
        hook.row.fired()
        return _span_class(api.NonRecordingSpan)(span.get_span_context(), hook, given)
    except own_failure() as error:
        hook.failed(error)
        return None


@functools.cache
def _span_class(non_recording: type[Any]) -> type[Any]:
    return type("RltraceNoOpSpan", (NoOpSpan, non_recording), {})


class NoOpSpan:
    """What the program gets: nothing that it calls does anything, apart from what is recorded."""

    def __init__(self, context: Any, hook: Hook, given: dict[str, Any]) -> None:
        """Begin the span.

        Args:
            context: Of the span that the program would have got.
            hook: Gates it.
            given: The arguments of the call by name.
        """
        super().__init__(context)  # type: ignore[call-arg]  # the API's class
        self._hook = hook
        self._handled = id(sys.exc_info()[1])  # of an error that the program is handling already
        self._late: dict[str, Any] = {}
        attributes = given.get("attributes") or {}
        self._attributes = len(attributes)
        known = said.attributes(attributes) | said.kind(given.get("kind")) | said.links(given.get("links"))
        if context.is_valid:  # it came from elsewhere
            known |= {"trace_id": said.hex_32(context.trace_id), "parent_id": said.hex_16(context.span_id)}
        self._begun: Begun | None = Begun(said.name_of(given.get("name")), known, given.get("start_time"))

    def __reduce__(self) -> Any:
        api = sys.modules[API]
        return api.NonRecordingSpan, (self.get_span_context(),)  # type: ignore[attr-defined]

    def set_attribute(self, key: str, value: Any) -> None:
        """Keep it."""
        self._keep(lambda: self._bounded({key: value}))

    def set_attributes(self, attributes: Any) -> None:
        """Keep them."""
        self._keep(lambda: self._bounded(attributes))

    def record_exception(self, exception: BaseException, *_: Any, **__: Any) -> None:
        """Keep its type."""
        self._keep(lambda: {"exceptions": [*self._late.get("exceptions", ()), type(exception).__name__]})

    def set_status(self, status: Any, description: str | None = None) -> None:
        """Keep an error."""
        self._keep(lambda: _status_error(status, description))

    def end(self, end_time: int | None = None) -> None:
        """End it, once. Where an exception leaves a span, the API ends it while that is on its way."""
        begun, self._begun = self._begun, None
        if begun is None or not self._hook.live:
            return
        try:
            error = sys.exc_info()[1]
            if id(error) != self._handled and isinstance(error, Exception) and "error" not in self._late:
                self._late |= {"error": type(error).__name__, **said.error_message(error)}
            begun.end(self._late, end_time)
        except own_failure() as failure:
            self._hook.failed(failure)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """End the span of a `with`."""
        if isinstance(error, Exception):
            self._keep(lambda: {"error": type(error).__name__, **said.error_message(error)})
        self.end()

    def _bounded(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return as many of further attributes as there is room for, and how many there is none for."""
        room = max(0, said.MOST_ATTRIBUTES - self._attributes)
        self._attributes += len(given)
        kept = said.attributes(dict(itertools.islice(given.items(), room)))
        left_out = self._attributes - said.MOST_ATTRIBUTES
        return kept if left_out <= 0 else kept | {"attributes_left_out": left_out}

    def _keep(self, told: Any) -> None:
        if self._begun is None or not self._hook.live:
            return
        try:
            self._late |= told()
        except own_failure() as failure:
            self._hook.failed(failure)


def _status_error(status: Any, description: str | None) -> dict[str, Any]:
    code = getattr(status, "status_code", status)
    if getattr(code, "name", "") != "ERROR":
        return {}
    return {"error": "Error", **said.error_message(getattr(status, "description", None) or description)}
