"""`rltrace run`: the reference run, traced and supervised."""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from rltrace.cli.runs import DISABLE_HELP, SAMPLE_OPTION, check_disabled, claim, require_linux, say_what_is_lost
from rltrace.errors import MissingExtraError, RunError

PACKAGE = "rltrace_reference"
NEEDED = ("torch", "ray", "transformers", "yaml", "psutil")

_INTERRUPTS = {"SIGINT": "SIGINT (Ctrl-C)", "SIGHUP": "SIGHUP (the terminal was closed)"}


@click.command(epilog=DISABLE_HELP)
@click.argument("config", type=click.Path())
@click.option("--out", metavar="DIR", help="Folder of the Recording.  [default: rltrace-runs/<time>]")
@click.option("--force", is_flag=True, help="Try untested versions of vLLM, and GPUs that others use too.")
@SAMPLE_OPTION
def run(config: str, out: str | None, force: bool, sample_seconds: float) -> int:
    """Run the GRPO run of CONFIG, and record it.

    CONFIG is a YAML file such as examples/laptop.yaml. It is checked whole before anything is made.
    """
    require_linux("`rltrace run`")
    from rltrace import supervisor

    settings = checked(config, force)
    command = [sys.executable, "-m", PACKAGE, config, *(["--force"] if force else [])]
    check_disabled()
    folder = claim(out, ["rltrace", "run", config], settings)
    click.echo(f"recording into {folder}; starting {_ranks(settings)}, which takes a while ...")
    outcome = supervisor.supervise(command, folder, is_our_run=True, sample_seconds=sample_seconds)
    show_steps(folder)
    return report(folder, outcome)


def _ranks(settings: Mapping[str, Any]) -> str:
    ranks = settings["ranks"]
    return f"{ranks} rank{'' if ranks == 1 else 's'} on {settings['device']}"


def show_steps(folder: Path) -> None:
    """Print the step table, from what was recorded, and the two commands to go on with."""
    from rltrace.analysis import summarize
    from rltrace.cli.tables import console, step_table
    from rltrace.recording import Recording

    recording = Recording.open(folder)
    found = summarize(recording)
    screen = console()
    say_what_is_lost(recording)
    if found.steps:
        screen.print(step_table(found.steps))
    screen.print(
        f"\nTimeline:  rltrace view {folder}\nFigures:   rltrace summary {folder}", highlight=False, soft_wrap=True
    )


def report(folder: Path, outcome: Any) -> int:
    """The exit code of a run that ended well or was interrupted.

    Raises:
        RunError: it failed; the line names who died first.
    """
    if outcome.interrupted_by is not None:
        before = "".join(f", after {death}" for death in outcome.deaths[:1])
        name = signal.Signals(outcome.interrupted_by).name
        click.echo(f"rltrace: interrupted by {_INTERRUPTS.get(name, name)}{before}", err=True)
        return 128 + int(outcome.interrupted_by)
    if outcome.exit_code == 0:
        return 0
    certain = [death for death in outcome.deaths if death.is_certain]
    for death in [*certain, *outcome.deaths][:1]:
        raise RunError(f"{death}; the run was stopped. Spans that were open then: `rltrace summary {folder}`")
    error = RunError(
        f"the run ended with exit code {outcome.exit_code}, see above; what it did before: `rltrace summary {folder}`"
    )
    error.exit_code = outcome.exit_code
    raise error


def checked(file: str, force: bool) -> dict[str, Any]:
    """The configuration, checked by the reference run itself; found by name, so that readers do without it."""
    import msgspec

    missing = [name for name in (PACKAGE, *NEEDED) if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"`rltrace run` needs {', '.join(missing)}, not installed here", "run")
    settings: dict[str, Any] = msgspec.to_builtins(importlib.import_module(f"{PACKAGE}.__main__").checked(file, force))
    return settings
