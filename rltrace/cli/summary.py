"""`rltrace summary` shows a Recording in figures."""

from __future__ import annotations

import click

from rltrace.cli.as_json import echo_json
from rltrace.cli.completion import RUN_ARGUMENT
from rltrace.cli.runs import LIMITS_OPTION, figures_of, open_run
from rltrace.cli.selection import of_figures
from rltrace.limits import Limits
from rltrace.read.selection import ALL, Numbers, Seconds, Selection


@click.command()
@RUN_ARGUMENT
@click.option("--all", "whole", is_flag=True, help="Every rank, step and hook, the start-up and the host too.")
@click.option("--json", "as_json", is_flag=True, help="For programs; the keys are in docs/json.md.")
@click.option("--watch", "is_watched", is_flag=True, help="Show what RUN does now, until it ends; see docs/live.md.")
@of_figures
@LIMITS_OPTION
def summary(
    run: str | None,
    whole: bool,
    as_json: bool,
    is_watched: bool,
    steps: Numbers | None,
    ranks: Numbers | None,
    time: Seconds | None,
    limits: Limits,
) -> None:
    """Show RUN in figures.

    It shows what is wrong, what costs most, and where the seconds and the bytes of a step went. Figures of a step are
    means over all steps after the first, which is excluded as warm-up. RUN is the folder of a Recording or an archive
    of it, by default the newest in ./rltrace-runs; the run may be over, still running, or dead.
    """
    from rltrace.analysis.folding import for_programs
    from rltrace.host.garbage_collector import without_collection

    selection = Selection(steps, ranks, time)
    if is_watched:
        if as_json or selection != ALL:
            what = "--json" if as_json else "--steps, --ranks and --time"
            raise click.UsageError(f"--watch shows the whole run as it is now, so it does not go with {what}")
        from rltrace.cli.watch import watch

        recording = watch(run, limits)
        if recording is None:
            return
        run = str(recording.path)
    with without_collection():
        found = figures_of(open_run(run, limits), selection)
        if as_json:
            echo_json(for_programs(found.summary, selection))
            return
        from rltrace.cli.tables import console, show

        show(found.summary, console(), whole=whole, why=found.why, selection=selection)
