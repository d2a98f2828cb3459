"""A run is sent to a collector while it goes on, whatever the collector does, and the run does not notice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from click.testing import CliRunner
from growing_runs import grow
from inferred_loops import HOOK, REF, forward, generate, learn
from otlp_server import Collector, Received, grpc_collector, http_collector
from recordings import SECOND, Written, span
from rltrace_exporters.otlp.endpoint import variables
from rltrace_exporters.otlp.exporter import Otlp
from rltrace_exporters.otlp.live import LiveOtlp
from traced_runs import traced_environment

from rltrace.cli import main
from rltrace.events import COLLECTION, STEP, Span
from rltrace.read.recording import Recording
from rltrace.run.supervisor import Outcome

PROGRAM = Path(__file__).parents[1] / "programs" / "two_processes.py"
STEPS, CALLS, CALL_SECONDS = 2, 10_000, 0.9
SECRET = "sesame-open"
GRPC = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}


class Run(NamedTuple):
    """A traced program, and what a collector had received when it was over."""

    recording: Recording
    collector: Collector
    spans: list[Received]
    err: str
    commands: list[str]
    """Command lines of what ran beside it."""

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.attributes.get("rltrace.name") == name]


def start(folder: Path, url: str, steps: int, calls: int, seconds: float, **variables: str) -> subprocess.Popen[str]:
    """Start the program under `rltrace exec --otlp`."""
    options = ["--out", str(folder), "--sample", "0", "--otlp", *([url] if url else [])]
    program = [sys.executable, str(PROGRAM), str(steps), str(calls), str(seconds)]
    return subprocess.Popen(
        [sys.executable, "-m", "rltrace", "exec", *options, "--", *program],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def commands_beside(process: subprocess.Popen[str], module: str) -> list[str]:
    """Return the command lines of a process's children that run a module of ours, once there are any."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        lines = [Path(f"/proc/{child}/cmdline").read_bytes().decode() for child in children.read_text().split()]
        if found := [line.replace("\0", " ") for line in lines if module in line]:
            return found
        time.sleep(0.02)
    return []


def until(is_so: object, seconds: float = 120.0) -> None:
    """Wait for something that happens elsewhere."""
    end = time.monotonic() + seconds
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


def step_numbers(collector: Collector) -> list[int]:
    return sorted(one.attributes["rltrace.step"] for one in collector.spans if one.name == STEP)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Ten thousand spans a second, with a password in the URL and a header."""
    folder = tmp_path_factory.mktemp("live") / "run"
    with http_collector(Collector()) as collector:
        url = collector.url.replace("://", f"://user:{SECRET}@")
        headers = f"x-api-key={SECRET}"
        process = start(folder, url, STEPS, CALLS, CALL_SECONDS, OTEL_EXPORTER_OTLP_HEADERS=headers)
        commands = commands_beside(process, "live_export")
        _, err = process.communicate()
        yield Run(Recording.open(folder), collector, collector.spans, err, commands)


def recorded(recording: Recording) -> Iterator[tuple[str, Span]]:
    """Every span but garbage collections, which are never sent."""
    for process in recording.processes:
        spans = (event for event in process.events() if isinstance(event, Span))
        yield from ((process.key, one) for one in spans if one.name != COLLECTION)


def test_ten_thousand_spans_a_second(live: Run) -> None:
    """All arrive, once each, although they are recorded at that rate."""
    calls = sorted(event.start_ns for _, event in recorded(live.recording) if event.name.startswith("call."))
    thousands = [(last - first) / SECOND for first, last in zip(calls, calls[1000:], strict=False)]
    assert min(thousands) < 0.11  # the fastest thousand, on a machine that does other things too
    wanted = Counter((key, one.name, one.args.get("number")) for key, one in recorded(live.recording))
    arrived = Counter(
        (one.resource["service.instance.id"], one.attributes["rltrace.name"], one.attributes.get("rltrace.number"))
        for one in live.spans
        if one.name != "run"
    )
    assert arrived == wanted and sum(wanted.values()) > STEPS * CALLS
    assert f"{len(live.spans):,} spans of {STEPS} steps were sent" in live.err


def test_what_was_sent_live_is_what_is_exported(live: Run) -> None:
    """Ids, parents, links and attributes are equal, and times to the microsecond: a later export doubles nothing."""
    with http_collector(Collector()) as collector:
        Otlp().send(live.recording, collector.url)
        exported = {one.span_id: one for one in collector.spans}
    assert {one.span_id for one in live.spans} == exported.keys()
    for one in live.spans:
        other = exported[one.span_id]
        assert abs(one.start_ns - other.start_ns) < 1_000 and abs(one.end_ns - other.end_ns) < 1_000
        unlike = {"start_ns": 0, "end_ns": 0, "events": []}
        assert one._replace(**unlike) == other._replace(**unlike)
        assert [event[0] for event in one.events] == [event[0] for event in other.events]


def test_arrows_errors_and_deaths(live: Run) -> None:
    """An order is linked with what it began in the other process; an error has its message; a phase in which a
    process was killed is sent too."""
    by_id = {one.span_id: one for one in live.spans}
    calls = live.named("worker.call")
    senders = [by_id[span_id] for one in calls for _, span_id in one.links]
    assert [sender.attributes["rltrace.name"] for sender in senders] == ["order"] * STEPS
    assert all(sender.trace_id == one.trace_id for sender, one in zip(senders, calls, strict=True))
    assert {one.status_message for one in live.named("reward")} == {"ValueError: no answer"}
    (died,) = live.named("ref.log_prob")
    assert (died.status, died.attributes["rltrace.open"]) == (2, True)
    assert died.status_message == "its process was killed by signal 9"


def test_secrets_are_kept(live: Run) -> None:
    """They reach the collector; they are in no file of the Recording, no command line and no message."""
    assert {headers["x-api-key"] for headers in live.collector.headers} == {SECRET}
    assert all(headers["authorization"].startswith("Basic ") for headers in live.collector.headers)
    assert live.commands
    files = [file.read_bytes() for file in live.recording.folder.rglob("*") if file.is_file()]
    assert SECRET.encode() not in b"".join(files)
    assert SECRET not in live.err + "".join(live.commands)


def test_a_collector_that_dies_and_comes_back_slow(tmp_path: Path) -> None:
    """It is killed after the first step and comes back for the last ones, slowly: everything arrives. What
    it took and did not say so in time comes again, the same."""
    collector = Collector()
    with grpc_collector(collector):
        url = collector.url
        process = start(tmp_path / "run", url, 6, 500, 0.6, GO_ON=str(tmp_path / "go_on"), **GRPC)
        until(lambda: step_numbers(collector))
        assert process.poll() is None
    (tmp_path / "go_on").touch()
    time.sleep(1.5)
    collector.delay_s = 0.3
    with grpc_collector(collector, int(url.rpartition(":")[2])):
        _, err = process.communicate()
    assert sorted(set(step_numbers(collector))) == [0, 1, 2, 3, 4, 5]
    assert "spans of 6 steps were sent" in err and "were not" not in err
    recording = Recording.open(tmp_path / "run")
    arrived = {one.span_id: one for one in collector.spans}
    assert len(arrived) == 1 + sum(1 for _ in recorded(recording))
    assert all(arrived[one.span_id] == one for one in collector.spans)


def test_a_collector_that_refuses(tmp_path: Path) -> None:
    """The line says why."""
    written = Written(tmp_path / "run").process("driver-1-0", span(STEP, 0, 5, step=0), role="driver", ended_s=6)
    with http_collector(Collector()) as collector:
        collector.refusal = (400, grpc.StatusCode.INVALID_ARGUMENT)
        export = LiveOtlp(written.read(), collector.url)
        export.poll()
        delivery = export.finish(0.3)
    assert not delivery.is_all
    assert "0 spans of 1 steps were sent, 2 were not: Failed to export" in str(delivery) and "400" in str(delivery)


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc", "none wanted"])
def test_a_backend_without_metrics(protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that takes traces only, as Jaeger and MLflow, gets them, live and later, and the line says so."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc" if protocol == "grpc" else "http/protobuf")
    steps = [span(STEP, 10 * n, 10 * n + 9, step=n, tokens=7) for n in range(3)]
    written = Written(tmp_path / "run").process("driver-1-0", *steps, role="driver", ended_s=40)
    collector = Collector()
    if protocol == "none wanted":
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    else:
        collector.takes_metrics = False
    with (grpc_collector if protocol == "grpc" else http_collector)(collector):
        export = LiveOtlp(written.read(), collector.url)
        export.poll()
        delivery = export.finish(10)
        later = Otlp().send(written.read(), collector.url)
    assert delivery.is_all and delivery.spans == 4 and len(collector.spans) == 2 * 4 and not collector.points
    for said in (str(delivery), later):
        assert re.search(r"no metrics \(.*(404|UNIMPLEMENTED|OTEL_METRICS_EXPORTER=none)", said), said


def test_metrics_do_not_hold_spans_up(tmp_path: Path) -> None:
    """While metrics are refused for now, spans go on being sent."""
    written = Written(tmp_path / "run").process("driver-1-0", span(STEP, 0, 5, step=0), role="driver", ended_s=6)
    with http_collector(Collector()) as collector, http_collector(Collector()) as of_metrics:
        of_metrics.refusal = (503, grpc.StatusCode.UNAVAILABLE)
        with variables({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{of_metrics.url}/v1/metrics"}):
            export = LiveOtlp(written.read(), collector.url)
        export.poll()
        delivery = export.finish(1)
    assert len(collector.spans) == 2 and not delivery.is_all and delivery.left_spans == 0


def test_beside_a_program_that_records_itself(tmp_path: Path) -> None:
    """`python -m rltrace.otlp` waits for the Recording, sends it, and ends with the run."""
    folder = tmp_path / "run"
    with http_collector(Collector()) as collector:
        words = [sys.executable, "-m", "rltrace.otlp", str(folder), "--otlp", collector.url]
        beside = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        program = [sys.executable, str(PROGRAM), "2", "100", "0.2"]
        subprocess.run(program, env=traced_environment(folder), check=True, capture_output=True)
        _, err = beside.communicate()
    assert beside.returncode == 0
    assert step_numbers(collector) == [0, 1]
    assert err.splitlines()[0] == f"rltrace: sending {folder} to {collector.url} (http/protobuf)"
    assert "spans of 2 steps were sent" in err.splitlines()[1]


def test_the_reference_runs_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`otlp:` is a URL, or true for the variables; what it says is given to the process beside the run alone, and the
    Recording has no password of it."""
    given: list[dict[str, str] | None] = []

    def supervise(*_: object, otlp: dict[str, str] | None, **__: object) -> Outcome:
        given.append(otlp)
        return Outcome(0)

    monkeypatch.setattr("rltrace.run.supervisor.supervise", supervise)
    for number, said in enumerate((f"http://user:{SECRET}@host:4317", True, False, "nonsense")):
        config = tmp_path / f"{number}.yaml"
        config.write_text(f"otlp: {str(said).lower()}\n")
        done = CliRunner().invoke(main, ["run", "--out", str(tmp_path / str(number)), str(config)])
        assert done.exit_code == 0 or said == "nonsense", done.output
    assert done.exit_code == 2 and "nonsense: not a URL" in done.output
    url, from_variables, none = given
    assert url is not None and url["OTEL_EXPORTER_OTLP_ENDPOINT"].startswith("http://user:")
    assert url["OTEL_EXPORTER_OTLP_PROTOCOL"] == "grpc"
    assert (from_variables, none) == ({}, None)
    assert SECRET not in (tmp_path / "0" / "manifest.json").read_text()


def test_steps_that_nobody_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of two ranks without marks is sent once both have begun the next one, with its phases and what is in
    them, as a later export has it."""
    monkeypatch.setattr("rltrace.read.following.INFERRED_SHARE", 1e9)
    monkeypatch.setattr("rltrace_exporters.otlp.live.HELD_SECONDS", 1e12)  # its times are those of 1970
    written = Written(tmp_path / "run")
    for rank in range(2):
        asked = span("rollout.request", 1, 2, request_id=f"r{rank}")
        first = [*generate(0, None), *asked, [0, 4 * SECOND, None, True], *learn(6 + rank)]
        others = [
            [*generate(at, at + 4), *forward(at + 4, at + 5, REF), *learn(at + 6 + rank)] for at in range(20, 100, 20)
        ]
        written.process(f"rank-{rank}", first, *others, hooks=(HOOK,), role="worker", rank=rank, ended_s=120)
    growing, sent = grow(written.folder), []
    with http_collector(Collector()) as collector:
        next(growing)
        export = LiveOtlp(Recording.open(written.folder), collector.url)
        for _ in growing:
            export.poll()
            sent.append(export.steps_sent)
        delivery = export.finish(10)
    assert delivery.is_all and {0, 1, 2, 3} <= {*sent}
    with http_collector(Collector()) as later:
        Otlp().send(Recording.open(written.folder), later.url)
    exported = {one.span_id: one for one in later.spans}
    arrived = {one.span_id: one for one in collector.spans}
    assert arrived == exported and len(arrived) == len(collector.spans)
    assert step_numbers(collector) == sorted([*range(5)] * 2)
    by_id = {one.span_id: one for one in collector.spans}
    above = {one.attributes["rltrace.name"]: by_id[one.parent_id].name for one in collector.spans if one.parent_id}
    assert above["optimizer.step"] == "actor.update" and above["rollout.request"] == "rollout.generate"


def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the collector takes nothing, a bounded number of spans is put together; the rest is, once it takes them."""
    monkeypatch.setattr("rltrace_exporters.otlp.sending.MOST_WAITING", 500)
    records = []
    for step in range(6):
        records.append(span(STEP, 10 * step, 10 * step + 9, step=step))
        records += [span(f"call.{number}", 10 * step + 1, 10 * step + 2) for number in range(300)]
    written = Written(tmp_path / "run").process("driver-1-0", *records, role="driver", ended_s=60)
    with http_collector(Collector()) as collector:
        collector.refusal = (400, grpc.StatusCode.INVALID_ARGUMENT)
        export = LiveOtlp(written.read(), collector.url)
        for _ in range(5):
            export.poll()
        assert 500 <= export.waiting_spans <= 500 + 512
        collector.refusal = None
        delivery = export.finish(10)
    assert delivery.is_all and delivery.spans == 6 * 301 + 1
    assert step_numbers(collector) == [0, 1, 2, 3, 4, 5]
