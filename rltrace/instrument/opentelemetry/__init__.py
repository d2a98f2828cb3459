"""Spans that the program makes through the OpenTelemetry API: vLLM's request traces, an agent's, a trainer's own.

In: the program's spans. Out: spans `otel.<name>`, with the ids by which Jaeger knows them. No provider is ever set, and
what the program's exporters get is what they get without us.

- `sdk.py`: a span processor beside the program's own, in every provider of the SDK.
- `no_op.py`: spans of a program that has the API alone.
- `times.py`: when a span begins and ends on our clock, and how that is written.
- `said.py`: what a span says: attributes, status, exceptions, links.
- `context.py`: the context that crosses to other processes; `ray_calls.py` and `http.py` send it, `vllm_requests.py`
  gives it to vLLM, `arrows.py` draws it.

To add a client of HTTP that carries the context, name its function that sends in `http.py`.

Source read: opentelemetry-api and opentelemetry-sdk 1.20, 1.30 and 1.45; our tests run with each of them.
"""

from __future__ import annotations

from rltrace.events import OPENTELEMETRY
from rltrace.hooks.patching import PatchSet, nothing_after
from rltrace.instrument.opentelemetry import arrows, no_op, sdk

EMITS = (OPENTELEMETRY,)
"""How the names of their spans begin."""
PROPAGATOR = "opentelemetry.trace.propagation.tracecontext:TraceContextTextMapPropagator"


class OpenTelemetry:
    """Spans of the API alone, and where a context leaves."""

    name = "opentelemetry"
    supports = ("opentelemetry-api >= 1.20",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        patches.wrap("opentelemetry.trace:NoOpTracer.start_span", no_op.watch_tracer, EMITS)
        patches.when_imported("opentelemetry.trace", lambda _: no_op.name_older_hooks(patches, EMITS))
        patches.around(f"{PROPAGATOR}.inject", arrows.leaves_by_propagator, nothing_after, EMITS)


class OpenTelemetrySdk:
    """Spans of every provider of the SDK."""

    name = "opentelemetry_sdk"
    supports = ("opentelemetry-sdk >= 1.20",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        patches.wrap("opentelemetry.sdk.trace:TracerProvider.__init__", sdk.watch_new_providers, EMITS)
        patches.wrap("opentelemetry.trace:_set_tracer_provider", sdk.watch_set_providers, EMITS)
        patches.when_imported("opentelemetry.sdk.trace", sdk.attach_to_set_provider)
