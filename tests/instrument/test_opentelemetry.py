"""Spans of the OpenTelemetry API: the real API with the real SDK, and without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.sdk.trace import ConcurrentMultiSpanProcessor, SpanProcessor, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from traced_runs import ROOT, TracedRun, traced_environment

import rltrace
from rltrace import instrument
from rltrace.events import Span
from rltrace.hooks.patching import PatchSet
from rltrace.instrument.opentelemetry import OpenTelemetry, OpenTelemetrySdk, said, times
from rltrace.read.recording import Recording
from rltrace.record import manifest, redaction, spans

PROGRAM = ROOT / "tests" / "programs" / "opentelemetry_spans.py"
MODES = ("sdk", "api")
SECOND = 10**9


def run_program(mode, environment):
    command = [sys.executable, PROGRAM, mode]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The program, traced, with the SDK and with the API alone."""
    found = {}
    for mode in MODES:
        folder = tmp_path_factory.mktemp(mode) / "recording"
        manifest.create(folder, owner=None, command=[], config=None)
        done = run_program(mode, traced_environment(folder))
        found[mode] = TracedRun(done.returncode, done.stdout, done.stderr, Recording.open(folder))
    return found


@pytest.fixture(params=MODES)
def run(runs, request):
    return runs[request.param]


def only(run, name):
    """The only span that the program called so."""
    (span,) = run.spans(f"otel.{name}")
    return span


@pytest.mark.parametrize("mode", MODES)
def test_program_sees_the_same(runs, mode):
    """Its exporter gets the same bytes but for times, and it prints the same."""
    bare = run_program(mode, dict(os.environ))
    assert (runs[mode].returncode, runs[mode].err) == (0, bare.stderr), bare.stderr
    assert runs[mode].out == bare.stdout
    exported = bare.stdout.splitlines()[1:]
    assert [json.loads(line)["name"] for line in exported[:2]] == (["decorated", "inner"] if mode == "sdk" else [])


def test_every_span_is_there(runs):
    """With the SDK and without it the same spans are recorded, as a hook's."""
    names = {mode: sorted(span.name for span in run.spans()) for mode, run in runs.items()}
    assert names["sdk"] == names["api"]
    assert len(names["sdk"]) == 25
    assert all(span.is_automatic and not span.is_phase for run in runs.values() for span in run.spans())


def test_attributes_are_bounded_and_harmless(run):
    """Numbers stay, secrets and what people wrote do not, and no attribute is taken for an argument of ours."""
    args = only(run, "outer").args
    assert args["gen_ai.request.model"] == "qwen"
    assert args["http.response.status_code"] == 200
    assert args["gen_ai.prompt"] == "17 letters"
    assert args["otel.api_key"] == redaction.REDACTED
    assert (args["otel.step"], args["otel.phase"]) == (3, True)
    assert not {"step", "phase"} & args.keys()
    assert args["kind"] == "server"
    assert sum(name.startswith("many.") for name in args) <= said.MOST_ATTRIBUTES
    assert args["attributes_left_out"] == 56 - said.MOST_ATTRIBUTES


class Unprintable:
    """What a program without the SDK may pass: nobody looks at it there."""

    def __str__(self):
        raise AssertionError("printed")


def test_odd_attributes_are_not_printed():
    """Of what is no number and no text there is the type; a list is cut, and what is in one is not looked into."""
    nested = [[]]
    nested[0].append(nested)
    given = {
        "a.object": Unprintable(),
        "a.list": [Unprintable(), *"x" * 99],
        "a.nested": nested,
        "gen_ai.prompts": ["a"],
    }
    known = said.attributes(given)
    assert known["a.object"] == "<Unprintable>"
    assert known["a.list"] == ["<Unprintable>", *"x" * (said.MOST_ITEMS - 1)]
    assert known["a.nested"] == ["<list>"]
    assert known["gen_ai.prompts"] == "1 texts"
    assert said.attributes({"a.long": "x" * 10_000})["a.long"] == "x" * 256
    assert said.attributes({"http.url": "https://u:secret@host/?api_key=abc"})["http.url"].count("[redacted]") == 2


def test_errors_are_errors(run):
    """An exception that leaves a span, or a status, is its error; one that it handles is not."""
    fails = only(run, "fails").args
    assert fails["error"] == "ValueError"
    assert "hf_abcdefghij" not in str(fails)
    assert "\n" not in fails["error_message"] and "is wrong" in fails["error_message"]
    assert only(run, "says that it failed").args["error_message"] == "it did"
    assert only(run, "a with of its own").args["error"] == "LookupError"
    recovers = only(run, "recovers").args
    assert (recovers["exceptions"], "error" in recovers) == (["KeyError"], False)
    named = {span.name.removeprefix("otel.") for span in run.spans() if "error" in span.args}
    assert named == {"fails", "says that it failed", "a with of its own"}


def test_links_are_kept(run):
    assert only(run, "inner").args["links"] == [f"{0xABC:032x}-{0xDEF:016x}"]


def test_ids_are_the_exporters(runs):
    """Whoever goes on from our timeline to another tool finds the span there by its ids."""
    exported = [json.loads(line) for line in runs["sdk"].out.splitlines()[1:]]
    theirs = {(said["context"]["trace_id"][2:], said["context"]["span_id"][2:], said["name"]) for said in exported}
    ours = {
        (span.args["trace_id"], span.args["span_id"], span.name.removeprefix("otel.")) for span in ended(runs["sdk"])
    }
    assert ours - theirs == {one for one in ours if one[2] == "in child"}, "which its parent's exporter never saw"
    assert theirs <= ours
    inner, outer = only(runs["sdk"], "inner"), only(runs["sdk"], "outer")
    assert (inner.args["trace_id"], inner.args["parent_id"]) == (outer.args["trace_id"], outer.args["span_id"])


def ended(run):
    return [span for span in run.spans() if span.end_ns is not None and "never_ended" not in span.args]


def test_times_are_the_programs(run):
    """A span is as long as the program says, also if it says when it was."""
    outer, inner = only(run, "outer"), only(run, "inner")
    assert outer.start_ns < inner.start_ns < inner.end_ns < outer.end_ns
    assert 0.002 <= inner.seconds < 30
    explicit = only(run, "explicit")
    assert explicit.seconds == pytest.approx(2, abs=0.01)
    assert explicit.lane is None
    assert only(run, "explicit end").seconds == pytest.approx(1, abs=0.01)
    begun = only(run, "never ends").start_ns
    assert begun - explicit.start_ns == pytest.approx(3 * SECOND, abs=1.5 * SECOND)


def test_spans_cross_threads(run):
    """A span that another thread ends has a row of its own; those that cross do not share one."""
    elsewhere, goes_on = only(run, "ended elsewhere"), only(run, "goes on")
    assert elsewhere.start_ns < goes_on.start_ns < elsewhere.end_ns < goes_on.end_ns
    assert (elsewhere.lane, goes_on.lane) == (None, 0)
    first, second = only(run, "crosses first"), only(run, "crosses second")
    assert first.start_ns < second.start_ns < first.end_ns < second.end_ns
    assert first.lane != second.lane


def test_span_that_never_ends_is_open(run):
    """One with a beginning in the past ends with its process, and says so."""
    assert only(run, "never ends").end_ns is None
    explicit = only(run, "explicit, never ends")
    assert explicit.args["never_ended"] is True
    assert 2 < explicit.seconds < 60


def test_tasks_have_their_own(run):
    """Spans of tasks that run at once are on their own rows, each inside of the one that it is in."""
    outer, inner = run.spans("otel.task"), run.spans("otel.in task")
    assert len({span.task for span in outer}) == 3
    assert {span.task: span.args["task.number"] for span in outer} == {
        span.task: span.args["task.number"] for span in inner
    }


def test_child_records_its_own(run):
    """A forked child ends what it began; what its parent began is its parent's."""
    parent, child = only(run, "forks"), only(run, "in child")
    assert parent.start_ns < child.start_ns < child.end_ns < parent.end_ns
    assert parent.thread != child.thread


# ---- providers --------------------------------------------------------------------------------------------------


@pytest.fixture
def patches(tmp_path, monkeypatch):
    """Recording, with the hooks installed as `instrument` installs them."""
    rltrace.start(tmp_path / "recording")
    patches = PatchSet("opentelemetry_sdk", spans.current(), OpenTelemetrySdk.supports)
    monkeypatch.setitem(instrument.installed().patch_sets, "opentelemetry_sdk", patches)
    yield patches
    patches.undo()
    rltrace.stop()


def recorded(tmp_path):
    rltrace.stop()
    events = [event for process in Recording.open(tmp_path / "recording").processes for event in process.events()]
    return {event.name: event for event in events if isinstance(event, Span)}


def test_provider_from_before_is_found(patches, tmp_path, monkeypatch):
    """A provider that was set before the hooks gets a processor, and loses it when they are undone."""
    provider = TracerProvider(shutdown_on_exit=False)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    begun = provider.get_tracer("program").start_span("begun before")
    OpenTelemetrySdk().install(patches)
    begun.end()
    with provider.get_tracer("program").start_as_current_span("after"):
        pass
    assert len(provider._active_span_processor._span_processors) == 1
    patches.undo()
    assert provider._active_span_processor._span_processors == ()
    provider.get_tracer("program").start_span("undone").end()
    assert recorded(tmp_path).keys() == {"otel.begun before", "otel.after"}


def test_no_provider_is_set(patches):
    """Nobody sets a provider for a program that sets none, and a provider has one processor of ours."""
    OpenTelemetrySdk().install(patches)
    assert trace._TRACER_PROVIDER is None
    told = TracerProvider(shutdown_on_exit=False)._active_span_processor
    assert len(told._span_processors) == 1
    TracerProvider(active_span_processor=told, shutdown_on_exit=False)
    assert len(told._span_processors) == 1


def test_processors_in_a_pool(patches, tmp_path):
    """Where the SDK tells processors in other threads, a span is still recorded, with its own times."""
    OpenTelemetrySdk().install(patches)
    provider = TracerProvider(active_span_processor=ConcurrentMultiSpanProcessor(), shutdown_on_exit=False)
    with provider.get_tracer("program").start_as_current_span("in a pool"), rltrace.span("inside"):
        pass
    found = recorded(tmp_path)
    span, inside = found["otel.in a pool"], found["inside"]
    assert span.start_ns < inside.start_ns < inside.end_ns < span.end_ns
    assert span.lane is None


@pytest.mark.parametrize("now_ns", [times.NOW_NS, 0], ids=["told at once", "told late"])
def test_arrow_follows_the_context(patches, tmp_path, monkeypatch, now_ns):
    """An arrow leads from the span whose context a propagator sends to the one that goes on with it.

    A busy machine may let us hear of each beginning late.
    """
    monkeypatch.setattr(times, "NOW_NS", now_ns)
    OpenTelemetry().install(patches)
    OpenTelemetrySdk().install(patches)
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("program")
    sent: dict[str, str] = {}
    with tracer.start_as_current_span("client"):
        TraceContextTextMapPropagator().inject(sent)
    with tracer.start_as_current_span("server", context=TraceContextTextMapPropagator().extract(sent)):
        pass
    found = recorded(tmp_path)
    client, server = found["otel.client"], found["otel.server"]
    assert client.flows_out == server.flows_in == (f"otel:{client.args['trace_id']}:{client.args['span_id']}",)
    assert server.args["parent_id"] == client.args["span_id"]


def test_beginning_that_is_given_encloses_what_is_open(patches, tmp_path):
    """A span that began before one that is open, as the program says, is around that one."""
    OpenTelemetrySdk().install(patches)
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("program")
    with rltrace.span("asked"):
        request = tracer.start_span("request", start_time=time.time_ns() - SECOND)
    request.end()
    found = recorded(tmp_path)
    request, asked = found["otel.request"], found["asked"]
    assert request.start_ns < asked.start_ns < asked.end_ns < request.end_ns
    assert (request.lane, asked.lane) == (None, 0)


def test_api_alone_keeps_a_context(patches, tmp_path):
    """Without the SDK a context that came from elsewhere is handed on, and is the parent of what is recorded.

    Releases up to 1.30 hand on nothing that a `with` is given.
    """
    headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}

    def handed_on():
        sent: dict[str, str] = {}
        context = TraceContextTextMapPropagator().extract(headers)
        with trace.NoOpTracer().start_as_current_span("passed", context=context):
            TraceContextTextMapPropagator().inject(sent)
        return sent

    without_us = handed_on()
    OpenTelemetry().install(patches)
    assert handed_on() == without_us
    args = recorded(tmp_path)["otel.passed"].args
    if without_us:
        assert without_us == headers
        assert (args["trace_id"], args["parent_id"]) == ("a" * 32, "b" * 16)


def test_api_alone_keeps_what_is_current(patches, tmp_path):
    """Without the SDK what a request came with stays current below a span, and goes on with requests from there."""
    OpenTelemetry().install(patches)
    headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    sent: dict[str, str] = {}
    attached = context_api.attach(TraceContextTextMapPropagator().extract(headers))
    try:
        with trace.NoOpTracer().start_as_current_span("below"):
            TraceContextTextMapPropagator().inject(sent)
    finally:
        context_api.detach(attached)
    assert sent == headers
    assert "otel.below" in recorded(tmp_path)


class Broken(SpanProcessor):
    """A processor of the program's."""

    def on_end(self, span):
        raise OSError("the program's own")


def test_failure_of_ours_reaches_nobody(patches, monkeypatch, capfd):
    """What fails in our processor is counted; what fails in the program's reaches the program."""
    OpenTelemetrySdk().install(patches)
    provider = TracerProvider(shutdown_on_exit=False)
    monkeypatch.setattr(said, "ids", None)
    with provider.get_tracer("program").start_as_current_span("counted") as span:
        assert span.is_recording()
    hook = next(hook for hook in patches.hooks if hook.target.endswith("TracerProvider.__init__"))
    assert hook.failures == 2
    assert len(capfd.readouterr().err.splitlines()) == 1
    provider.add_span_processor(Broken())
    with pytest.raises(OSError, match="own"):
        provider.get_tracer("program").start_span("theirs").end()


def test_pause_records_nothing(patches, tmp_path):
    OpenTelemetrySdk().install(patches)
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("program")
    tracer.start_span("before").end()
    rltrace.pause()
    tracer.start_span("meanwhile").end()
    rltrace.resume()
    tracer.start_span("after").end()
    assert recorded(tmp_path).keys() == {"otel.before", "otel.after"}
