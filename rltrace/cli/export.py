"""`rltrace export` writes a Recording in another program's format."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import click

from rltrace import plugins
from rltrace.cli.completion import RUN_ARGUMENT
from rltrace.cli.echo import echo
from rltrace.cli.runs import LIMITS_OPTION, open_run
from rltrace.cli.selection import of_events
from rltrace.errors import MissingExtraError, OutputError
from rltrace.limits import Limits
from rltrace.read.selection import ALL, Numbers, Seconds, Selection

if TYPE_CHECKING:
    from rltrace.read.recording import Recording

STDOUT = "-"

DEFAULT = "perfetto"
"""The format if neither a format nor a file is named."""


EXTRAS = {"parquet": "sql", "memory": "pictures", "otlp": "otel", "prometheus": "metrics"}
"""The extras that bring the packages of formats."""


class Exporter(Protocol):
    """A format. One of several files has `write_folder(recording, folder)` in place of `write`; one that is sent has
    `send(recording, url)`, which returns what was sent, and no suffix.

    It may say of itself that it is always of the whole Recording (`writes_parts = False`), that it has no spans
    (`shows_spans = False`), or that a browser opens its files, so that a large run is exported in part unless the user
    chose one (`is_for_browsers = True`).
    """

    suffix: str
    """End of its files' names; a format with several kinds of file has `suffixes` too."""

    def write(self, recording: Recording, out: BinaryIO) -> None:
        """Write the whole Recording."""


@click.command()
@RUN_ARGUMENT
@click.option(
    "--to",
    "name",
    metavar="FORMAT",
    help=f"{', '.join(sorted(plugins.EXPORTERS))}.  [default: by FILE's ending, else {DEFAULT}]",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="File to write; - for standard output.  [default: RUN's name and the format's ending, in this folder]",
)
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@of_events
@LIMITS_OPTION
def export(
    run: str | None,
    name: str | None,
    output: str | None,
    force: bool,
    steps: Numbers | None,
    ranks: Numbers | None,
    time: Seconds | None,
    depth: int | None,
    limits: Limits,
) -> None:
    """Write RUN as a file that other programs read.

    The format perfetto (.pftrace) is the timeline for ui.perfetto.dev. The format memory (.html, .svg, .png) is a
    picture of who holds every byte. The format parquet (.parquet) is a folder with a file for each table of
    docs/sql.md. The format prometheus (.prom) is what `rltrace view` serves at /metrics. The format archive (.zip) is
    the Recording as one small file, which summary, view, diff and export open. The format otlp is sent to an
    OpenTelemetry collector, whose URL is FILE, or what the OTEL_ variables say. RUN is the folder of a Recording or an
    archive of it, by default the newest in ./rltrace-runs.
    """
    from rltrace.analysis.selected import selected

    selection = Selection(steps, ranks, time, depth)
    exporter = _by_suffix(output) if name is None and output is not None else load_exporter(name or DEFAULT)
    if selection != ALL and not getattr(exporter, "writes_parts", True):
        raise click.UsageError("this format holds the whole Recording; leave out --steps, --ranks, --time and --depth")
    if depth is not None and not getattr(exporter, "shows_spans", True):
        raise click.UsageError("this format has no spans; leave out --depth")
    whole = open_run(run, limits)
    if selection == ALL and getattr(exporter, "is_for_browsers", False):
        selection = what_opens(whole)
    recording = selected(whole, selection)
    if hasattr(exporter, "send"):
        echo(exporter.send(recording, output or ""), err=True)
        return
    output = f"{recording.name}{exporter.suffix}" if output is None else output
    if hasattr(exporter, "for_file"):  # a format of several kinds of file
        exporter = exporter.for_file(output)
    if hasattr(exporter, "write_folder"):
        write_whole_folder(exporter, recording, output, force=force)
        return
    if output == STDOUT:
        exporter.write(recording, sys.stdout.buffer)
        return
    write_whole(exporter, recording, Path(output), force=force)
    echo(f"{output}  {Path(output).stat().st_size:,} bytes", err=True)


def what_opens(whole: Recording) -> Selection:
    """Return what of a run a browser opens, and say what that leaves out, if it is not all."""
    from rltrace.analysis.browsable import MOST_RECORDS, browsable

    part = browsable(whole)
    if part is None:
        return ALL
    kept = []
    if part.ranks is not None:
        slowest = "" if part.slowest is None else f", rank {part.slowest} among them, which is furthest from the others"
        kept.append(f"{part.ranks[0]} of {part.ranks[1]:,} ranks{slowest}: --ranks {part.selection.ranks}")
    if part.steps is not None:
        kept.append(f"{part.steps[0]} of {part.steps[1]:,} steps: --steps {part.selection.steps}")
    echo(
        f"rltrace: a browser opens some {MOST_RECORDS // 10**6} M records, and this run has {part.records / 1e6:,.0f} "
        f"M, so this is {'; '.join(kept)}. Choose others with --ranks, --steps or --time, or fewer spans with --depth.",
        err=True,
    )
    return part.selection


def load_exporter(name: str) -> Exporter:
    """Return the exporter of a format.

    Raises:
        click.UsageError: there is no such format.
        MissingExtraError: its packages are not installed.
    """
    known = plugins.exporters()
    if name not in known:
        raise click.UsageError(f"--to {name}: no such format; there is {', '.join(sorted(known))}")
    try:
        exporter: Exporter = plugins.load(known[name])()
    except ImportError as error:
        said = f"the format {name} needs {error.name}, which is not installed here"
        raise MissingExtraError(said, EXTRAS.get(name, "view")) from None
    return exporter


def write_whole(exporter: Exporter, recording: Recording, file: Path, *, force: bool) -> None:
    """Write a complete file or none; overwrite another file only if told to.

    Raises:
        OutputError: the file exists, is a folder, or cannot be written.
    """
    if file.is_dir():
        raise OutputError(f"{file}: a folder; name a file in it with -o, such as {file / f'trace{exporter.suffix}'}")
    exists = OutputError(f"{file}: exists already; overwrite it with --force, or name another file with -o")
    if file.exists() and not force:
        raise exists
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with unfinished.open("xb") as out:
            exporter.write(recording, out)
        if force:
            unfinished.replace(file)
        else:
            os.link(unfinished, file)  # fails where somebody made the file meanwhile
    except FileExistsError:
        raise exists from None
    except OSError as error:
        raise OutputError(f"{file}: cannot be written: {error.strerror or error}; name another file with -o") from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def write_whole_folder(exporter: Any, recording: Recording, output: str, *, force: bool) -> None:
    """Write a complete folder or none; replace only a folder of the same format, and only if told to.

    Raises:
        OutputError: there is something else, or it cannot be written.
    """
    if output == STDOUT:
        raise click.UsageError("this format is a folder; name it with -o")
    folder = Path(output)
    if folder.exists() and not (force and _is_of(exporter, folder)):
        why = "has other files" if force else "exists already; overwrite it with --force"
        raise OutputError(f"{folder}: {why}, or name another folder with -o")
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        unfinished.mkdir()
        exporter.write_folder(recording, unfinished)
        if folder.exists():
            shutil.rmtree(folder)
        unfinished.rename(folder)
    except OSError as error:
        said = error.strerror or error
        raise OutputError(f"{folder}: cannot be written: {said}; name another folder with -o") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    files = [*folder.iterdir()]
    size_bytes = sum(file.stat().st_size for file in files)
    echo(f"{output}  {len(files)} files, {size_bytes:,} bytes", err=True)


def _is_of(exporter: Any, folder: Path) -> bool:
    """Return whether a folder has nothing but files of a format."""
    return folder.is_dir() and all(file.suffix == exporter.suffix for file in folder.iterdir())


def _by_suffix(output: str) -> Exporter:
    names = sorted(plugins.exporters())
    suffixes: dict[str, Any] = {}
    for name in names:
        try:
            exporter = load_exporter(name)
        except MissingExtraError:
            continue
        endings = exporter.suffixes if hasattr(exporter, "suffixes") else (exporter.suffix,)
        if output.endswith(endings):
            return exporter
        if endings:
            suffixes[name] = ", ".join(endings)
    known = ", ".join(f"{name} ({suffix})" for name, suffix in suffixes.items())
    raise click.UsageError(f"-o {output}: no format has this ending; choose one with --to: {known}")
