"""numpy in a command: without threads of its own.

OpenBLAS starts a thread for each processor when numpy is imported. They wait for work in a loop, which takes 0.05 s of
each processor, and no figure of ours gives them any. Only what the command itself imports is meant: no program that it
starts may find another environment, and a program that imports rltrace has the numpy that it wants.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

VARIABLE = "OPENBLAS_NUM_THREADS"


def behind_numpy(callback: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a command does, with numpy imported before."""

    @functools.wraps(callback)
    def call(*args: Any, **kwargs: Any) -> Any:
        import_alone()
        return callback(*args, **kwargs)

    return call


def import_alone() -> None:
    """Import numpy, with one thread unless the user has said how many."""
    said = os.environ.get(VARIABLE)
    os.environ.setdefault(VARIABLE, "1")
    try:
        import numpy  # noqa: F401
    finally:
        if said is None:
            del os.environ[VARIABLE]
