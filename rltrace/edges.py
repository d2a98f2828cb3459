"""Where a process's memory is worth a look: around its phases, its sleep and its wake-up.

The wrappers of `patching` say when one is reached, outside of the span that they write, so that what is measured there
costs the phase nothing. Nobody watches until an instrumentation of memory does.
"""

from __future__ import annotations

from collections.abc import Callable

from rltrace.events import MEMORY_MOVES, PHASES

NAMES = PHASES | MEMORY_MOVES
"""Spans whose beginning and end are edges."""

Watcher = Callable[["BaseException | None", bool], None]
"""Called with the error that ended the span, None at a beginning and at an end without one; and whether it is a phase,
else memory moves within one."""

_watchers: list[Watcher] = []


def watch(watcher: Watcher) -> Callable[[], None]:
    """Have every edge of this process told to `watcher`; returns what undoes it."""
    _watchers.append(watcher)
    return lambda: _watchers.remove(watcher)


def reached(error: BaseException | None = None, *, is_phase: bool = False) -> None:
    """Tell everybody who watches."""
    for watcher in _watchers:
        watcher(error, is_phase)
