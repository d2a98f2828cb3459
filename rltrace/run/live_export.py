"""`python -m rltrace.otlp RECORDING`: sends a Recording to an OpenTelemetry collector while it grows.

It is a process of its own that reads what the traced processes append: none of them knows of it, or waits for it. The
supervisor starts it beside a command; by hand it is started beside a program that records itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rltrace import plugins
from rltrace.errors import RltraceError
from rltrace.host.awaited_signals import take_signal
from rltrace.read.recording import Recording
from rltrace.record import cluster, manifest
from rltrace.record.announcement import QUIET_VARIABLE, complain, say
from rltrace.run.sidecar import Sidecar, is_over

PERIOD_SECONDS = 1.0
"""Time between two looks at what was appended."""
FLUSH_SECONDS = 10.0
"""How long the rest may take after the run."""
NICENESS = 10
"""It gets a processor that the program leaves, as far as that is possible."""

EXPORT = "rltrace_exporters.otlp.live:LiveOtlp"


def start(recording: Path, variables: Mapping[str, str]) -> Sidecar:
    """Start it beside a run.

    Args:
        recording: Folder of the Recording.
        variables: Standard variables that are set for it alone; they may have a password in them.

    Raises:
        OSError: it cannot be started.
    """
    quiet = {name: value for name, value in os.environ.items() if name == QUIET_VARIABLE}
    return Sidecar("rltrace.run.live_export", str(recording), "--beside", environment={**variables, **quiet})


def main(arguments: list[str] | None = None) -> int:
    """Send until the run ends, and then the rest."""
    parser = argparse.ArgumentParser(prog="python -m rltrace.otlp", description=__doc__)
    parser.add_argument("recording", type=Path, help="folder of the Recording; it may not be there yet")
    parser.add_argument("--otlp", metavar="URL", default="", help="where a collector listens; else the OTEL_ variables")
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if cluster.is_off():
        complain(f"{cluster.OFF_VARIABLE} is set: nothing is recorded, so that there is nothing to send")
        return 0
    is_told = is_over if options.beside else _told_by_signals()
    try:
        os.nice(NICENESS)
        folder = _wait_for(options.recording, is_told)
        return 0 if folder is None else _export(folder, options.otlp, is_told, is_alone=not options.beside)
    except RltraceError as error:
        complain(str(error))
        return error.exit_code
    except Exception as error:  # the run goes on, and its Recording has everything
        complain(f"nothing more is sent: {type(error).__name__}: {error}")
        return 1


def _export(recording: Recording, url: str, is_told: Callable[[float], bool], *, is_alone: bool) -> int:
    export: Any = plugins.load(EXPORT)(recording, url)
    if is_alone:
        say(f"sending {recording.path} to {export.address}")
    due_s = time.monotonic()
    while not is_told(max(0.0, due_s - time.monotonic())) and not (is_alone and export.is_over):
        export.poll()
        due_s = max(due_s + PERIOD_SECONDS, time.monotonic())
    sent = export.finish(FLUSH_SECONDS)
    (say if sent.is_all else complain)(str(sent))
    os._exit(0 if sent.is_all else 1)  # a request that is under way would keep it


def _wait_for(folder: Path, is_told: Callable[[float], bool]) -> Recording | None:
    """Return the Recording, once there is one; None if it is told to end before that."""
    while not (folder / manifest.FILE).exists():
        if is_told(PERIOD_SECONDS):
            return None
    return Recording.open(folder)


def _told_by_signals() -> Callable[[float], bool]:
    """Return a function that waits, and says whether Ctrl-C or SIGTERM has come."""
    awaited = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)

    def is_told(seconds: float) -> bool:
        return take_signal(awaited, seconds) is not None

    return is_told


if __name__ == "__main__":
    sys.exit(main())
