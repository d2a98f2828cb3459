"""`rltrace diff` shows two runs side by side."""

from __future__ import annotations

import click

from rltrace.cli.as_json import echo_json
from rltrace.cli.completion import recordings
from rltrace.cli.report import COMPARISON, SHARE_OPTION, made_by, write_page
from rltrace.cli.runs import LIMITS_OPTION, figures_of, open_run
from rltrace.cli.selection import of_figures
from rltrace.errors import RecordingError
from rltrace.limits import Limits
from rltrace.read.selection import Numbers, Seconds, Selection


@click.command()
@click.argument("a", metavar="A", shell_complete=recordings)
@click.argument("b", metavar="B", shell_complete=recordings)
@click.option("--json", "as_json", is_flag=True, help="For programs; the keys are in docs/json.md.")
@click.option("-o", "--output", metavar="FILE", help="Write a page of both instead, as `rltrace report` does of one.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@SHARE_OPTION
@of_figures
@LIMITS_OPTION
def diff(
    a: str,
    b: str,
    as_json: bool,
    output: str | None,
    force: bool,
    is_shared: bool,
    steps: Numbers | None,
    ranks: Numbers | None,
    time: Seconds | None,
    limits: Limits,
) -> None:
    """Compare run B with run A: seconds by phase, bytes by owner.

    It says first whether B is slower by more than noise, and which findings changed. Then it shows which versions and
    settings differ, how long the steps after the first took, and who held the memory. A and B are folders of Recordings
    or archives of them, of any program: another configuration, another host, verl.
    """
    from rltrace.analysis.difference import difference, same_program, settings
    from rltrace.analysis.selected import selected

    selection = Selection(steps, ranks, time)
    if output is None and (force or is_shared):
        raise click.UsageError("--force and --share are about a page; name its file with -o page.html")
    run_a, run_b = (open_run(run, limits) for run in (a, b))
    if output is not None:
        if as_json:
            raise click.UsageError("--json and -o exclude each other: one is for programs, the other a page")
        chosen_a, chosen_b = (selected(run, selection, whole_steps=True) for run in (run_a, run_b))
        write_page(made_by(COMPARISON)(chosen_a, is_shared=is_shared), chosen_b, output, force=force)
        return
    made = run_a.manifest, run_b.manifest
    read_a, read_b = (figures_of(run, selection) for run in (run_a, run_b))
    found = difference(
        read_a.summary,
        read_b.summary,
        settings(*made),
        same_program=same_program(*made),
        whys=(read_a.why, read_b.why),
    )
    if as_json:
        echo_json(found)
        return
    if found.step is None and found.peak is None and not found.totals:
        raise RecordingError(
            f"{a}, {b}: neither has a finished span or a memory sample; `rltrace summary` shows what they have"
        )
    from rltrace.cli.tables import console
    from rltrace.cli.tables.difference import show_difference

    show_difference(found, console())
