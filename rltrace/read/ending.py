"""How a supervised command ended, written once by the supervisor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from rltrace.host import regular_file
from rltrace.read import gate
from rltrace.record import checksum

FILE = "ending.json"


class Ending(NamedTuple):
    """How a command ended."""

    exit_code: int
    """128 + the signal's number if one killed it."""
    interrupted_by: int | None
    """SIGINT, SIGTERM or SIGHUP, if the user stopped it."""


def write(recording: Path, ending: Ending) -> None:
    """Write it to the Recording.

    Raises:
        OSError: the disk is full.
    """
    (recording / FILE).write_text(checksum.signed(json.dumps(ending._asdict())) + "\n")


def read(recording: Path) -> Ending | None:
    """Return how the command ended; None while it goes on, if nobody watched it, and if the file cannot be read."""
    said = _said(recording)
    return Ending(said["exit_code"], said["interrupted_by"]) if said else None


def is_damaged(recording: Path) -> bool:
    """Return whether there is a file that cannot be read."""
    return _said(recording) == {}


def _said(recording: Path) -> dict[str, Any] | None:
    """Return the content; None if there is no file, and empty if the file is damaged."""
    try:
        content = regular_file.read(recording / FILE)
    except OSError:
        return None
    said = None if checksum.is_intact(content) is False else gate.parsed(content)
    try:
        return dict(gate.ENDING(said))
    except ValueError:
        return {}
