"""The chosen step in which this process is, and what happens to what is kept of it, as a table of states and events.

What is kept is a `Keeper`'s: every allocation, or every kernel.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

from rltrace.hooks.hook import Hook
from rltrace.record import lifecycle, spans

PAUSED = "recording was paused when it ended"


class Keeper(Protocol):
    """Keeps something whole, from the beginning of a step to its end."""

    line: str
    """Kind of the line by which a process says that it has begun."""

    def of(self, step: int) -> str:
        """Return what a process reports as unavailable, with the reason, if it kept nothing of a step."""

    def outside(self) -> None:
        """Look, at a phase boundary outside of any chosen step."""

    def lacks(self) -> str | None:
        """Return why it is too early to begin; None once it is not."""

    def begin(self, step: int) -> str | None:
        """Begin; return why that is impossible, None if it is done."""

    def end(self, step: int) -> str | None:
        """Write what was kept; return why nothing was written, None if all was."""

    def abandon(self) -> None:
        """Keep no more, and write nothing."""


class State(enum.Enum):
    """A process is in one of these states, as far as it knows."""

    OUTSIDE = "in no chosen step"
    WAITING = "in a chosen step, and it is too early to keep anything"
    KEEPING = "in a chosen step that it keeps"
    REFUSED = "in a chosen step of which nothing can be kept"


class Event(enum.Enum):
    """One of these events moves the process from a state to the next."""

    ENTER = "a chosen step has begun"
    LOOK = "a phase has begun or ended, so that CUDA may have come up"
    BEGUN = "it is kept from here on"
    REFUSE = "it cannot be kept"
    LEAVE = "the step has ended"
    DISOWN = "the process has steps of its own, and the step was another's"


class KeptStep:
    """What is kept of one chosen step after the other; whoever calls it holds a lock."""

    def __init__(self, hook: Hook, keeper: Keeper) -> None:
        self._hook = hook
        self._keeper = keeper
        self._state = State.OUTSIDE
        self._step = 0
        """The step that was entered last."""
        self._reason = ""
        """Why nothing of the step is kept, in a state in which nothing is."""

    @property
    def step(self) -> int | None:
        """The chosen step in which this process is."""
        return None if self._state is State.OUTSIDE else self._step

    def enter(self, step: int) -> None:
        """Enter a chosen step from outside of any."""
        self._step = step
        self.on(Event.ENTER)

    def on(self, event: Event) -> None:
        """Go where the table says, and do what it says; an event without a row for the state changes nothing."""
        found = TRANSITIONS.get((self._state, event))
        if found is not None:
            # First: what is done may raise, and a signal handler may mark a phase in the middle of it.
            self._state, act = found
            act(self)

    def _begin(self) -> None:
        if (lacking := self._keeper.lacks()) is not None:
            self._reason = lacking
            return
        reason = self._keeper.begin(self._step)
        if reason is None:
            self.on(Event.BEGUN)
        else:
            self._reason = reason
            self.on(Event.REFUSE)

    def _say_kept(self) -> None:
        self._hook.row.fired()
        if (current := spans.current()) is not None:
            current.append(self._keeper.line, step=self._step)

    def _write(self) -> None:
        step = self._step
        if spans.is_recording():
            reason = self._keeper.end(step)
        else:
            self._keeper.abandon()
            reason = PAUSED
        if reason is not None:
            lifecycle.unavailable(self._keeper.of(step), reason)

    def _abandon(self) -> None:
        self._keeper.abandon()

    def _say_reason(self) -> None:
        lifecycle.unavailable(self._keeper.of(self._step), self._reason)

    def _do_nothing(self) -> None:
        """Do nothing: only the state changes."""


TRANSITIONS: dict[tuple[State, Event], tuple[State, Callable[[KeptStep], None]]] = {
    (State.OUTSIDE, Event.ENTER): (State.WAITING, KeptStep._begin),
    (State.WAITING, Event.LOOK): (State.WAITING, KeptStep._begin),
    (State.WAITING, Event.BEGUN): (State.KEEPING, KeptStep._say_kept),
    (State.WAITING, Event.REFUSE): (State.REFUSED, KeptStep._do_nothing),
    (State.WAITING, Event.LEAVE): (State.OUTSIDE, KeptStep._say_reason),
    (State.WAITING, Event.DISOWN): (State.OUTSIDE, KeptStep._do_nothing),
    (State.KEEPING, Event.LEAVE): (State.OUTSIDE, KeptStep._write),
    (State.KEEPING, Event.DISOWN): (State.OUTSIDE, KeptStep._abandon),
    (State.REFUSED, Event.LEAVE): (State.OUTSIDE, KeptStep._say_reason),
    (State.REFUSED, Event.DISOWN): (State.OUTSIDE, KeptStep._do_nothing),
}
"""The next state, and what is done in it, by state and event."""
