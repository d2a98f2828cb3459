"""`rltrace overhead` measures what tracing costs in a step, with and without it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rltrace.cli.as_json import echo_json
from rltrace.cli.completion import RUNS
from rltrace.cli.echo import echo
from rltrace.cli.run import PACKAGE, checked, report
from rltrace.cli.runs import LIMITS_OPTION, check_disabled, claim, in_shell, require_linux
from rltrace.errors import RecordingError, RunError
from rltrace.limits import Limits
from rltrace.record import redaction
from rltrace.run.sampler import INTERVAL_SECONDS

if TYPE_CHECKING:  # numpy is not loaded to show the help
    from rltrace.analysis.overhead import Arm

MODULE = f"{PACKAGE}.measure_overhead"
ROUNDS, PAIRS = 6, 20
LIMIT_PERCENT = 0.5


@click.command()
@click.argument("what", metavar="CONFIG|DIR", type=click.Path())
@click.option("--out", metavar="DIR", help="Folder of the measurement.  [default: rltrace-runs/overhead-<time>]")
@click.option("--pairs", default=PAIRS, show_default=True, type=click.IntRange(1), help="Pairs of steps in a run.")
@click.option(
    "--rounds",
    default=ROUNDS,
    show_default=True,
    type=click.IntRange(0),
    help="Rounds of two runs, one traced and one without hooks; 0: one traced run alone.",
)
@click.option(
    "--limit",
    "limit_percent",
    default=LIMIT_PERCENT,
    show_default=True,
    help="Limit of what tracing may cost, in percent of a step.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--force", is_flag=True, help="Try untested versions of vLLM, and GPUs that others use too.")
@LIMITS_OPTION
def overhead(
    what: str,
    out: str | None,
    pairs: int,
    rounds: int,
    limit_percent: float,
    as_json: bool,
    force: bool,
    limits: Limits,
) -> None:
    """Measure what tracing costs in a step of CONFIG.

    Each round makes two runs, in an order that changes from round to round. One is traced and records one step of every
    pair; the other has no hooks. With DIR, the folder of an earlier measurement, the command shows its figures, even if
    it was stopped early.
    """
    from rltrace.analysis.overhead import read_overhead

    folder = Path(what) if Path(what).is_dir() else _measure(what, out, pairs, rounds, force)
    found = read_overhead(folder, limit_percent / 100, limits)
    if as_json:
        echo_json(found)
        return
    from rltrace.cli.tables import console
    from rltrace.cli.tables.overhead import show

    show(found, console())
    echo("", f"Again: rltrace overhead {in_shell(folder)}")


def _measure(config: str, out: str | None, pairs: int, rounds: int, force: bool) -> Path:
    """Make all runs; return the folder of the measurement, which says before each run what exists so far.

    Two runs at once would disturb each other, and a process cannot get rid of installed hooks: an arm without hooks is
    a run of its own. Runs differ more than their steps do, so a round is one sample.
    """
    require_linux("`rltrace overhead`")
    checked(config, force)
    check_disabled()
    folder = _new_folder(out)
    arms: list[Arm] = []
    for number, traced in plan(rounds):
        where = f"round {number} of {rounds}: " if rounds else ""
        echo(f"{where}{'traced' if traced else 'without any hooks'}")
        arms.append(_arm(number, traced))
        _write(folder, config, arms)
        _run(folder, arms[-1], config, pairs, force)
    return folder


def plan(rounds: int) -> list[tuple[int, bool]]:
    """Return the round of each run, and whether it is traced; without rounds, one traced run alone."""
    orders = [(number, (True, False) if number % 2 else (False, True)) for number in range(1, rounds + 1)]
    return [(number, traced) for number, order in orders for traced in order] or [(1, True)]


def _arm(number: int, traced: bool) -> Arm:
    from rltrace.analysis.overhead import Arm

    name = f"{number}-{'traced' if traced else 'bare'}"
    recording = name if traced else None
    return Arm(round=number, times=f"{name}.jsonl", recording=recording, load_before=os.getloadavg()[0])


def _write(folder: Path, config: str, arms: list[Arm]) -> None:
    """Write what exists, including the run that is about to begin: it may be stopped."""
    import msgspec

    from rltrace.analysis.overhead import FILE, Measurement

    measurement = Measurement(
        config=config,
        command=redaction.command(sys.orig_argv),
        host=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        created_unix_ns=time.time_ns(),
        arms=arms,
    )
    (folder / FILE).write_bytes(msgspec.json.encode(measurement))


def _new_folder(out: str | None) -> Path:
    folder = Path(out) if out is not None else RUNS / time.strftime("overhead-%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise RecordingError(f"{folder}: cannot be made: {error.strerror}; name another folder with --out") from None
    return folder


def _run(folder: Path, arm: Arm, config: str, pairs: int, force: bool) -> None:
    """Make one run.

    Raises:
        RunError: it failed.
    """
    from rltrace.run import supervisor

    command = [sys.executable, "-m", MODULE, config, "--times", str(folder / arm.times), "--pairs", str(pairs)]
    command += ["--force"] if force else []
    if arm.recording is not None:
        recording = claim(str(folder / arm.recording), command, {})
        if code := report(
            recording, supervisor.supervise(command, recording, is_our_run=True, sample_seconds=INTERVAL_SECONDS)
        ):
            raise click.exceptions.Exit(code)
        return
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RLTRACE_")}
    if code := subprocess.run(command, env=environment, check=False).returncode:
        raise RunError(f"the run without hooks ended with exit code {code}, see above")
