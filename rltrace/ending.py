"""How a supervised command ended: said in the Recording by who watched it, once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from rltrace import regular_file

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
    (recording / FILE).write_text(json.dumps(ending._asdict()) + "\n")


def read(recording: Path) -> Ending | None:
    """What was said; None while the command goes on, and where nobody watched it."""
    try:
        said = json.loads(regular_file.read(recording / FILE))
        interrupted_by = said["interrupted_by"]
        return Ending(int(said["exit_code"]), None if interrupted_by is None else int(interrupted_by))
    except (OSError, ValueError, KeyError, TypeError):
        return None
