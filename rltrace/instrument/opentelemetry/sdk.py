"""A span processor of ours in each provider of OpenTelemetry's SDK.

Processors are told of every span that is not sampled out. Ours reads it and changes nothing, so the processors and the
exporters of the program get the same objects as without it.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any
from weakref import WeakSet

from rltrace.hooks.arguments import keep_self
from rltrace.hooks.call_frames import variable
from rltrace.hooks.hook import Function, Hook
from rltrace.hooks.patching import nothing_before
from rltrace.hooks.wrapping import wrap_function
from rltrace.host.interruption import own_failure
from rltrace.instrument.opentelemetry import arrows, said
from rltrace.instrument.opentelemetry.times import Begun, monotonic_ns
from rltrace.record import spans
from rltrace.record.encoding import MOST_LETTERS

SDK = "opentelemetry.sdk.trace"
MOST_OPEN = 20_000
"""Spans that a processor remembers as begun; of more, the oldest will hardly end."""


def watch_new_providers(original: Function, hook: Hook) -> Function:
    """Attach to every provider that the program makes."""
    return wrap_function(original, hook, keep_self, functools.partial(attach_to_made, hook))


def watch_set_providers(original: Function, hook: Hook) -> Function:
    """Attach to a provider that the program made before this hook, and sets now."""
    return wrap_function(original, hook, nothing_before, lambda _token, _result, _error: attach_to_global(hook))


def attach_to_set_provider(hook: Hook) -> Callable[[], None]:
    """Attach to a provider that was set before this hook; return what takes every processor back."""
    attach_to_global(hook)
    return detach_all


def attach_to_made(hook: Hook, provider: Any, _result: Any, error: BaseException | None) -> None:
    """Attach to a provider that is ready."""
    if error is None:
        attach(provider, hook)


def attach_to_global(hook: Hook) -> None:
    """Attach to the provider that is set, if there is one."""
    provider = getattr(sys.modules.get("opentelemetry.trace"), "_TRACER_PROVIDER", None)
    if provider is not None:
        attach(provider, hook)


def attach(provider: Any, hook: Hook) -> None:
    """Add a processor to a provider, once; a provider that is not the SDK's may take none."""
    sdk = sys.modules.get(SDK)
    told = getattr(provider, "_active_span_processor", provider)
    if sdk is None or told in _told or not hasattr(provider, "add_span_processor"):
        return
    _told.add(told)
    in_pool = isinstance(told, getattr(sdk, "ConcurrentMultiSpanProcessor", ()))
    processor = _processor_class(sdk, sys.modules["opentelemetry.trace"])(hook, in_pool=in_pool)
    _attached.add(processor)
    provider.add_span_processor(processor)


_told: WeakSet[Any] = WeakSet()
"""What hands spans to processors and has one of ours."""
_attached: WeakSet[Any] = WeakSet()


def detach_all() -> None:
    """Take every processor out of its provider."""
    for told in list(_told):
        others = tuple(one for one in getattr(told, "_span_processors", ()) if one not in _attached)
        if hasattr(told, "_span_processors"):
            told._span_processors = others
    for processor in list(_attached):
        processor.is_attached = False
    _told.clear()
    _attached.clear()


@functools.cache
def _processor_class(sdk: Any, api: Any) -> type[Any]:
    """Return the class of processors: it inherits from the SDK's, which later releases may give more methods."""
    usual = {"internal": api.SpanKind.INTERNAL, "unset": api.StatusCode.UNSET}
    return type("RltraceSpanProcessor", (Processor, sdk.SpanProcessor), usual)


class Processor:
    """Records the spans of one provider."""

    internal: Any
    """The kind that most spans are of, which nobody has to say."""
    unset: Any
    """The status that most spans have."""

    def __init__(self, hook: Hook, *, in_pool: bool) -> None:
        """Make one.

        Args:
            hook: Gates it.
            in_pool: Whether it is called in other threads than the spans'.
        """
        self.is_attached = True
        self._hook, self._in_pool = hook, in_pool
        self._open: dict[int, tuple[Begun, dict[str, Any]]] = {}

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """Write that a span begins."""
        hook = self._hook
        if not (hook.live and self.is_attached):
            return
        try:
            hook.row.fired()
            self._begin(span)
        except own_failure() as error:
            hook.failed(error)

    def on_end(self, span: Any) -> None:
        """Write that a span has ended."""
        hook = self._hook
        if not (hook.live and self.is_attached):
            return
        try:
            self._end(span)
        except own_failure() as error:
            hook.failed(error)

    def shutdown(self) -> None:
        """Do nothing: what is recorded is in the Recording."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Do nothing; all is written."""
        return True

    def _begin(self, span: Any) -> None:
        context, parent = span.context, span.parent
        given = _given(span)
        known = said.ids(context, parent)
        known.update(said.attributes(given))
        scope = getattr(span, "instrumentation_scope", None)
        if scope is not None and scope.name:
            known["scope"] = scope.name[:MOST_LETTERS]
        is_given = functools.partial(_is_given, span)
        begun = Begun(said.name_of(span.name), known, span.start_time, is_given, may_be_written=not self._in_pool)
        if parent is not None and parent.is_remote and begun.is_written:
            arrows.arrives(parent)
        self._open[context.span_id] = begun, given
        if len(self._open) > MOST_OPEN:
            self._forget_oldest()

    def _end(self, span: Any) -> None:
        context = span.context
        begun, given = self._open.pop(context.span_id, (None, None))
        if begun is not None:
            begun.end(self._described(span, given), span.end_time)
        else:  # it began before this processor was there
            start_ns, end_ns = monotonic_ns(span.start_time), monotonic_ns(span.end_time)
            known = said.ids(context, span.parent) | self._described(span, None)
            spans.automatic_span_at(said.name_of(span.name), start_ns, end_ns, **known)

    def _described(self, span: Any, recorded: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what a span that is over says, apart from its ids.

        Args:
            span: The span.
            recorded: The attributes that are recorded already.
        """
        given = _given(span)
        late = {} if given == recorded else said.attributes(given)
        if (kind := span.kind) is not self.internal:
            late.update(said.kind(kind))
        if links := _kept(span, "links"):
            late.update(said.links(links))
        happened, status = _kept(span, "events"), span.status
        if happened:
            late.update(said.events(happened))
        if happened or status.status_code is not self.unset:
            late.update(said.error(status, happened, given))
        return late

    def _forget_oldest(self) -> None:
        for span_id in list(itertools.islice(self._open, MOST_OPEN // 10)):
            self._open.pop(span_id, None)


def _is_given(span: Any) -> bool:
    """Tell whether the program gave a span its beginning: the SDK reads the clock itself where it was given none.

    The SDK keeps no word of that, but it is in the call of `Span.start` that tells processors.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "start" and variable(frame, "self") is span:
            return variable(frame, "start_time", span) is not None
        frame = frame.f_back
    return True


def _given(span: Any) -> dict[str, Any]:
    """Return the attributes of a span, which another thread may change.

    Where the SDK keeps them they are copied at once; its public way takes a lock for each of them.
    """
    kept = getattr(getattr(span, "_attributes", None), "_dict", None)
    return kept.copy() if kept.__class__ in (dict, OrderedDict) else dict(span.attributes or {})


def _kept(span: Any, name: str) -> Any:
    """Return the events or links of a span. Most have none, which is quicker to see where the SDK keeps them."""
    kept = getattr(span, _KEPT[name], None)
    return () if kept is not None and not kept else getattr(span, name)


_KEPT = {"events": "_events", "links": "_links"}
