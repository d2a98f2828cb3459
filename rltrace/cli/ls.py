"""`rltrace ls` lists runs."""

from __future__ import annotations

from pathlib import Path

import click

from rltrace.cli.as_json import echo_json
from rltrace.cli.completion import RUNS
from rltrace.cli.echo import echo
from rltrace.cli.runs import LIMITS_OPTION
from rltrace.errors import RecordingError
from rltrace.limits import Limits


@click.command()
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path), default=RUNS)
@click.option("--json", "as_json", is_flag=True, help="For programs; the keys are in docs/json.md.")
@LIMITS_OPTION
def ls(folder: Path, as_json: bool, limits: Limits) -> None:
    """List the runs in DIR, the newest last.

    It shows when each run began, how it went, its ranks and steps, and the space that it takes on the disk. DIR holds
    folders of Recordings and archives of them; it is ./rltrace-runs by default.
    """
    from rltrace.analysis.listing import ListedRun, listed

    found = list(listed(folder, limits))
    for why in found:
        if isinstance(why, str):
            echo(f"rltrace: not listed: {why}", err=True)
    runs = [one for one in found if isinstance(one, ListedRun)]
    if not runs:
        raise RecordingError(
            f"{folder}: no Recording here; make one with `rltrace exec -- COMMAND`, or name its folder"
        )
    if as_json:
        echo_json(runs)
        return
    from rltrace.cli.tables import console
    from rltrace.cli.tables.listing import run_table

    console().print(run_table(runs))
