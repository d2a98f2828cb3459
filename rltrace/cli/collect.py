"""`rltrace collect` fetches through Ray what other hosts recorded."""

from __future__ import annotations

import os

import click

from rltrace.cli.echo import echo
from rltrace.cli.runs import LIMITS_OPTION, open_run
from rltrace.errors import RecordingError, RunError
from rltrace.limits import Limits


@click.command()
@click.argument("run", required=False)
@click.option(
    "--address",
    metavar="HOST:PORT",
    help="Address of the Ray cluster.  [default: the one that RUN's driver joined, else RAY_ADDRESS]",
)
@LIMITS_OPTION
def collect(run: str | None, address: str | None, limits: Limits) -> None:
    """Fetch what the other hosts of RUN recorded.

    A process on another host than RUN's records to a local disk there. `rltrace run` and `rltrace exec` fetch this when
    they end. This command does the same at any time, as often as you like, and fetches only what is new. RUN is the
    folder of a Recording, by default the newest in ./rltrace-runs.
    """
    recording = open_run(run, limits)
    if recording.folder != recording.path:
        raise RecordingError(f"{recording.path}: an archive, which is read-only; unpack it and give the folder")
    from rltrace.record import cluster
    from rltrace.run import nodes
    from rltrace.run.collection import collect as fetch

    where = address or cluster.ray_address(recording.path) or os.environ.get("RAY_ADDRESS")
    if where is None:
        echo(
            f"{recording.path}: nothing to fetch, because its driver joined no Ray cluster; name a cluster "
            "with --address"
        )
        return
    run_id, authentication = str(recording.manifest.get("run_id")), cluster.ray_authentication(recording.path)
    with nodes.join(where, run_id, authentication) as joined:
        failures = joined.read_clocks(recording.path)
        done = fetch(recording.path, joined)
    echo(f"{recording.path}: {done}")
    failures = list(dict.fromkeys([*failures, *done.failures]))
    for failure in failures[1:]:
        echo(f"rltrace: {failure}", err=True)
    if failures:
        raise RunError(failures[0])
