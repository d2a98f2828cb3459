"""`rltrace collect` brings together what several hosts recorded."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from rltrace.cli.completion import recordings
from rltrace.cli.echo import echo
from rltrace.cli.runs import LIMITS_OPTION, open_run
from rltrace.errors import RecordingError, RunError
from rltrace.limits import Limits
from rltrace.record.step_numbers import numbers

if TYPE_CHECKING:
    from pathlib import Path

    from rltrace.read.recording import Recording
    from rltrace.run.collection import Collected, Wanted


@click.command()
@click.argument("runs", metavar="[RUN]...", nargs=-1, shell_complete=recordings)
@click.option(
    "--address",
    metavar="HOST:PORT",
    help="Address of the Ray cluster.  [default: the one that RUN's driver joined, else RAY_ADDRESS]",
)
@click.option(
    "--unknown-clocks",
    is_flag=True,
    help="Bring folders together although nobody read their clocks: real time aligns them, with an unknown error.",
)
@click.option("--unrelated", is_flag=True, help="Bring folders together although they seem to be of different runs.")
@click.option(
    "--steps",
    metavar="STEPS",
    callback=lambda context, option, text: None if text is None else _wanted(text),
    help="Steps of other hosts to bring whole, such as 100-110,every:50, or all; of others come phases, memory, sync, "
    "requests, errors and totals.  [default: all, or the last ones if all would take more than 1 GiB]",
)
@click.option(
    "--compact",
    is_flag=True,
    help="Then replace the segments of RUN by compressed columns, a fifth to a tenth as long, with nothing missing.",
)
@LIMITS_OPTION
def collect(
    runs: tuple[str, ...],
    address: str | None,
    unknown_clocks: bool,
    unrelated: bool,
    steps: Wanted,
    compact: bool,
    limits: Limits,
) -> None:
    """Bring together what several hosts recorded.

    With the folders of several hosts, one RUN each, everything goes into the folder of the host that read the others'
    clocks, which is that of rank 0. RUN may be an archive too, except there.

    With one RUN, what other nodes of its Ray cluster recorded is fetched. `rltrace run` and `rltrace exec` do this when
    they end. RUN is by default the newest Recording in ./rltrace-runs.

    Do either as often as you like: only what is new is fetched.

    With --compact and one RUN, nothing is fetched.
    """
    opened = [open_run(run, limits) for run in runs or (None,)]
    if len(opened) == 1:
        if address is not None or not compact:
            _from_cluster(opened[0], address, steps)
        if compact:
            _compact(open_run(str(opened[0].path), limits))
        return
    if address is not None:
        raise click.UsageError("--address is of one RUN on a Ray cluster, and not of the folders of several hosts")
    from rltrace.run.collection import bring_together

    into, done = bring_together(opened, steps=steps, unknown_clocks=unknown_clocks, unrelated=unrelated)
    _say(into.path, done)
    if compact:
        _compact(open_run(str(into.path), limits))
    _report(done.failures)


def _wanted(text: str) -> Wanted:
    if text.strip() == "all":
        return "all"
    try:
        return numbers(text, has_periods=True)
    except ValueError as error:
        raise click.BadParameter(f"{error}; or all") from None


def _say(recording: Path, done: Collected) -> None:
    echo(f"{recording}: {done}")
    for left in done.left:
        echo(left)


def _compact(recording: Recording) -> None:
    from rltrace.run.compaction import compact

    try:
        echo(f"{recording.path}: {compact(recording)}")
    except OSError as error:
        raise RecordingError(
            f"{error.filename or recording.path}: cannot be written: {error.strerror or error}; nothing is lost: make "
            "room and compact it again"
        ) from None


def _from_cluster(recording: Recording, address: str | None, steps: Wanted) -> None:
    if recording.folder != recording.path:
        raise RecordingError(f"{recording.path}: an archive, which is read-only; unpack it and give the folder")
    from rltrace.record import cluster
    from rltrace.run import nodes
    from rltrace.run.collection import collect as fetch

    where = address or cluster.ray_address(recording.path) or os.environ.get("RAY_ADDRESS")
    if where is None:
        echo(
            f"{recording.path}: nothing to fetch, because its driver joined no Ray cluster; name a cluster "
            "with --address, or give the folders of the other hosts too"
        )
        return
    run_id, authentication = str(recording.manifest.get("run_id")), cluster.ray_authentication(recording.path)
    with nodes.join(where, run_id, authentication) as joined:
        failures = joined.read_clocks(recording.path)
        done = fetch(recording.path, joined, steps)
    _say(recording.path, done)
    _report([*failures, *done.failures])


def _report(failures: list[str]) -> None:
    """Say what failed, each once.

    Raises:
        RunError: something did.
    """
    failures = list(dict.fromkeys(failures))
    for failure in failures[1:]:
        echo(f"rltrace: {failure}", err=True)
    if failures:
        raise RunError(failures[0])
