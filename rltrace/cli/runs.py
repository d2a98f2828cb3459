"""Which Recording a command reads, which folder it may write a new one to, and what it says about one that it wrote."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rltrace import plugins
from rltrace.cli.allocator import keep_memory
from rltrace.cli.completion import RUNS
from rltrace.cli.echo import echo
from rltrace.cli.leaving import until_the_end
from rltrace.errors import RecordingError, RltraceError
from rltrace.limits import LIMITS, NO_LIMITS, Limits
from rltrace.record import allocation_steps, chosen_steps, cluster, disk_account, disk_budget, manifest, trackers
from rltrace.record.announcement import complain
from rltrace.record.lifecycle import default_folder
from rltrace.record.step_numbers import numbers
from rltrace.run.sampler import INTERVAL_SECONDS

if TYPE_CHECKING:
    from rltrace.analysis.figures import Figures
    from rltrace.read.recording import Recording
    from rltrace.read.selection import Selection

FULL_BYTES = 1 << 20
"""A disk with less room than this, a process's first segment, counts as full."""

TRACING_HELP = (
    "RLTRACE_DISABLE=ray,fsdp2 in the environment disables these instrumentations. The names are: "
    f"{', '.join(plugins.INSTRUMENTATIONS)}. With RLTRACE_QUIET=1 only problems are reported."
)
"""Text below the help of the commands that trace."""

SAMPLE_OPTION = click.option(
    "--sample",
    "sample_seconds",
    default=INTERVAL_SECONDS,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds between two samples of this host and its GPUs; GPU memory every 0.1 s at most; 0: none.",
)


def checked(told: Callable[[str], str]) -> Callable[[click.Context, click.Parameter, str], str]:
    """Return the callback of an option whose text goes into the environment as a function returns it.

    Args:
        told: Returns what all processes of the run are told; what its `ValueError` says is wrong with the option.
    """

    def callback(_context: click.Context, _parameter: click.Parameter, text: str) -> str:
        try:
            return text if cluster.is_off() else told(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


def _sound(parse: Callable[[str], object], text: str) -> str:
    if text:
        parse(text)
    return text


_RECORD_STEPS = click.option(
    "--record-steps",
    metavar="STEPS",
    default="",
    envvar=chosen_steps.STEPS_VARIABLE,
    callback=checked(partial(_sound, partial(numbers, has_periods=True))),
    help="Record only these steps in full, such as 100-110,every:50; of others, phases, memory and errors.",
)
_RECORD_RANKS = click.option(
    "--record-ranks",
    metavar="RANKS",
    default="",
    envvar=chosen_steps.RANKS_VARIABLE,
    callback=checked(partial(_sound, numbers)),
    help="Record only these ranks in full, such as 0,8-15.",
)


def record_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose what is recorded in full, and who else is told."""
    return _RECORD_STEPS(_RECORD_RANKS(_TRACKERS(command)))


def _want_trackers(_context: click.Context, _parameter: click.Parameter, are_wanted: bool) -> None:
    if are_wanted and not cluster.is_off():
        os.environ[trackers.VARIABLE] = "1"


_TRACKERS = click.option(
    "--trackers",
    is_flag=True,
    envvar=trackers.VARIABLE,
    expose_value=False,
    callback=_want_trackers,
    help="Add seconds and bytes of each step to the run that the program has open in W&B, MLflow or TensorBoard.",
)


def _each(steps: str) -> str:
    """Return each step by itself, as every process of the run takes them from the environment."""
    return ",".join(map(str, sorted(allocation_steps.parse(steps))))


def _steps_option(flag: str, variable: str, what: str, longer: str) -> Callable[..., Any]:
    """Return an option that names the steps of which everything of a kind is recorded."""
    about = f"Record every {what} of these steps, such as 3 or 5-7,10; they take {longer}."
    return click.option(flag, metavar="STEPS", default="", envvar=variable, callback=checked(_each), help=about)


ALLOCATIONS_OPTION = _steps_option("--allocations", allocation_steps.VARIABLE, "GPU allocation", "a little longer")
KERNELS_OPTION = _steps_option("--kernels", allocation_steps.KERNELS_VARIABLE, "kernel and operator", "longer")


def choose(*, record_steps: str, record_ranks: str, kernels: str, allocations: str = "") -> None:
    """Have the processes of a run record only these steps and ranks in full, and of some steps all kernels and
    allocations."""
    chosen = {
        chosen_steps.STEPS_VARIABLE: record_steps,
        chosen_steps.RANKS_VARIABLE: record_ranks,
        allocation_steps.VARIABLE: allocations,
        allocation_steps.KERNELS_VARIABLE: kernels,
    }
    os.environ.update({variable: text for variable, text in chosen.items() if text})


MAX_DISK_OPTION = click.option(
    "--max-disk",
    metavar="SIZE",
    default="",
    envvar=disk_budget.VARIABLE,
    callback=checked(partial(_sound, disk_budget.parse)),
    help="Disk that the Recording may use on each host, such as 20GB, or none for no bound; the oldest goes first.  "
    f"[default: {disk_budget.size(disk_budget.MOST_BYTES)}, or 1/{disk_budget.FREE_SHARE} of what is free]",
)


ENDPOINT = "rltrace_exporters.otlp.endpoint"
"""What knows URLs of collectors; found by name, as all exporters are."""


def collector(url: str) -> dict[str, str]:
    """Return the variables of a process that sends to a collector, whose URL is given or in the standard variables.

    Raises:
        ConfigError: it is no URL.
        MissingExtraError: what sends is not installed.
    """
    plugins.load(f"{ENDPOINT}:require")()
    variables: dict[str, str] = plugins.load(f"{ENDPOINT}:set_up")(url, os.environ)
    return variables


OTLP_OPTION = click.option(
    "--otlp",
    metavar="[URL]",
    is_flag=False,
    flag_value="",
    callback=lambda context, option, url: None if url is None or cluster.is_off() else collector(url),
    help="Send steps and metrics to an OpenTelemetry collector while the run goes on; by default where the OTEL_ "
    "variables say, such as OTEL_EXPORTER_OTLP_ENDPOINT.",
)

LIMITS_OPTION = click.option(
    "--no-limits",
    "limits",
    is_flag=True,
    callback=lambda context, option, is_set: NO_LIMITS if is_set else LIMITS,
    help="Read RUN whatever its size; use it only if you trust who made it.",
)
"""The option for every command that opens a RUN."""

MOST_REFUSED = 5
"""How many files are named one by one."""


def open_run(run: str | None, limits: Limits) -> Recording:
    """Open the Recording that the user named, else the newest of `rltrace-runs` that is not empty.

    It says which newer ones are empty, and which of its files are not read.

    Raises:
        RecordingError: there is none, or it cannot be read.
    """
    keep_memory()
    from rltrace.read.recording import Recording, newest

    if run is None:
        folder, empty = newest(RUNS)
        if empty:
            which = f"{empty[0]} is" if len(empty) == 1 else f"{empty[0]} and {len(empty) - 1:,} more are"
            echo(f"rltrace: reading {folder}: {which} newer, but nothing was recorded there", err=True)
        run = str(folder)
    elif os.path.basename(run) == run and not os.path.exists(run) and os.path.exists(os.path.join(RUNS, run)):
        run = os.path.join(RUNS, run)  # as `rltrace ls` names it
    recording = Recording.open(run, limits)
    refused = recording.refused
    for why in refused[:MOST_REFUSED]:
        echo(f"rltrace: not read: {why}", err=True)
    if more := len(refused[MOST_REFUSED:]):
        echo(f"rltrace: not read: {more:,} more files, for reasons such as these", err=True)
    return recording


def figures_of(recording: Recording, selection: Selection) -> Figures:
    """Return the figures of a Recording, or of the part that was chosen; say which file of its cache is damaged."""
    from rltrace.analysis.figures import figures

    found = until_the_end(figures(recording, selection))
    for why in found.damaged:
        echo(f"rltrace: not used: {why}; the figures come from the segments", err=True)
    return found


def claim(out: str | None, command: list[str], config: Mapping[str, Any]) -> Path:
    """Make a new Recording that belongs to this process.

    Args:
        out: Its folder; `rltrace-runs/<time>` by default, numbered if two begin in one second.
        command: The command that will be run.
        config: Its configuration.

    Raises:
        RecordingError: the folder holds a Recording already, or cannot be written.
    """
    folder = Path(out) if out is not None else default_folder()
    taken = RecordingError(f"{folder}: holds a Recording already; name another folder with --out")
    if out is not None and ((folder / manifest.FILE).exists() or (folder / manifest.PROCESSES).exists()):
        raise taken
    try:
        folder = folder if out is not None else _made_anew(folder)
        manifest.create(folder, owner=None, command=command, config=config)
    except OSError as error:
        if (folder / manifest.FILE).exists():  # another run was faster
            raise taken from None
        raise RecordingError(
            f"{folder}: cannot be written: {error.strerror or error}; name another folder with --out"
        ) from None
    return folder


def bound(folder: Path, max_disk: str) -> str:
    """Bound what is recorded into a new Recording on each host, and return what to say about this one.

    Args:
        folder: The Recording.
        max_disk: As the user said it; the default if that is nothing.

    Raises:
        RecordingError: the account of the budget cannot be made.
    """
    if max_disk:
        os.environ[disk_budget.VARIABLE] = max_disk
    try:
        return disk_budget.notice(disk_account.open_account(folder))
    except OSError as error:
        raise RecordingError(
            f"{folder}: cannot be written: {error.strerror or error}; name another folder with --out"
        ) from None


def in_shell(folder: Path) -> str:
    """Return the folder as a shell takes it, for commands that users copy."""
    return shlex.quote(str(folder))


def is_off() -> bool:
    """Return whether rltrace is switched off, and say so: the command runs, and nothing of it is recorded."""
    if not cluster.is_off():
        return False
    complain(f"{cluster.OFF_VARIABLE} is set: nothing is recorded, and the command runs as it would without rltrace")
    return True


def check_disabled() -> None:
    """Warn of unknown names in `RLTRACE_DISABLE` before any process is traced."""
    if not os.environ.get(plugins.DISABLE_VARIABLE):
        return
    from rltrace.hooks.installation import warning_of_disabled

    warning = warning_of_disabled()
    if warning is not None:
        complain(warning)


def _made_anew(wanted: Path) -> Path:
    """Make a folder that nobody has made before: two runs may begin at the same moment."""
    for number in itertools.count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def require_linux(what: str) -> None:
    """Refuse to run on another system.

    Raises:
        RltraceError: one line that says what does work there.
    """
    if sys.platform != "linux":
        raise RltraceError(
            f"{what} needs Linux, and this is {sys.platform}; record on Linux and copy the folder here: "
            "`rltrace view`, `summary` and `export` work anywhere"
        )


def say_what_is_lost(recording: Recording) -> None:
    """Say in one line if events could not be written, with the reason if it still holds."""
    if recording.lost_events:
        is_full = shutil.disk_usage(recording.path).free < FULL_BYTES
        why = ": the disk is full" if is_full else ""
        complain(f"{recording.lost_events:,} events could not be written{why}; all others are there")


def show(what: Callable[..., None], *arguments: Any) -> None:
    """Print something after a command whose exit code is not ours; a failure is reported in one line."""
    try:
        what(*arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:  # the command is over: this is for what we say of it
        drop_output()
    except Exception as error:
        drop_output()
        complain(f"this screen is incomplete: {str(error) or type(error).__name__}")


def drop_output() -> None:
    """Flush, and drop what nobody reads: Python would try again at exit, and change the exit code to 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
