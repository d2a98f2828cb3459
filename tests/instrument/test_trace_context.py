"""The W3C context of a trace crosses HTTP requests and Ray's calls: real clients, a real server and real Ray."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from traced_runs import ROOT, run_traced

from rltrace.instrument.opentelemetry import context

pytest.importorskip("aiohttp")
pytest.importorskip("httpx")

PROGRAMS = ROOT / "tests" / "programs"
CLIENTS = ("requests", "httpx", "async httpx", "aiohttp")
NOWHERE = ["0" * 32, "0" * 16, ""]


class Echo(BaseHTTPRequestHandler):
    """Answers with the headers that it gets."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/redirect":
            self.send_response(307)
            self.send_header("location", "/")
            self.send_header("content-length", "0")
            self.end_headers()
            return
        answer = json.dumps([[name.lower(), value] for name, value in self.headers.items()]).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def requests_of(tmp_path, url, *modes, **environment):
    """The run, and in each mode the context of the program's span and the headers that the server got by client."""
    source = (PROGRAMS / "trace_context.py").read_text().replace("sys.argv[1:]", repr([url, *modes]))
    run = run_traced(tmp_path, source, **environment)
    assert (run.returncode, run.err) == (0, "")
    said = [json.loads(line) for line in run.out.splitlines()]
    assert [tuple(answers) for _, answers in said] == [CLIENTS] * len(modes)
    return run, said


def sent(answers, header="traceparent"):
    """The values of a header, by client."""
    return {client: [value for name, value in headers if name == header] for client, headers in answers.items()}


def from_all(*values):
    """What `sent` returns where every client sends these values."""
    return {client: [*values] for client in CLIENTS}


@pytest.fixture(scope="module")
def with_sdk(tmp_path_factory, url):
    run, ((own, answers),) = requests_of(tmp_path_factory.mktemp("sdk"), url, "sdk")
    return run, own, answers


@pytest.fixture(scope="module")
def asked_for(tmp_path_factory, url):
    """What a program without a span sends if a context is asked for: where it has a context of its own, and none."""
    _, said = requests_of(tmp_path_factory.mktemp("asked"), url, "own", "none", RLTRACE_TRACE_CONTEXT="1")
    return [answers for _, answers in said]


def test_requests_carry_the_context(with_sdk):
    """The context of the program's span is in each request, once, and its baggage is in none."""
    _, own, answers = with_sdk
    assert sent(answers) == from_all(own)
    assert sent(answers, "baggage") == from_all()
    assert sent(answers, "x-session")["aiohttp"] == ["1"], "what else is sent stays"


def test_arrows_leave_with_requests(with_sdk):
    """An arrow leaves from the span that asks, by the ids that the server gets."""
    run, own, _ = with_sdk
    (trajectory,) = run.spans("otel.trajectory")
    _, trace_id, span_id, _ = own.split("-")
    assert (trajectory.args["trace_id"], trajectory.args["span_id"]) == (trace_id, span_id)
    assert set(trajectory.flows_out) == {f"otel:{trace_id}:{span_id}"}


def test_context_of_the_program_stays(asked_for):
    """What the program sends itself is left alone."""
    answers, _ = asked_for
    assert sent(answers) == from_all(f"00-{'a' * 32}-{'b' * 16}-01")


def test_no_context_without_a_span(tmp_path, url, asked_for):
    """Without a span nothing is sent, unless it is asked for; then each request begins a trace."""
    _, ((_, answers),) = requests_of(tmp_path, url, "none")
    assert sent(answers) == from_all()
    _, answers = asked_for
    begun = [value for (value,) in sent(answers).values()]
    assert all(context._FORM.fullmatch(value) for value in begun)
    assert len({value.split("-")[1] for value in begun}) == len(CLIENTS)


def test_nothing_is_sent_if_that_is_asked(tmp_path, url):
    run, ((_, answers),) = requests_of(tmp_path, url, "sdk", RLTRACE_TRACE_CONTEXT="0")
    assert sent(answers) == from_all()
    reasons = {hook["reason"] for hook in run.hooks().values() if hook["instrumentation"].endswith("_context")}
    assert reasons == {"RLTRACE_TRACE_CONTEXT=0"}


def test_trajectory_is_one_trace(monkeypatch):
    """What is begun within a trajectory is one trace, whose id says which."""
    from rltrace.hooks import trajectories

    monkeypatch.setenv(context.TRACE_CONTEXT_VARIABLE, "1")
    token = trajectories._running.set("0123456789abcdef")
    first, second = context.to_send(), context.to_send()
    trajectories._running.reset(token)
    assert first != second
    ids = {headers["traceparent"].split("-")[1] for headers in (first, second)}
    assert ids == {"0123456789abcdef" * 2}


# ---- Ray --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """What each call saw of its context."""
    source = (PROGRAMS / "ray_trace_context.py").read_text().replace("sys.argv[1]", "'sdk'")
    run = run_traced(tmp_path_factory.mktemp("ray"), source)
    assert run.returncode == 0, run.err
    return run, json.loads(run.out)


@pytest.mark.run
def test_ray_calls_carry_the_context(calls):
    """Tasks and methods of actors, asynchronous ones too, run in the context of who calls them, and call on in it."""
    _, said = calls
    own, within = said["own"], said["within"]
    assert within["task"] == [[1, 2, {"third": 3}, own], [2, 2, {}, own]]
    assert within["method"] == [1, {"second": 2}, own]
    assert within["inherited"] == own
    assert within["again"] == [1, 2, {}, own]
    assert within["asynchronous"] == [[number, True, own] for number in range(3)]
    assert said["created"] == own


@pytest.mark.run
def test_context_ends_with_its_call(calls):
    """A call without a context has none, in the same workers, and all calls return what they return."""
    _, said = calls
    outside = said["outside"]
    assert outside["task"] == [[1, 2, {"third": 3}, NOWHERE], [2, 2, {}, NOWHERE]]
    assert outside["method"] == [1, {"second": 2}, NOWHERE]
    assert outside["asynchronous"] == [[number, True, NOWHERE] for number in range(3)]
    assert outside["streams"] == said["within"]["streams"] == [[0, 1], [0, 1]]
    assert outside["failed"] == said["within"]["failed"] == "RayTaskError(KeyError)"


@pytest.mark.run
def test_untraced_worker_takes_no_harm(calls):
    """A worker without our hooks gets the arguments of the program alone."""
    _, said = calls
    assert said["untraced"] == [[1, {}, NOWHERE], [1, 2, {}, NOWHERE]]
