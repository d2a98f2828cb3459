"""What a shell completes where a command names a RUN: the newest Recordings, then files."""

from __future__ import annotations

import json
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from rltrace.host import regular_file
from rltrace.host.control_characters import visible
from rltrace.read.recording import newest_first
from rltrace.record import manifest

RUNS = Path("rltrace-runs")
"""Where Recordings are by default."""

MOST = 20
"""So many Recordings are offered."""

WIDTH = 60
"""Letters of a command line that stand beside a Recording in shells that show such."""


def recordings(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the newest Recordings in ./rltrace-runs that begin as the word does, and have the shell add files."""
    names = (str(folder) for folder in newest_first(RUNS))
    # A shell gets one word a line; and bash forgets what came before it is told of files.
    offered = [name for name in names if name.startswith(incomplete) and name.isprintable()][:MOST]
    return [_files(incomplete), *(CompletionItem(name, help=_command(Path(name))) for name in offered)]


def files(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete a file."""
    return [_files(incomplete)]


def _files(incomplete: str) -> CompletionItem:
    return CompletionItem(incomplete, type="file")


def _command(folder: Path) -> str | None:
    """Return what was run, as the manifest has it."""
    try:
        program, *words = map(str, json.loads(regular_file.read(folder / manifest.FILE))["command"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return visible(" ".join([Path(program).name, *words]))[:WIDTH]


RUN_ARGUMENT = click.argument("run", required=False, shell_complete=recordings)
"""The argument of a command that reads one Recording."""
