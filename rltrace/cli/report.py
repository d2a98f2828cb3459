"""`rltrace report` writes a run as one page, for a reader who did not see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rltrace import plugins
from rltrace.cli.completion import RUN_ARGUMENT
from rltrace.cli.echo import echo
from rltrace.cli.export import write_whole
from rltrace.cli.runs import LIMITS_OPTION, open_run
from rltrace.cli.selection import of_figures
from rltrace.errors import MissingExtraError
from rltrace.limits import Limits
from rltrace.read.recording import Recording
from rltrace.read.selection import ALL, Numbers, Seconds, Selection

REPORT = "rltrace_exporters.report.writing:Report"
COMPARISON = "rltrace_exporters.report.writing:Comparison"

SHARE_OPTION = click.option(
    "--share", "is_shared", is_flag=True, help="Leave out command line, environment, paths, host and user names."
)


@click.command()
@RUN_ARGUMENT
@click.option(
    "-o", "--output", metavar="FILE", help="File to write.  [default: RUN's name and .report.html, in this folder]"
)
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@SHARE_OPTION
@of_figures
@LIMITS_OPTION
def report(
    run: str | None,
    output: str | None,
    force: bool,
    is_shared: bool,
    steps: Numbers | None,
    ranks: Numbers | None,
    time: Seconds | None,
    limits: Limits,
) -> None:
    """Write RUN as one page for a browser.

    The page is for a reader who did not see the run: what bounds a step and what to change, one step as a picture of
    every rank and of the memory, where seconds and bytes go, and how far to trust it. It is one file that needs nothing
    else and loads nothing. RUN is the folder of a Recording or an archive of it, by default the newest in
    ./rltrace-runs.
    """
    from rltrace.analysis.selected import selected

    selection = Selection(steps, ranks, time)
    recording = selected(open_run(run, limits), selection, whole_steps=True)
    page = made_by(REPORT)(is_shared=is_shared, is_part=selection != ALL)
    write_page(page, recording, output, force=force)
    for why in page.damaged:
        echo(f"rltrace: not used: {why}; the page comes from the segments", err=True)


def made_by(reference: str) -> Any:
    """Return a class of the report.

    Raises:
        MissingExtraError: what it is written with is not installed.
    """
    try:
        return plugins.load(reference)
    except ImportError as error:
        raise MissingExtraError(f"a report needs {error.name}, which is not installed here", "report") from None


def write_page(page: Any, recording: Recording, output: str | None, *, force: bool) -> None:
    """Write a page whole or not at all, and say how large it is."""
    file = Path(f"{recording.name}{page.suffix}" if output is None else output)
    write_whole(page, recording, file, force=force)
    echo(f"{file}  {file.stat().st_size:,} bytes", err=True)
