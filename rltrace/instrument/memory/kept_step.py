"""The chosen step in which this process is, and what happens to its allocations, as a table of states and events."""

from __future__ import annotations

import enum
from collections.abc import Callable

from rltrace.events import NO_GPU, allocations_of
from rltrace.hooks.patching import Hook
from rltrace.host.gpu_use import has_used_gpu
from rltrace.record import lifecycle, spans
from rltrace.record.torch import allocations

PAUSED = "recording was paused when it ended"
PROGRAMS_OWN = "the program keeps its own"


class State(enum.Enum):
    """A process is in one of these states, as far as it knows."""

    OUTSIDE = "in no chosen step"
    WAITING = "in a chosen step, and has used no GPU"
    KEEPING = "in a chosen step whose allocations it keeps"
    REFUSED = "in a chosen step whose allocations cannot be kept"


class Event(enum.Enum):
    """One of these events moves the process from a state to the next."""

    ENTER = "a chosen step has begun"
    LOOK = "a phase has begun or ended, so that CUDA may have come up"
    BEGUN = "its allocations are kept from here on"
    REFUSE = "they cannot be kept"
    LEAVE = "the step has ended"
    DISOWN = "the process has steps of its own, and the step was another's"


class KeptStep:
    """The allocations of one chosen step after the other; whoever calls it holds a lock."""

    def __init__(self, hook: Hook) -> None:
        self.last: allocations.Stillness | None = None
        """What the allocator counted at the last boundary outside of a chosen step."""
        self._hook = hook
        self._state = State.OUTSIDE
        self._step = 0
        """The step that was entered last."""
        self._reason = NO_GPU
        """Why the allocations of the step are not kept, in a state in which they are not."""

    @property
    def step(self) -> int | None:
        """The chosen step in which this process is."""
        return None if self._state is State.OUTSIDE else self._step

    def enter(self, step: int) -> None:
        """Enter a chosen step from outside of any."""
        self._step, self._reason = step, NO_GPU
        self.on(Event.ENTER)

    def on(self, event: Event) -> None:
        """Go where the table says, and do what it says; an event without a row for the state changes nothing."""
        found = TRANSITIONS.get((self._state, event))
        if found is not None:
            # First: what is done may raise, and a signal handler may mark a phase in the middle of it.
            self._state, act = found
            act(self)

    def _begin(self) -> None:
        if not has_used_gpu():
            return
        reason = PROGRAMS_OWN if allocations.is_kept() else allocations.begin(self.last)
        if reason is None:
            self.on(Event.BEGUN)
        else:
            self._reason = reason
            self.on(Event.REFUSE)

    def _say_kept(self) -> None:
        self._hook.row.fired()
        if (current := spans.current()) is not None:
            current.append("allocations", step=self._step)

    def _write(self) -> None:
        step = self._step
        if spans.is_recording():
            reason = allocations.end(step=step)
        else:
            allocations.abandon()
            reason = PAUSED
        if reason is not None:
            lifecycle.unavailable(allocations_of(step), reason)

    def _abandon(self) -> None:
        allocations.abandon()

    def _say_reason(self) -> None:
        lifecycle.unavailable(allocations_of(self._step), self._reason)

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
