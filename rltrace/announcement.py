"""Says where a program records that traces itself: one line on stderr, by the process that owns the run."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

from rltrace import manifest

QUIET_VARIABLE = "RLTRACE_QUIET"
"""Environment variable that keeps the line from being said."""


def announce(recording: Path, process_key: str) -> None:
    """Say it, unless another process owns the run, or the user wants no word. Never raises.

    Args:
        recording: Its folder.
        process_key: Of this process.
    """
    if os.environ.get(QUIET_VARIABLE, "0") not in ("", "0") or sys.stderr is None:  # `print` would take stdout instead
        return
    try:
        if json.loads((recording / manifest.FILE).read_text())["owner"] == process_key:
            look = f"rltrace summary {shlex.quote(str(recording))}"
            print(f"rltrace: recording into {recording}; go on with `{look}`", file=sys.stderr)
    except Exception:  # of another host, or a stderr that takes nothing
        pass
