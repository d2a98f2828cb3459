"""Chooses where memory is worth a look between phase boundaries.

Memory turns in a few places of a training step. Activations grow until a forward ends, and are gone when its backward
ends. Gradients come with a backward and go with `zero_grad`. An optimizer's first step makes its states. `empty_cache`
gives the driver back what nobody holds.

A look takes some hundred microseconds, so all looks together get a small share of the program's time. Passes have one
of their own, so that no other place can starve them. When it is spent, whole passes are skipped, forward and backward
together: a look at half of a pass would show activations that are long gone.

Between turns, each hook can be a beat: it asks the driver how much memory is used, which takes microseconds, and looks
if that has changed. When too much time is owed for a look, what the driver said is recorded alone. Where memory has
been still for long, as in the steady steps of a loop whose allocator has all that it needs, it is asked less often. So
it is within a phase: a phase has dozens of turns, and what its first ones spent would be missing in the next phase,
where memory moves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from rltrace.events import INFERENCES, Turn
from rltrace.hooks.boundaries import Boundary
from rltrace.host.clock import now_ns
from rltrace.instrument.memory.work import Work

ALL = 1 << 62
"""More turns than a phase has."""
NEVER_IN_PASS = (Turn.OPTIMIZER_BEGIN, Turn.ZERO_GRAD)
NEVER_COMPUTES = (*NEVER_IN_PASS, Turn.MOVED)
"""Places to which a phase of log-probs does not come while it computes with the result of a forward."""


class Ledger(Protocol):
    """The ledger that is looked at."""

    def look(self, turn: Turn, *, activations: str | None) -> None:
        """Sample all owners and the total; in a pass with the owner of its activations."""

    def settle(self) -> None:
        """Count what was allocated since the last look as something other than activations."""

    def say_peak(self) -> None:
        """Sample torch's own count of the most that it has handed out, since it was last reset."""

    def has_moved(self) -> bool:
        """Return whether the driver counts something else than at the last look."""

    def say_used(self) -> None:
        """Record what the driver has just counted, without looking at who owns it."""


class Budget:
    """A share of a process's time; some of it may be spent at once."""

    def __init__(self, share: float, burst_ns: int) -> None:
        self._share, self.burst_ns = share, burst_ns
        self._left_ns = float(burst_ns)
        self._counted_ns = now_ns()
        self.still = 0
        """How many beats in a row, of those that this pays for, have found no change."""

    def left_ns(self, at_ns: int) -> float:
        """Return what is left; a negative value is owed."""
        self._left_ns = min(self.burst_ns, self._left_ns + self._share * (at_ns - self._counted_ns))
        self._counted_ns = at_ns
        return self._left_ns

    def due_ns(self) -> int:
        """Return when something is left."""
        return self._counted_ns + max(0, int(-self._left_ns / self._share))

    def spend(self, spent_ns: int) -> None:
        """Take some of what is left."""
        self._left_ns -= spent_ns


class Turns:
    """Looks at the ledger where a training pass turns, as long as that is cheap."""

    beat_due_ns = 0
    """Before this time a beat has nothing to spend. A step has hundreds of beats, which ask for no more than this."""

    SHARE, BURST_NS = 0.0002, 20_000_000
    """The budget of looks outside of passes. One takes 0.3 ms; when none is left, the total is told all the same."""
    PASS_SHARE, PASS_BURST_NS = 0.0002, 10_000_000
    """The budget of looks inside passes: the first passes are always seen."""
    TURN_BEAT_SHARE, TURN_BEAT_BURST_NS = 0.0003, 5_000_000
    """The budget of beats where memory turns: five in a pass. One takes 0.1 ms where a forward or a backward was under
    way since the last, and nothing of it is in the processor's caches; the burst is for the first steps."""
    BEAT_SHARE, BEAT_BURST_NS = 0.0002, 1_000_000
    """The budget of beats between, inside of forwards and of long calls. In a forward after other work each layer asks;
    in a series of forwards one layer in a few does."""
    MOST_BEAT_NS, MOST_LOOK_NS = 150_000, 5_000_000
    """A beat or a look that took longer met something else: a garbage collection, the driver's lock, another thread. At
    its price half a second would be owed for by 40 minutes without a beat."""
    FOUND_DISCOUNT = 4
    """A beat that finds a change costs a fourth: where memory moves it moves on, as while a model is made."""
    STILL_BEATS, STILL_PRICE = 32, 4
    """After so many beats in a row that found no change, one costs four times as much: where memory is still it stays
    so. The next change that is found makes beats cheap again."""
    PLENTY = 0.5
    """While this share of the burst is left, every turn asks. With less, half as many turns are left out as have found
    no change in a row in this phase."""
    MOST_LEFT_OUT = 8
    """Of these, at most so many."""
    STILL_PHASES = 2
    """After a phase has gone by so often without a change, only its first turn asks then."""
    BACKWARD_BEATS = 2
    """How many beats that follow the beginning of a backward are turns: the first layer that asks may do so before the
    gradients of the logits are there, the second one does not."""

    def __init__(self, ledger: Ledger, work: Work) -> None:
        """Args:
        ledger: Of this process.
        work: Says whose passes these are.
        """
        self._ledger, self.work = ledger, work
        self._passes = Budget(self.PASS_SHARE, self.PASS_BURST_NS)
        self._looks = Budget(self.SHARE, self.BURST_NS)
        self._beats = Budget(self.BEAT_SHARE, self.BEAT_BURST_NS)
        self._turn_beats = Budget(self.TURN_BEAT_SHARE, self.TURN_BEAT_BURST_NS)
        self._beats_at_turn = 0
        """How many of the next beats are turns."""
        self._still_turns = 0
        """How many turns in a row that asked have found no change in this phase."""
        self._moves_here = False
        """Whether one has found a change in it."""
        self._left_out = 0
        """How many of the next turns are left out."""
        self._phase: tuple[str, ...] = ()
        """The names that the phase may have in which the process is."""
        self._still_phases: dict[tuple[str, ...], int] = {}
        """How many times in a row a phase has gone by in which no turn found a change."""
        self._is_passing = False
        """Whether a forward has begun whose backward has not ended."""
        self._is_inferring = False
        """Whether a forward is under way that has no backward."""
        self._is_computing = False
        """Whether such a forward is over, in a phase that goes on with its result, as to log-probs and entropies."""
        self._is_seen = False
        """Whether the pass that is under way is looked at."""
        self._has_looked = False
        """Whether anybody has looked inside the pass or the forward, so that its end needs a look too."""

    def begin_forward(self, *, has_gradients: bool) -> None:
        """A model's forward begins."""
        self._is_computing = False
        if not has_gradients:
            self._is_inferring = True
        elif not self._is_passing:
            self._begin_pass()
            if self._is_seen:
                self._ledger.settle()
        self._ask_at_turn()

    def end_forward(self, *, has_gradients: bool) -> None:
        """The forward is over. If a backward follows, its activations are there now."""
        self._turn(Turn.FORWARD_END, is_seen=self._is_seen and has_gradients)
        if not has_gradients:
            self._end_pass(Turn.FORWARD_END)  # what it returns, such as logits, came in it
            self._is_inferring = False
            self._is_computing = not INFERENCES.isdisjoint(self._phase)

    def begin_backward(self) -> None:
        """A backward begins; its forward may have had no hook."""
        if not self._is_passing:
            self._begin_pass()
        self._turn(Turn.BACKWARD_BEGIN, is_seen=self._is_seen)
        self._beats_at_turn, self.beat_due_ns = self.BACKWARD_BEATS, 0

    def end_backward(self) -> None:
        """Gradients are there, and activations are gone."""
        self._beats_at_turn = 0
        self._ask_at_turn()
        self._is_passing = False
        self._end_pass(Turn.BACKWARD_END)

    def reached(self, turn: Turn) -> None:
        """Look at a rare place, unless too much time is owed."""
        if turn in NEVER_IN_PASS:  # then a forward that nobody followed by a backward is over too
            self._is_passing = False
        if turn in NEVER_COMPUTES:
            self._is_computing = False
        if self._can_look():
            self._look(turn, self._looks)
        elif turn is Turn.OPTIMIZER_BEGIN:  # what backwards took at most, before the optimizer takes more
            self._ledger.say_peak()

    def before_reset(self) -> None:
        """Ask for the peak before the program resets torch's count of it."""
        self._ledger.say_peak()

    def turn(self) -> None:
        """Ask at a rare place behind which memory has grown, and nothing of ours runs for long."""
        self._beat(self._turn_beats)

    def pass_boundary(self, boundary: Boundary) -> None:
        """Come to another phase: memory may move in it, though it has been still."""
        if self._moves_here:
            self._still_phases[self._phase] = 0
        elif self._still_turns:
            self._still_phases[self._phase] = self._still_phases.get(self._phase, 0) + 1
        self._phase, self._is_computing = () if boundary.is_end else boundary.names, False
        self._still_turns, self._moves_here, self._left_out = 0, False, 0

    def beat(self) -> None:
        """Ask, if the budget allows it, whether the used memory has changed, and look if it has."""
        if self._beats_at_turn:
            self._beats_at_turn -= 1
            self._ask_at_turn()
        else:
            self._beat(self._beats)
        self.beat_due_ns = 0 if self._beats_at_turn else self._beats.due_ns()

    def beat_if_due(self) -> None:
        """Compare the clock with the time of the next beat first, which costs less than to ask what may be spent."""
        if now_ns() >= self.beat_due_ns:
            self.beat()

    def _ask_at_turn(self) -> None:
        """Ask where memory turns, unless the turns before have found nothing and little is left."""
        if self._left_out and self._turn_beats.left_ns(now_ns()) < self.PLENTY * self._turn_beats.burst_ns:
            self._left_out -= 1
        elif (has_moved := self._beat(self._turn_beats)) is not None:
            self._still_turns = 0 if has_moved else self._still_turns + 1
            self._moves_here |= has_moved
            is_still = not self._moves_here and self._still_phases.get(self._phase, 0) >= self.STILL_PHASES
            self._left_out = ALL if is_still else min(self._still_turns // 2, self.MOST_LEFT_OUT)

    def _beat(self, budget: Budget) -> bool | None:
        """Ask if the budget allows it; return whether the used memory has changed, None if nobody asked."""
        began_ns = now_ns()
        if budget.left_ns(began_ns) <= 0:
            return None
        has_moved = self._ledger.has_moved()
        can_look = has_moved and self._can_look()
        if has_moved and not can_look:
            self._ledger.say_used()
        budget.still = 0 if has_moved else budget.still + 1
        budget.spend(self._price_ns(min(now_ns() - began_ns, self.MOST_BEAT_NS), budget.still))
        if can_look:
            self._look(Turn.BEAT, self._looks)
        return has_moved

    def _price_ns(self, spent_ns: int, still: int) -> int:
        """Return what a beat costs that took so long, the last of so many in a row that found no change."""
        if not still:
            return spent_ns // self.FOUND_DISCOUNT
        return spent_ns * (self.STILL_PRICE if still > self.STILL_BEATS else 1)

    def _can_look(self) -> bool:
        return self._looks.left_ns(now_ns()) > -self.BURST_NS

    def _begin_pass(self) -> None:
        self._is_passing = True
        self._is_seen = self._passes.left_ns(now_ns()) > 0

    def _turn(self, turn: Turn, *, is_seen: bool) -> None:
        if is_seen:
            self._look(turn, self._passes)
        else:
            self._ask_at_turn()

    def _end_pass(self, turn: Turn) -> None:
        """Look if anybody has looked inside the pass, so that no row outlives it."""
        if self._has_looked and not self._is_passing:
            self._look(turn, self._passes)
            self._has_looked = False

    def _look(self, turn: Turn, budget: Budget) -> None:
        began_ns = now_ns()
        in_pass = self._is_passing or self._is_inferring
        self._has_looked |= in_pass
        has_activations = in_pass or self._is_computing
        self._ledger.look(turn, activations=self.work.owner_of("activations") if has_activations else None)
        budget.spend(min(now_ns() - began_ns, self.MOST_LOOK_NS))


def at(turns: Turns, turn: Turn) -> Any:
    """Return a hook's `before` or `after` that looks there."""
    return _calling(functools.partial(turns.reached, turn))


def turning(turns: Turns) -> Any:
    """Return a hook's `before` or `after` that is a turn."""
    return _calling(turns.turn)


def saying_peak(turns: Turns) -> Any:
    """Return a hook's `before` of what resets torch's count of its peak."""
    return _calling(turns.before_reset)


def beating(turns: Turns) -> Any:
    """Return a hook's `before` or `after` that is a beat."""
    return _calling(turns.beat_if_due)


def _calling(function: Callable[[], None]) -> Any:
    """Return a hook's `before` or `after` that calls a function, whatever the call is about."""

    def call(*_: Any) -> None:
        function()

    return call
