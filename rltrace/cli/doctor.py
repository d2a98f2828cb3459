"""`rltrace doctor` tries before a run what tracing a command would give."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rltrace.cli.as_json import echo_json
from rltrace.cli.completion import files
from rltrace.cli.runs import require_linux

if TYPE_CHECKING:
    from rltrace.run.doctor import Diagnosis

SOMETHING_MISSING = 8
CANNOT_TELL = 9

_STYLES = {"ok": "green", "missing": "bold red", "unknown": "bold yellow", "not here": "dim"}


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--out", metavar="DIR", help="Folder that the Recording would go to.  [default: rltrace-runs/<time>]")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, shell_complete=files)
def doctor(out: str | None, as_json: bool, command: tuple[str, ...]) -> int:
    """Check that COMMAND would be traced completely.

    It uses COMMAND's own interpreter and environment, and tries the frameworks and their hooks, a child process, a Ray
    worker, NVML, and the folder of the Recording. COMMAND itself is not run; without one, rltrace's own Python is
    checked. The exit code is 0 if nothing would be missing, 8 if something would, and 9 if COMMAND does not say which
    Python it starts, as with `bash train.sh`.
    """
    require_linux("`rltrace doctor`")
    from rltrace.run.doctor import diagnose

    found = diagnose(command, Path(out) if out is not None else None)
    if as_json:
        echo_json(found)
    else:
        show(found)
    if not found.works:
        return SOMETHING_MISSING
    return 0 if found.is_known else CANNOT_TELL


def show(found: Diagnosis) -> None:
    """Print a diagnosis as a table, with the problems of single hooks below it."""
    from rich.table import Table
    from rich.text import Text

    from rltrace.cli.tables import console, hook_table
    from rltrace.cli.tables.fit import visible_figures

    found = visible_figures(found)
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in found.findings:
        state = Text(finding.state, _STYLES[finding.state])
        table.add_row(Text(finding.about, "bold", no_wrap=True), state, Text(finding.said, overflow="fold"))
    screen = console()
    screen.print(table)
    unbound = [hook for hook in found.hooks if hook.state in ("failed", "skipped")]
    if unbound:
        screen.print()
        screen.print(hook_table(unbound))
    missing = sum(finding.state == "missing" for finding in found.findings)
    screen.print()
    if missing:
        screen.print(Text(f"{missing} of these would be missing from the Recording.", "yellow"))
    elif not found.is_known:
        screen.print(Text("Nothing would be missing if COMMAND starts that Python.", "yellow"))
    else:
        screen.print(Text("Nothing would be missing: `rltrace exec -- COMMAND` records it.", "green"))
