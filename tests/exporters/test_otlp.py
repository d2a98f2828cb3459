"""Recordings as OpenTelemetry's traces and metrics, as a collector on the official protobuf services received them."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from otlp_server import Collector, Point, Received, grpc_collector, http_collector
from recordings import Written, span
from rltrace_exporters.otlp.calls import MOST_ALIKE, Call, Tree
from rltrace_exporters.otlp.endpoint import set_up, shown
from rltrace_exporters.otlp.exporter import Otlp
from shipped import QWEN, VERL, opened

import rltrace
from rltrace.analysis.clocks import TimeLine
from rltrace.analysis.selected import selected
from rltrace.errors import ConfigError, OutputError
from rltrace.events import AGENT_REQUEST, REQUEST, SERVER_REQUEST, STEP, TRAJECTORIES, Span, owner_of_counter
from rltrace.read.recording import Recording
from rltrace.read.selection import Selection, numbers

SERVERS = {"grpc": grpc_collector, "http/protobuf": http_collector}
CLEARED = ("ENDPOINT", "PROTOCOL", "HEADERS", "TIMEOUT")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the user's, and none that another test has set."""
    for name in CLEARED:
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)


class Sent:
    """A Recording, and what a collector received of it."""

    def __init__(self, recording: Recording, collector: Collector, line: str) -> None:
        self.recording = recording
        self.spans: list[Received] = collector.spans
        self.points: list[Point] = collector.points
        self.line = line
        self.by_id = {span.span_id: span for span in self.spans}

    def named(self, name: str) -> list[Received]:
        """Spans that were recorded by a name."""
        return [span for span in self.spans if span.attributes.get("rltrace.name") == name]

    def above(self, span: Received) -> Iterator[Received]:
        """What a span is inside of, from the inside out."""
        while span.parent_id:
            span = self.by_id[span.parent_id]
            yield span


def sent(recording: Recording, protocol: str = "grpc") -> Sent:
    """Export a Recording to a collector."""
    with pytest.MonkeyPatch.context() as patch, SERVERS[protocol](Collector()) as collector:
        for name in CLEARED:
            patch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
        patch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        return Sent(recording, collector, Otlp().send(recording, collector.url))


@functools.cache
def _shipped(file: Path) -> Sent:
    return sent(opened(file))


@pytest.fixture(params=[QWEN, VERL], ids=lambda file: file.stem)
def shipped(request: pytest.FixtureRequest) -> Sent:
    return _shipped(request.param)


@pytest.fixture
def verl() -> Sent:
    return _shipped(VERL)


@functools.cache
def recorded(recording: Recording) -> Counter[tuple[Any, ...]]:
    """Every span that was recorded: process, name, and both times in nanoseconds since 1970."""
    line = TimeLine(recording)
    return Counter(
        (process.key, event.name, event.start_ns + line.offset_ns(process), event.end_ns + line.offset_ns(process))
        for process in recording.processes
        for event in process.events()
        if isinstance(event, Span) and event.end_ns is not None
    )


def test_times_are_those_of_the_recording(shipped: Sent) -> None:
    """Every span that arrives is one of the Recording's, in the right process, to the nanosecond, and none is twice."""
    arrived = Counter(
        (span.resource["service.instance.id"], span.attributes["rltrace.name"], span.start_ns, span.end_ns)
        for span in shipped.spans
        if span.name != "run"
    )
    assert len(shipped.spans) > 1_000
    assert not arrived - recorded(shipped.recording)
    assert len(shipped.by_id) == len(shipped.spans)


def test_one_trace_for_each_step(shipped: Sent) -> None:
    """Each step is one trace of hundreds of spans, whose root is the step; what is in none is in the run's trace."""
    traces = defaultdict(list)
    for one in shipped.spans:
        traces[one.trace_id].append(one)
    roots = {trace: [span for span in spans if not span.parent_id] for trace, spans in traces.items()}
    assert sorted(span.name for (span,) in roots.values()) == ["run", "step", "step", "step", "step"]
    assert all(100 < len(spans) < 1_000 for spans in traces.values())
    steps = [span for (span,) in roots.values() if span.name == STEP]
    (run,) = [span for (span,) in roots.values() if span.name == "run"]
    assert len({span.attributes["rltrace.step"] for span in steps}) == 4
    assert all((run.trace_id, run.span_id) in span.links for span in steps)


def test_parents(shipped: Sent) -> None:
    """Each span's parent is in its trace and began before it; one in the same thread of the same process is what was
    around it there."""
    around = 0
    for one in shipped.spans:
        if not one.parent_id:
            continue
        parent = shipped.by_id[one.parent_id]
        assert parent.trace_id == one.trace_id
        assert parent.start_ns <= one.start_ns
        if parent.attributes.get("thread.id") == one.attributes["thread.id"] and parent.name != "run":
            around += parent.end_ns >= one.end_ns
            assert parent.end_ns >= one.start_ns
    assert around > 500


def test_every_call_is_sent_or_counted(shipped: Sent) -> None:
    """Of the names of which there are thousands, those that are not sent are in the numbers and seconds of their
    parents."""
    steps = [span for span in shipped.spans if span.name == STEP]
    first_ns, last_ns = min(span.start_ns for span in steps), max(span.end_ns for span in steps)
    counts: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for one in shipped.spans:
        counts[one.attributes.get("rltrace.name", "")] += 1
        seconds[one.attributes.get("rltrace.name", "")] += (one.end_ns - one.start_ns) / 1e9
        for key, value in one.attributes.items():
            if key.startswith("rltrace.inside."):
                name, _, what = key.removeprefix("rltrace.inside.").rpartition(".")
                (counts if what == "count" else seconds)[name] += value
    wanted, wanted_seconds = Counter(), Counter()
    for (_, name, start_ns, end_ns), many in recorded(shipped.recording).items():
        if first_ns <= start_ns < last_ns:
            wanted[name] += many
            wanted_seconds[name] += (end_ns - start_ns) / 1e9 * many
    frequent = [name for name in ("fsdp.all_gather", "gpu.fsdp.reduce_scatter", "weight_sync.pack") if wanted[name]]
    assert frequent
    for name in frequent:
        assert counts[name] == wanted[name] > 100
        assert seconds[name] == pytest.approx(wanted_seconds[name])


def test_a_second_export_sends_the_same() -> None:
    """Over another protocol too, and a chosen step is the same trace with the same spans: backends keep one of each."""
    first = _shipped(QWEN)
    again = sent(first.recording, "http/protobuf")
    assert sorted(again.spans, key=_key) == sorted(first.spans, key=_key)
    chosen = sent(selected(first.recording, Selection(steps=numbers("2"))))
    steps = [span for span in chosen.spans if span.name == STEP]
    assert [span.attributes["rltrace.step"] for span in steps] == [2]
    of_step = {span.span_id for span in first.spans if span.trace_id == steps[0].trace_id}
    assert {span.span_id for span in chosen.spans if span.trace_id == steps[0].trace_id} == of_step


def _key(span: Received) -> str:
    return span.span_id


def test_one_resource_for_each_process(shipped: Sent) -> None:
    """Service, host, pid, rank and GPU are those of the process that recorded the span."""
    resources = {span.resource["service.instance.id"]: span.resource for span in shipped.spans if span.name != "run"}
    for process in shipped.recording.processes:
        if process.key in resources:
            said = resources[process.key]
            assert said["service.name"] == "rltrace"
            assert (said["host.name"], said["process.pid"]) == (process.host, process.pid)
            assert said.get("rltrace.rank") == process.rank
            assert said.get("rltrace.gpu.uuid") == process.device_uuid
            assert said["rltrace.run.id"] == shipped.recording.manifest["run_id"]
    assert {said.get("rltrace.rank") for said in resources.values()} >= {0, 1, 2, 3}


def test_a_trajectory_is_one_tree(verl: Sent) -> None:
    """From the agent loop over the server to the engine, in three processes; its tokens are said once."""
    requests = verl.named(REQUEST)
    trees = 0
    for request in requests:
        above = [span.attributes["rltrace.name"] for span in verl.above(request)]
        if above[:3] == [SERVER_REQUEST, AGENT_REQUEST, TRAJECTORIES[0]]:
            trees += 1
            processes = {span.resource["service.instance.id"] for span in (request, *verl.above(request))}
            assert len(processes) >= 3
            assert "gen_ai.usage.output_tokens" not in request.attributes
    assert trees > 100
    for asked in verl.named(AGENT_REQUEST):
        said = asked.attributes
        assert (asked.name, said["gen_ai.operation.name"], asked.kind) == ("text_completion", "text_completion", 3)
        assert said["gen_ai.usage.output_tokens"] == said["rltrace.tokens"] == 128
        assert asked.schema == "https://opentelemetry.io/schemas/1.41.0"
    assert {span.name for span in verl.named(TRAJECTORIES[0])} == {"invoke_agent"}


def test_what_requests_were_left_out_is_said(verl: Sent) -> None:
    """Of many trajectories the longest are sent and some others, and the step says how many there were."""
    for step in verl.named(STEP):
        here = [one for one in verl.named(TRAJECTORIES[0]) if one.trace_id == step.trace_id]
        assert step.attributes["rltrace.requests_sent"] == len(here) < step.attributes["rltrace.requests"]
        longest = max(end_ns - start_ns for start_ns, end_ns in _trajectories(verl.recording, step))
        assert max(one.end_ns - one.start_ns for one in here) == longest


def _trajectories(recording: Recording, step: Received) -> list[tuple[int, int]]:
    return [
        (start_ns, end_ns)
        for _, name, start_ns, end_ns in recorded(recording)
        if name in TRAJECTORIES and step.start_ns <= start_ns < step.end_ns
    ]


def test_arrows_are_links(shipped: Sent) -> None:
    """A span in which an arrow arrives is linked with the one that it left, in another process."""
    linked = [span for span in shipped.spans if span.links and span.name not in (STEP, "run")]
    assert len(linked) > 20
    for one in linked:
        for trace_id, span_id in one.links:
            sender = shipped.by_id[span_id]
            assert sender.trace_id == trace_id
            assert sender.resource["service.instance.id"] != one.resource["service.instance.id"]


def test_metrics(shipped: Sent) -> None:
    """Seconds by phase, bytes by owner, tokens and requests are those of the Recording, at its times."""
    line = TimeLine(shipped.recording)
    phases: Counter[tuple[str, str]] = Counter()
    owned, requests = set(), 0
    for process in shipped.recording.processes:
        for event in process.events():
            if isinstance(event, Span):
                phases[process.key, event.name] += event.seconds if event.is_phase else 0
                requests += event.name == REQUEST
            elif owner_of_counter(event.name):
                owned.add(
                    (process.key, owner_of_counter(event.name), event.ts_ns + line.offset_ns(process), event.value)
                )
    by_name = defaultdict(list)
    for point in shipped.points:
        by_name[point.name].append(point)
    arrived = {
        (point.resource["service.instance.id"], point.attributes["rltrace.owner"], point.at_ns, point.value)
        for point in by_name["rltrace.memory.owned"]
    }
    assert arrived == owned
    last = {}
    for point in by_name["rltrace.phase.time"]:
        key = (point.resource["service.instance.id"], point.attributes["rltrace.phase"])
        assert key not in last or last[key][0] < point.at_ns
        last[key] = (point.at_ns, point.value)
    assert {key: value for key, (_, value) in last.items()} == pytest.approx(
        {key: value for key, value in phases.items() if value}
    )
    assert sum(point.count for point in by_name["gen_ai.server.request.duration"]) == requests > 100
    assert {point.unit for point in by_name["rltrace.gpu.memory"]} == {"By"}
    assert len(by_name["rltrace.step.time"]) == 4


def test_errors(tmp_path: Path) -> None:
    """An exception is an event with its message and the status; a killed process's open span says by which signal, and
    a step that is over is none."""
    written = Written(tmp_path / "run").process(
        "driver-1-0",
        span(STEP, 1, 9, step=0),
        span("reward", 2, 3, phase=True, error="ValueError", error_message="no answer"),
        span("call", 4, 5, error="StopIteration"),
        span("call", 6, 7, error="TimeoutError"),
        role="driver",
        ended_s=10,
    )
    written.process("worker-2-0", span("actor.update", 4, None, phase=True), role="worker", rank=0)
    lines = tmp_path / "run" / "processes" / "worker-2-0" / "process.jsonl"
    with lines.open("a") as file:
        file.write('{"kind": "exit", "killed_by": 9, "end_ns": 8000000000, "was_stopped": false}\n')
    found = sent(written.read())
    (reward,), (died,) = found.named("reward"), found.named("actor.update")
    assert (reward.status, reward.status_message) == (2, "ValueError: no answer")
    assert reward.events == [
        ("exception", reward.end_ns, {"exception.type": "ValueError", "exception.message": "no answer"})
    ]
    assert reward.attributes["error.type"] == "ValueError"
    assert sorted((call.status, len(call.events)) for call in found.named("call")) == [(0, 0), (2, 1)]
    assert (died.status, died.status_message) == (2, "its process was killed by signal 9")
    assert died.attributes["rltrace.open"] and died.end_ns - died.start_ns == 4_000_000_000
    assert found.by_id[died.parent_id].name == STEP


def test_frequent_calls_become_totals(tmp_path: Path) -> None:
    """Up to sixteen calls of one name are spans; one more, and their parent says how many there were and how long."""
    few = [span("few", 1 + n / 100, 1.005 + n / 100) for n in range(MOST_ALIKE)]
    many = [span("many", 2 + n / 100, 2.005 + n / 100) for n in range(MOST_ALIKE + 1)]
    failed = span("many", 2.5, 2.6, error="KeyError")
    phase = span("reward", 0.5, 4, phase=True)
    found = sent(
        Written(tmp_path / "run")
        .process("driver-1-0", span(STEP, 0, 5, step=0), phase, *few, *many, failed, role="driver", ended_s=6)
        .read()
    )
    (reward,) = found.named("reward")
    assert len(found.named("few")) == MOST_ALIKE
    assert [call.status for call in found.named("many")] == [2]
    assert reward.attributes["rltrace.inside.many.count"] == MOST_ALIKE + 1
    assert reward.attributes["rltrace.inside.many.seconds"] == pytest.approx((MOST_ALIKE + 1) * 0.005)


def test_spans_that_the_program_made_itself(tmp_path: Path) -> None:
    """A span of OpenTelemetry's API keeps its attributes' names, and is linked with the program's."""
    ids = {"trace_id": "0" * 31 + "a", "span_id": "0" * 15 + "b"}
    said = {"gen_ai.request.model": "m", "otel.plain": 1, **ids}
    call = span("otel.llm_request", 1, 2, **said)
    found = sent(Written(tmp_path / "run").process("main-1-0", call, ended_s=6).read())
    (one,) = found.named("otel.llm_request")
    assert (one.attributes["gen_ai.request.model"], one.attributes["plain"]) == ("m", 1)
    assert one.links == [(ids["trace_id"], ids["span_id"])]


def test_a_recording_without_steps(tmp_path: Path) -> None:
    """It is one trace, whose root is the run; the first thousand of a process's calls are in it, the others counted."""
    calls = [span("work", 1 + n / 1000, 1.0005 + n / 1000) for n in range(1100)]
    found = sent(Written(tmp_path / "run").process("main-1-0", *calls, ended_s=6).read())
    (run,) = [span for span in found.spans if not span.parent_id]
    assert (run.name, len(found.named("work"))) == ("run", 1000)
    assert run.attributes["rltrace.spans_left_out"] == 100


def test_ranks_with_steps_of_their_own(tmp_path: Path) -> None:
    """Without a driver the lowest rank's steps count; the others' are below the one of the same number, although they
    begin earlier."""
    written = Written(tmp_path / "run")
    for rank in (1, 0):
        begin = 1 - 0.1 * rank
        records = [span(STEP, begin + 2 * n, begin + 2 * n + 1.9, step=n) for n in range(2)]
        phases = [span("reward", begin + 2 * n + 0.01, begin + 2 * n + 0.5, phase=True) for n in range(2)]
        written.process(f"rank-{rank}-0", *records, *phases, role="worker", rank=rank, ended_s=9)
    found = sent(written.read())
    roots = [span for span in found.spans if not span.parent_id and span.name == STEP]
    assert [(root.resource["rltrace.rank"], root.attributes["rltrace.step"]) for root in roots] == [(0, 0), (0, 1)]
    others = [span for span in found.named(STEP) if span.parent_id]
    assert [(span.parent_id, span.attributes["rltrace.step"]) for span in others] == [
        (root.span_id, root.attributes["rltrace.step"]) for root in roots
    ]
    for phase in found.named("reward"):
        assert found.by_id[phase.parent_id].resource == phase.resource


@pytest.mark.parametrize("protocol", SERVERS)
def test_a_collector_that_refuses(tmp_path: Path, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line says where, why and what arrived; a token that was sent along is nowhere in it."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer sesame-open")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    written = Written(tmp_path / "run").process("driver-1-0", span(STEP, 0, 5, step=0), role="driver", ended_s=6)
    with SERVERS[protocol](Collector()) as collector, pytest.raises(OutputError) as refused:
        collector.refusal = (401, grpc.StatusCode.UNAUTHENTICATED)
        Otlp().send(written.read(), collector.url)
    assert collector.headers[0]["authorization"] == "Bearer sesame-open"
    said = str(refused.value)
    assert said.startswith(f"{collector.url} ({protocol}): Failed to export ")
    assert "0 spans were sent" in said and ("401" in said or "UNAUTHENTICATED" in said)
    assert "sesame" not in said


def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one line, after the time that OTEL_EXPORTER_OTLP_TIMEOUT gives."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    written = Written(tmp_path / "run").process("driver-1-0", span(STEP, 0, 5, step=0), role="driver", ended_s=6)
    with pytest.raises(OutputError, match="0 spans were sent"):
        Otlp().send(written.read(), "http://127.0.0.1:9")


def test_the_users_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES count; what a process says of itself stays."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "grpo")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=rl,host.name=laptop")
    found = sent(Written(tmp_path / "run").process("driver-1-0", span(STEP, 0, 5), role="driver", ended_s=6).read())
    (step,) = found.named(STEP)
    assert (step.resource["service.name"], step.resource["team"]) == ("grpo", "rl")
    assert step.resource["host.name"] != "laptop"


def test_urls() -> None:
    """Port 4317 is gRPC, all else HTTP, unless a variable says the protocol; nothing secret of a URL is shown."""
    assert set_up("http://a:4317", {})["OTEL_EXPORTER_OTLP_PROTOCOL"] == "grpc"
    assert set_up("https://a/otlp", {})["OTEL_EXPORTER_OTLP_PROTOCOL"] == "http/protobuf"
    assert "OTEL_EXPORTER_OTLP_PROTOCOL" not in set_up(
        "http://a:4317", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    )
    assert set_up("", {}) == {}
    with pytest.raises(ConfigError, match="not a URL"):
        set_up("train.py", {})
    assert shown("https://u:secret@h:1/p?api-key=secret") == "https://h:1/p"


def test_a_million_calls_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls that nothing encloses for long, the older ones become a sum at once; the step counts all of them."""
    monkeypatch.setattr("rltrace_exporters.otlp.calls.MOST_IN_A_ROW", 64)
    folder = tmp_path / "run"
    rltrace.start(folder, role="driver")
    with rltrace.span(STEP, step=0):
        for number in range(1_000):
            with rltrace.span("work"):
                pass
            if number == 500:
                with rltrace.phase("reward"):
                    pass
    rltrace.stop()
    found = sent(Recording.open(folder))
    (step,) = found.named(STEP)
    assert step.attributes["rltrace.inside.work.count"] == 1_000
    assert [one.parent_id for one in found.named("reward")] == [step.span_id]
    tree = Tree("main-1-0")
    for number in range(1_000):
        tree.add(Call("main-1-0", Span("work", 7, 0, 10 * number, 10 * number + 5, {}), 10 * number + 5, 0))
    assert len(held := tree.take(0, 20_000)) <= 64
    assert sum(count for call in held for count, _ in call.totals.values()) + len(held) - 1 == 1_000
