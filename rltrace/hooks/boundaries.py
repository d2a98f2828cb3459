"""Where a process's memory is worth a look: around its phases, its sleep and its wake-up.

The wrappers of `patching` say when one is reached, outside of the span that they write, so that what is measured there
costs the phase nothing. Nobody watches until an instrumentation of memory does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rltrace.events import MEMORY_MOVES, PHASES

NAMES = PHASES | MEMORY_MOVES
"""Spans whose beginning and end are edges."""


class Edge(NamedTuple):
    """The beginning or the end of a span."""

    names: tuple[str, ...] = ()
    """That the span may have; none where an engine has just become idle."""
    is_end: bool = True
    error: BaseException | None = None
    """What ended it, if anything did."""
    is_own: bool = False
    """Of a phase that the program marks itself, by whatever name."""

    @property
    def is_phase(self) -> bool:
        """Whether it is the edge of a phase."""
        return self.is_own or not PHASES.isdisjoint(self.names)


Watcher = Callable[[Edge], None]

WATCHERS: list[Watcher] = []


def watch(watcher: Watcher, *, is_last: bool = False) -> Callable[[], None]:
    """Have every edge of this process told to `watcher`; returns what undoes it.

    Args:
        watcher: Called with each.
        is_last: It may take its time, and does not mind who was told before: further from the phase than those that
            sample, so that what they see is what the phase meets.
    """
    WATCHERS.insert(len(WATCHERS) if is_last else 0, watcher)
    return lambda: WATCHERS.remove(watcher)


def reached(edge: Edge) -> None:
    """Tell everybody who watches; those that may take their time last behind a span, and first before one."""
    for watcher in WATCHERS if edge.is_end else reversed(WATCHERS):
        watcher(edge)
