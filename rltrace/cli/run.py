"""`rltrace run` runs the reference run, traced and supervised."""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import click

from rltrace.cli.echo import echo
from rltrace.cli.runs import (
    KERNELS_OPTION,
    MAX_DISK_OPTION,
    SAMPLE_OPTION,
    TRACING_HELP,
    bound,
    check_disabled,
    choose,
    claim,
    collector,
    in_shell,
    is_off,
    record_options,
    require_linux,
    say_what_is_lost,
    show,
)
from rltrace.errors import MissingExtraError, RunError
from rltrace.record.announcement import complain, is_quiet

PACKAGE = "rltrace_reference"
NEEDED = ("torch", "ray", "transformers", "yaml", "psutil")

MOST_WORDS = 300
"""So many characters of what a process said before it died."""

_INTERRUPTS = {"SIGINT": "SIGINT (Ctrl-C)", "SIGHUP": "SIGHUP (the terminal was closed)"}


@click.command(epilog=TRACING_HELP)
@click.argument("config", type=click.Path())
@click.option("--out", metavar="DIR", help="Folder of the Recording.  [default: rltrace-runs/<time>]")
@click.option("--force", is_flag=True, help="Try untested versions of vLLM, and GPUs that others use too.")
@KERNELS_OPTION
@record_options
@MAX_DISK_OPTION
@SAMPLE_OPTION
def run(
    config: str,
    out: str | None,
    force: bool,
    kernels: str,
    record_steps: str,
    record_ranks: str,
    max_disk: str,
    sample_seconds: float,
) -> int:
    """Run the GRPO example as CONFIG says, and record it.

    CONFIG is a YAML file such as examples/laptop.yaml. It is checked completely before anything starts. To
    record a program of your own, use `rltrace exec`.
    """
    require_linux("`rltrace run`")
    from rltrace.run import supervisor

    settings = checked(config, force)
    program = [sys.executable, "-m", PACKAGE, config, *(["--force"] if force else [])]
    if is_off():
        supervisor.become(program)
    check_disabled()
    otlp = None if settings["otlp"] is False else collector("" if settings["otlp"] is True else settings["otlp"])
    folder = claim(out, ["rltrace", "run", config], settings | {"otlp": otlp is not None})
    choose(record_steps=record_steps, record_ranks=record_ranks, kernels=kernels)
    limit = bound(folder, max_disk)
    if not is_quiet():
        show(echo, f"recording into {folder}, {limit}; starting {_ranks(settings)}, which takes a while ...")
    with tempfile.TemporaryDirectory(prefix="rltrace-run-", ignore_cleanup_errors=True) as scratch:
        reason = Path(scratch, "reason")
        command = [*program, "--reason-to", str(reason)]
        outcome = supervisor.supervise(command, folder, is_our_run=True, sample_seconds=sample_seconds, otlp=otlp)
        said = _read(reason)
    show(show_steps, folder)
    return report(folder, outcome, said)


def _read(reason: Path) -> str:
    try:
        return reason.read_text(errors="replace")
    except OSError:  # it had nothing to say
        return ""


def _ranks(settings: Mapping[str, Any]) -> str:
    ranks = settings["ranks"]
    return f"{ranks} rank{'' if ranks == 1 else 's'} on {settings['device']}"


def show_steps(folder: Path) -> None:
    """Print the step table, as it was recorded, and the two commands to go on with; if quiet, only losses."""
    from rltrace.analysis import summarize
    from rltrace.cli.tables import console, step_table
    from rltrace.read.recording import Recording

    recording = Recording.open(folder)
    found = summarize(recording)
    say_what_is_lost(recording)
    if is_quiet():
        return
    if found.steps:
        console().print(step_table(found.steps))
    echo("", f"Timeline:  rltrace view {in_shell(folder)}", f"Figures:   rltrace summary {in_shell(folder)}")


def report(folder: Path, outcome: Any, said: str = "") -> int:
    """Return the exit code of a run that ended well or was interrupted.

    Args:
        folder: Folder of its Recording.
        outcome: The supervisor's outcome.
        said: Why the run failed, as it said itself; otherwise it said so on stderr.

    Raises:
        RunError: it failed; the line says why, and who died first.
    """
    if outcome.interrupted_by is not None:
        before = "".join(f", after {death}" for death in outcome.deaths[:1])
        name = signal.Signals(outcome.interrupted_by).name
        complain(f"interrupted by {_INTERRUPTS.get(name, name)}{before}")
        return 128 + int(outcome.interrupted_by)
    if outcome.exit_code == 0:
        return 0
    look = f"rltrace summary {in_shell(folder)}"
    # Of several that were gone at the same look, the one that the driver has named was first.
    named = [death for death in outcome.deaths if f"(pid {death.pid})" in said]
    certain = [death for death in outcome.deaths if death.is_certain]
    for death in [*named, *certain, *outcome.deaths][:1]:
        _, _, its_words = said.partition("; it said: ")
        also = f"; it said: {shorten(its_words, MOST_WORDS, placeholder=' ...')}" if its_words else ""
        if said and f"(pid {death.pid})" not in said:
            also = f" (the driver said: {said})"
        raise RunError(f"{death}{also}; the run was stopped. Spans that were open then: `{look}`")
    why = said or f"the run ended with exit code {outcome.exit_code}, see above"
    error = RunError(f"{why}; what it did before: `{look}`")
    error.exit_code = outcome.exit_code
    raise error


def checked(file: str, force: bool) -> dict[str, Any]:
    """Return the configuration, checked by the reference run itself, which is found by name so that readers do not need
    it."""
    import msgspec

    missing = [name for name in (PACKAGE, *NEEDED) if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"`rltrace run` needs {', '.join(missing)}, not installed here", "run")
    settings: dict[str, Any] = msgspec.to_builtins(importlib.import_module(f"{PACKAGE}.__main__").checked(file, force))
    return settings
