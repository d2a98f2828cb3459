"""How a command ends: at once."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import TypeVar

Value = TypeVar("Value")

_kept: deque[object] = deque(maxlen=2)
"""A command has the figures of two Recordings at most."""


def until_the_end(value: Value) -> Value:
    """Return a value that nobody frees: of a long run's figures that takes 0.15 s."""
    _kept.append(value)
    return value


def at_once(code: object) -> None:
    """End the process with a code, once everything is done that was to be done at its exit.

    Python would take down all that was imported, which takes 0.09 s. It still does where a thread goes on, or where the
    code is one that it has to show; then this returns.
    """
    if not (code is None or isinstance(code, int)) or threading.active_count() > 1:
        return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is none, its reader has gone, or it is closed
            stream.flush()
    os._exit((code or 0) & 0xFF)
