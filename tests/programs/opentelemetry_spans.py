"""Makes spans through OpenTelemetry's API in every way that it has: `opentelemetry_spans.py sdk` or `api`.

It prints what its exporter got, and what it sees of its own spans, without times.
"""

import asyncio
import json
import os
import sys
import threading
import time

from opentelemetry import trace
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

SECOND = 10**9


def exporter():
    """Set up the SDK, with ids that are the same in every run."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    class Counting(IdGenerator):
        made = 0

        def generate_span_id(self):
            self.made += 1
            return self.made

        def generate_trace_id(self):
            return self.generate_span_id()

    provider = TracerProvider(id_generator=Counting(), resource=Resource({"service.name": "program"}))
    spans = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    return spans


def without_times(span):
    """What an exporter got, as text."""
    said = json.loads(span.to_json())
    for timed in (said, *said["events"]):
        for name in ("start_time", "end_time", "timestamp"):
            timed.pop(name, None)
    for event in said["events"]:
        event.get("attributes", {}).pop("exception.stacktrace", None)
    return json.dumps(said)


def spans_of_one_thread(tracer):
    """Nested, with attributes, errors, links and kinds."""
    elsewhere = SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(1))
    attributes = {"gen_ai.request.model": "qwen", "step": 3, "phase": True, "gen_ai.prompt": "what a user wrote"}
    with tracer.start_as_current_span("outer", attributes=attributes, kind=SpanKind.SERVER) as outer:
        outer.set_attribute("http.response.status_code", 200)
        outer.set_attribute("api_key", "sk-1234567890abcdef")
        outer.set_attributes({f"many.{number}": number for number in range(50)})
        outer.add_event("first token")
        with tracer.start_as_current_span("inner", links=[Link(elsewhere)]):
            time.sleep(0.002)
        try:
            with tracer.start_as_current_span("fails"):
                raise ValueError("token=hf_abcdefghij is wrong\nand more")
        except ValueError:
            with tracer.start_as_current_span("well, while an error is handled"):
                pass
        with tracer.start_as_current_span("says that it failed") as span:
            span.set_status(Status(StatusCode.ERROR, "it did"))
        with tracer.start_as_current_span("recovers") as span:
            span.record_exception(KeyError("handled"))
        try:
            with tracer.start_span("a with of its own"):
                raise LookupError("left it")
        except LookupError:
            pass


def spans_across_threads(tracer):
    """One that another thread ends while the first goes on, one that does not nest, and one that never ends."""
    span = tracer.start_span("ended elsewhere")
    with tracer.start_as_current_span("goes on"):
        thread = threading.Thread(target=span.end)
        thread.start()
        thread.join()
        time.sleep(0.001)
    first = tracer.start_span("crosses first")
    second = tracer.start_span("crosses second")
    first.end()
    second.end()
    tracer.start_span("never ends")


def spans_of_the_past(tracer):
    """With times of the program's own."""
    now_ns = time.time_ns()
    tracer.start_span("explicit", start_time=now_ns - 3 * SECOND).end(end_time=now_ns - SECOND)
    tracer.start_span("explicit, never ends", start_time=now_ns - 2 * SECOND)
    tracer.start_span("explicit end").end(end_time=time.time_ns() + SECOND)


@trace.get_tracer("decorated").start_as_current_span("decorated")
def decorated():
    """A tracer that was made before any provider."""


async def one(tracer, number):
    with tracer.start_as_current_span("task", attributes={"task.number": number}):
        await asyncio.sleep(0.01)
        with tracer.start_as_current_span("in task", attributes={"task.number": number}):
            await asyncio.sleep(0.005 * number)


async def spans_of_tasks(tracer):
    await asyncio.gather(*(one(tracer, number) for number in range(3)))


def seen(tracer):
    """What a program can see of a span."""
    with tracer.start_as_current_span("seen") as span:
        context = span.get_span_context()
        is_current = trace.get_current_span() is span
        return span.is_recording(), context.is_valid, context.is_remote, is_current, isinstance(span, trace.Span)


def fork(tracer):
    """A span that a child ends too, which it began before."""
    with tracer.start_as_current_span("forks"):
        child = os.fork()
        if not child:
            with tracer.start_as_current_span("in child"):
                pass
        else:
            os.waitpid(child, 0)
    if not child:
        os._exit(0)


def main():
    spans = exporter() if sys.argv[1] == "sdk" else None
    tracer = trace.get_tracer("program", "1.0")
    decorated()
    spans_of_one_thread(tracer)
    spans_across_threads(tracer)
    spans_of_the_past(tracer)
    asyncio.run(spans_of_tasks(tracer))
    print(seen(tracer))
    fork(tracer)
    for span in spans.get_finished_spans() if spans else ():
        print(without_times(span))


main()
