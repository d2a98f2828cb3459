"""`rltrace check` fails if a run exceeds its limits, or another run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rltrace.cli.as_json import echo_json
from rltrace.cli.completion import RUN_ARGUMENT
from rltrace.cli.echo import echo
from rltrace.cli.runs import LIMITS_OPTION, figures_of, open_run
from rltrace.cli.selection import of_figures
from rltrace.errors import OutputError
from rltrace.limits import Limits
from rltrace.read.recording import Recording
from rltrace.read.selection import Numbers, Seconds, Selection

if TYPE_CHECKING:
    from rltrace.analysis.measures import Judged

OVER, CANNOT_TELL = 10, 11
"""Exit codes: a limit is broken; a figure that has a limit is not in the Recording."""

ON_GITHUB = "GITHUB_ACTIONS"
"""Environment variable that GitHub sets in its runners."""


@click.command()
@RUN_ARGUMENT
@click.option("--max", "most", multiple=True, metavar="NAME=LIMIT", help="Such as step=10s or memory.used=70GiB.")
@click.option("--budget", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Limits in YAML.")
@click.option("--baseline", metavar="RUN", help="A run that this one may not exceed.")
@click.option("--fail-over", multiple=True, metavar="SHARE", help="By how much: 5%, or reward=10%.  [default: 5%]")
@click.option("--junit", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Write JUnit XML too.")
@click.option("--github", is_flag=True, help="Print annotations; by itself in a runner of GitHub.")
@click.option("--json", "as_json", is_flag=True, help="For programs; the keys are in docs/json.md.")
@of_figures
@LIMITS_OPTION
def check(
    run: str | None,
    most: tuple[str, ...],
    budget: Path | None,
    baseline: str | None,
    fail_over: tuple[str, ...],
    junit: Path | None,
    github: bool,
    as_json: bool,
    steps: Numbers | None,
    ranks: Numbers | None,
    time: Seconds | None,
    limits: Limits,
) -> int:
    """Check that RUN keeps to limits, and to another run.

    NAME is step, first_step, startup, a phase or a stage of the weight sync, memory.used, memory.OWNER, or finding.ID
    for what `rltrace why` finds. A limit is broken if the figure is above it by more than the noise of its steps. The
    exit code is 0 if no limit is broken, 10 if one is, and 11 if the Recording lacks a figure that has one. RUN is the
    folder of a Recording or an archive of it, by default the newest in ./rltrace-runs.
    """
    from rltrace.analysis.budget import budget as limits_of
    from rltrace.analysis.checks import BROKEN, OK, checked
    from rltrace.cli.reports import as_junit, for_github

    wanted = limits_of(budget, most, baseline, fail_over)
    selection = Selection(steps, ranks, time)
    other = None if wanted.baseline is None else judged(open_run(wanted.baseline, limits), selection)
    found = checked(judged(open_run(run, limits), selection), wanted, other)
    if junit is not None:
        write(junit, as_junit(found))
    if as_json:
        echo_json(found)
    else:
        from rltrace.cli.tables import console
        from rltrace.cli.tables.checks import show_checks

        show_checks(found, console())
    if github or (os.environ.get(ON_GITHUB) == "true" and not as_json):
        echo(*for_github(found))
    return {OK: 0, BROKEN: OVER}.get(found.state, CANNOT_TELL)


def judged(recording: Recording, selection: Selection) -> Judged:
    """Return the figures of a run, or of the part that was chosen, and what bounds its steps."""
    from rltrace.analysis.measures import Judged

    found = figures_of(recording, selection)
    return Judged(found.summary, found.why)


def write(file: Path, text: str) -> None:
    """Write a file for the program that runs the check, over an older one.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{file}: cannot be written: {error.strerror or error}; name another file") from None
