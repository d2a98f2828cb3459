"""`rltrace exec` traces any program without an edit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rltrace.cli.completion import files
from rltrace.cli.runs import (
    ALLOCATIONS_OPTION,
    KERNELS_OPTION,
    MAX_DISK_OPTION,
    OTLP_OPTION,
    SAMPLE_OPTION,
    TRACING_HELP,
    bound,
    check_disabled,
    choose,
    claim,
    in_shell,
    is_off,
    record_options,
    require_linux,
    say_what_is_lost,
    show,
)
from rltrace.events import SAMPLER
from rltrace.hooks.environment import TRACE_CONTEXT_VARIABLE
from rltrace.record.announcement import complain, say

if TYPE_CHECKING:
    from rltrace.run.supervisor import Outcome


@click.command(
    name="exec",
    epilog=TRACING_HELP,
    context_settings={"allow_interspersed_args": False},  # behind the program's name all words are its own
)
@click.option("--out", metavar="DIR", help="Folder of the Recording.  [default: rltrace-runs/<time>]")
@ALLOCATIONS_OPTION
@KERNELS_OPTION
@OTLP_OPTION
@click.option(
    "--trace-context",
    is_flag=True,
    envvar=TRACE_CONTEXT_VARIABLE,
    help="Send a W3C trace context with Ray calls and HTTP requests, also where COMMAND has none to send.",
)
@record_options
@MAX_DISK_OPTION
@SAMPLE_OPTION
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=files)
def exec_(
    out: str | None,
    allocations: str,
    kernels: str,
    trace_context: bool,
    record_steps: str,
    record_ranks: str,
    max_disk: str,
    sample_seconds: float,
    otlp: dict[str, str] | None,
    command: tuple[str, ...],
) -> int:
    """Run any COMMAND, and record it.

    It records all Python processes of COMMAND without any edit: rltrace exec -- python train.py. The exit code is that
    of COMMAND.
    """
    require_linux("`rltrace exec`")
    from rltrace.run import supervisor

    supervisor.require_program(command[0])
    if is_off():
        supervisor.become(command)
    check_disabled()
    folder = claim(out, list(command), {})
    say(f"recording into {folder}, {bound(folder, max_disk)}")
    choose(record_steps=record_steps, record_ranks=record_ranks, kernels=kernels, allocations=allocations)
    if trace_context:
        os.environ[TRACE_CONTEXT_VARIABLE] = "1"
    outcome = supervisor.supervise(command, folder, is_our_run=False, sample_seconds=sample_seconds, otlp=otlp)
    show(_say, folder, outcome)
    return outcome.exit_code


def _say(folder: Path, outcome: Outcome) -> None:
    """Say who died, who was not traced, and what to do next."""
    from rltrace.analysis.untraced import untraced
    from rltrace.read.recording import Recording

    for death in outcome.deaths:
        complain(str(death))
    found = Recording.open(folder)
    others = untraced(found)
    for missing in (one for one in others if one.missed):
        complain(f"not traced: {' '.join(missing.command)}: {missing.reason}")
    if bare := [one for one in others if not one.missed]:
        from rltrace.cli.tables.processes import bare_line  # all tables come with it

        say(bare_line(bare))
    say_what_is_lost(found)
    if any(process.role != SAMPLER for process in found.processes):
        at = in_shell(folder)
        say(f"recorded in {folder}; go on with `rltrace view {at}` or `rltrace summary {at}`")
    else:
        look = "" if others else "; `rltrace doctor -- COMMAND` looks for the reason"
        complain(f"no process was recorded into {folder}{look}")
