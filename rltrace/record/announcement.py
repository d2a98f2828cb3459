"""What we say on stderr: what is wrong, and notices that are no errors, such as where a program records."""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from pathlib import Path

from rltrace.host import regular_file
from rltrace.host.control_characters import visible
from rltrace.host.interruption import own_failure, suppress_own
from rltrace.record import manifest, redaction

QUIET_VARIABLE = "RLTRACE_QUIET"
"""Environment variable that suppresses notices, which are no errors."""


def is_quiet() -> bool:
    """Return whether the user wants no notices."""
    return os.environ.get(QUIET_VARIABLE, "0") not in ("", "0")


def complain(message: str) -> None:
    """Print on stderr, in one line, what is wrong. Never raises."""
    if sys.stderr is None:  # `print` would take stdout instead
        return
    line = f"rltrace: {visible(redaction.text(message))}\n"
    with suppress_own(Exception):  # a stderr that takes nothing
        try:
            number = sys.stderr.fileno()
        except own_failure(AttributeError, OSError):  # a notebook's
            sys.stderr.write(line)
        else:
            # Not by way of its buffer: what that cannot get rid of would make 120 of the program's exit code.
            os.write(number, line.encode(errors="replace"))


def say(message: str) -> None:
    """Print a notice on stderr in one line, unless the user wants none. Never raises."""
    if not is_quiet():
        complain(message)


say_once, complain_once = functools.cache(say), functools.cache(complain)
"""Variants that say the same words only once per process."""


def announce(recording: Path, process_key: str, limit: str) -> None:
    """Say where a program that traces itself records, unless another process owns the run. Never raises.

    Args:
        recording: Folder of the Recording.
        process_key: Key of this process.
        limit: How much it records at most.
    """
    try:
        is_owner = json.loads(regular_file.read(recording / manifest.FILE))["owner"] == process_key
    except own_failure():  # of another host
        return
    if is_owner:
        say(f"recording into {recording}, {limit}; go on with `rltrace summary {shlex.quote(str(recording))}`")
