"""Instrumentations: which places of a framework are spans. There is one file or folder for each framework.

In: what a framework calls, at the targets ("module:Class.method") that its file names. Out: spans, counters, arrows and
memory of the Recording, by the names of `events.py`, which are the same for every framework. `torch/` and `memory/`
serve the others: sharded models and streams, and who holds which bytes. `docs/versions.md` says which versions are
known.

None of these files imports its framework: hooks wait until the program does that, and `hooks/` makes and holds them.
The package itself can be called: `rltrace.instrument()` traces the program that calls it.

To add a framework, write one file and a line in `rltrace/plugins.py`; `CONTRIBUTING.md` (Add a hook) has the rest. Good
examples are `reference/phases.py` where every phase is a call, `trl/` where a phase begins and ends in two calls, and
`torch_memory_saver.py` for memory that sleeps. A span named `step` is a step; one named as in `events.PHASES` is a
phase.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rltrace.hooks.installation import (
    Instrumentation,
    install,
    installed,
    instrument,
    join_run,
    warning_of_disabled,
)
from rltrace.plugins import DISABLE_VARIABLE

__all__ = [
    "DISABLE_VARIABLE",
    "Instrumentation",
    "install",
    "installed",
    "instrument",
    "join_run",
    "warning_of_disabled",
]


class _CallablePackage(ModuleType):
    """A package that can be called: importing any of its files would replace a function of the same name."""

    def __call__(self, folder: str | os.PathLike[str] | None = None, **who: Any) -> Path | None:
        return instrument(folder, **who)

    __call__.__doc__ = instrument.__doc__


sys.modules[__name__].__class__ = _CallablePackage
