"""`rltrace why` says what bounds a step, what it costs, and what to change."""

from __future__ import annotations

import click

from rltrace.cli.as_json import echo_json
from rltrace.cli.completion import RUN_ARGUMENT
from rltrace.cli.runs import LIMITS_OPTION, figures_of, open_run
from rltrace.cli.selection import of_figures
from rltrace.limits import Limits
from rltrace.read.selection import Numbers, Seconds, Selection


@click.command()
@RUN_ARGUMENT
@click.option("--json", "as_json", is_flag=True, help="For programs; the keys are in docs/json.md.")
@of_figures
@LIMITS_OPTION
def why(
    run: str | None,
    as_json: bool,
    steps: Numbers | None,
    ranks: Numbers | None,
    time: Seconds | None,
    limits: Limits,
) -> None:
    """Say what bounds a step of RUN, and what to change.

    What costs the most seconds of a step comes first. Each finding says what it rests on, the interval of its price,
    the most to gain, and how far to trust it; then follows what could not be judged, and why. RUN is the folder of a
    Recording or an archive of it, by default the newest in ./rltrace-runs.
    """
    found = figures_of(open_run(run, limits), Selection(steps, ranks, time)).why
    if as_json:
        echo_json(found)
        return
    from rltrace.cli.tables import console
    from rltrace.cli.tables.findings import show_findings

    show_findings(found, console())
