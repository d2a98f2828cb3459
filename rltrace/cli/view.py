"""`rltrace view` shows the timeline in Perfetto's own UI, served from this machine, and metrics to Prometheus."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rltrace import plugins
from rltrace.cli.completion import RUN_ARGUMENT
from rltrace.cli.echo import echo
from rltrace.cli.export import load_exporter, what_opens, write_whole
from rltrace.cli.runs import LIMITS_OPTION, open_run
from rltrace.cli.selection import of_events
from rltrace.errors import RltraceError
from rltrace.limits import Limits
from rltrace.read.selection import ALL, Numbers, Seconds, Selection
from rltrace.record.announcement import complain

if TYPE_CHECKING:
    from rltrace.read.perfetto_ui import Command, Server
    from rltrace.read.recording import Recording


@click.command()
@RUN_ARGUMENT
@click.option("--no-open", is_flag=True, help="Print the address and open no browser.")
@click.option("--online", is_flag=True, help="Use the public UI at ui.perfetto.dev; the trace stays in your browser.")
@click.option("--port", type=int, default=0, show_default="any that is free", help="Port to listen on.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Beyond this machine nothing is encrypted, and the token alone protects the run.",
)
@click.option(
    "--token-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Keep the token in FILE, for Prometheus, which asks for /metrics again and again.",
)
@of_events
@LIMITS_OPTION
def view(
    run: str | None,
    no_open: bool,
    online: bool,
    port: int,
    host: str,
    token_file: Path | None,
    steps: Numbers | None,
    ranks: Numbers | None,
    time: Seconds | None,
    depth: int | None,
    limits: Limits,
) -> None:
    """Show RUN's timeline in the browser.

    The timeline begins with a steady step. Reload the page of a run that goes on to see it as it is then. Perfetto's UI
    is served from this machine: it needs no internet and contacts no other host. Over SSH, the command that forwards
    the port is printed. Prometheus finds metrics of RUN at /metrics: docs/prometheus.md. RUN is the folder of a
    Recording or an archive of it, by default the newest in ./rltrace-runs.
    """
    from rltrace.read import perfetto_ui
    from rltrace.read.token_file import token_in

    token = "" if token_file is None else token_in(token_file)

    whole = open_run(run, limits)
    asked = Selection(steps, ranks, time, depth)
    ui = None if online else perfetto_ui.find_ui()
    with tempfile.TemporaryDirectory(prefix="rltrace-view-") as folder:
        trace = Path(folder) / f"{whole.name}.pftrace"
        is_live = whole.is_live
        commands, shown = _written(whole, asked, trace)
        if ui is None:
            server = perfetto_ui.serve_launcher(trace, port, host=host, token=token)
        else:
            server = perfetto_ui.serve(trace, ui, port, commands, shown, host=host, token=token)
        server.renew = partial(_renewed, server, whole, asked) if is_live else None
        with contextlib.suppress(ImportError):  # prometheus_client is an extra
            server.scrape = plugins.load("rltrace_exporters.prometheus_scrapes:Scrapes")(whole.path, limits)
        forward = perfetto_ui.port_forward(server, os.environ) if server.is_local else None
        echo(f"{whole.path}: {server.url}")
        if forward:
            echo(f"on your machine: {forward}")
        if not no_open and not forward:
            perfetto_ui.open_in_browser(server)
        _end_orderly(server)
        with contextlib.suppress(KeyboardInterrupt):
            echo("Ctrl-C ends.")
            server.serve_forever()


def _written(whole: Recording, asked: Selection, trace: Path) -> tuple[list[Command], tuple[int, int] | None]:
    """Write the trace, and return what the page does with it, and what it shows first."""
    from rltrace.analysis.first_look import first_look
    from rltrace.analysis.selected import selected
    from rltrace.read import perfetto_ui

    recording = selected(whole, what_opens(whole) if asked == ALL else asked)
    write_whole(load_exporter("perfetto"), recording, trace, force=True)
    shown = first_look(recording) if asked == ALL else first_look(whole, asked)
    return perfetto_ui.startup_commands(recording.processes), shown


def _renewed(server: Server, before: Recording, asked: Selection) -> str:
    """Write the trace of a live run as it is now, and return its page; it was the last time if the run is over."""
    from rltrace.read import perfetto_ui
    from rltrace.read.recording import Recording

    try:
        whole = Recording.open(before.path, before.limits)
        is_live = whole.is_live
        page = perfetto_ui.page_of(*_written(whole, asked, server.trace))
    except RltraceError as error:  # what was there before still is
        complain(f"the page shows what it showed before: {error}")
        return server.page
    if not is_live:
        server.renew = None
    return page


def _end_orderly(server: Server) -> None:
    """Raise when the terminal is closed too, so that the trace does not stay in the temporary folder."""

    def end(number: int, _frame: object) -> None:
        server.exit_code = 128 + number
        sys.exit(server.exit_code)

    for number in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
        signal.signal(number, end)
