"""How a supervised command ended: said in the Recording by who watched it, once."""

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
    """SIGINT, SIGTERM or SIGHUP, if the user asked it to end."""


def write(recording: Path, ending: Ending) -> None:
    """Say it.

    Raises:
        OSError: the disk is full.
    """
    (recording / FILE).write_text(checksum.signed(json.dumps(ending._asdict())) + "\n")


def read(recording: Path) -> Ending | None:
    """What was said; None while the command goes on, where nobody watched it, and if it cannot be read."""
    said = _said(recording)
    return Ending(said["exit_code"], said["interrupted_by"]) if said else None


def is_damaged(recording: Path) -> bool:
    """Whether something was said that cannot be read."""
    return _said(recording) == {}


def _said(recording: Path) -> dict[str, Any] | None:
    """None if nobody has said anything; empty if that is damaged."""
    try:
        content = regular_file.read(recording / FILE)
    except OSError:
        return None
    said = None if checksum.is_intact(content) is False else gate.parsed(content)
    try:
        return dict(gate.ENDING(said))
    except ValueError:
        return {}
