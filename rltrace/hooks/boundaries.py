"""Where a process's memory is worth a look: around its phases, its sleep and its wake-up.

The wrappers of `patching` say when one is reached, outside of the span that they write, so that what is measured there
costs the phase nothing. Nobody watches until an instrumentation of memory does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rltrace.events import MEMORY_MOVES, PHASES, STEP_PHASES

NAMES = PHASES | MEMORY_MOVES
"""The beginning and the end of a span with one of these names is a boundary."""


OF_STEPS = frozenset(STEP_PHASES) - MEMORY_MOVES


class Boundary(NamedTuple):
    """The beginning or the end of a span."""

    names: tuple[str, ...] = ()
    """The names that the span may have; there is none where an engine has just become idle."""
    is_end: bool = True
    error: BaseException | None = None
    """The error that ended the span, if one did."""
    is_own: bool = False
    """Whether the program marks this phase itself, by whatever name."""

    @property
    def is_phase(self) -> bool:
        """Whether it is the boundary of a phase."""
        return self.is_own or not PHASES.isdisjoint(self.names)


Watcher = Callable[[Boundary], None]

WATCHERS: list[Watcher] = []


def watch(watcher: Watcher, *, is_last: bool = False) -> Callable[[], None]:
    """Have `watcher` called at every boundary of this process; return what undoes it.

    Args:
        watcher: Called with each.
        is_last: It may take its time, and does not mind who was told before: further from the phase than those that
            sample, so that what they see is what the phase meets.
    """
    WATCHERS.insert(len(WATCHERS) if is_last else 0, watcher)
    return lambda: WATCHERS.remove(watcher)


_told = False
"""Whether a hook that knows a trainer, or the program itself, has told of a phase of a step."""


def reached(boundary: Boundary) -> None:
    """Tell every watcher. Those that may take their time are told first before a span, and last behind it."""
    global _told
    _told = _told or boundary.is_own or not OF_STEPS.isdisjoint(boundary.names)
    inferred(boundary)


def are_told() -> bool:
    """Return whether phases of a step are told, so that none has to be inferred."""
    return _told


def inferred(boundary: Boundary) -> None:
    """Tell every watcher of a boundary that nobody has marked."""
    for watcher in WATCHERS if boundary.is_end else reversed(WATCHERS):
        watcher(boundary)
