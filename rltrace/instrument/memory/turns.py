"""Where a model's memory turns between phase boundaries, and which of these places are worth a look.

Activations grow until a forward ends and are gone when its backward does; gradients come with a backward and go with
`zero_grad`; an optimizer's first step makes its states; `empty_cache` gives the driver back what nobody holds. A look
takes some hundred microseconds of the program's time, so all looks together get a small share of it. Where that is
spent, a whole pass is left out, forward and backward: half of one would leave activations behind that are gone.

In between, wherever a hook is called, a beat asks the driver what is used, which takes microseconds; if that has
changed, the ledger is looked at there too.
"""

from __future__ import annotations

from typing import Any, Protocol

from rltrace.host.clock import now_ns
from rltrace.instrument.memory.cuda_ledger import Turn


class Ledger(Protocol):
    """What is looked at."""

    @property
    def has_activations(self) -> bool:
        """Whether the last look saw any."""

    def look(self, turn: Turn, *, in_pass: bool) -> None:
        """Sample all owners and the total."""

    def settle(self) -> None:
        """Take what has come since the last look for no activations."""

    def has_moved(self) -> bool:
        """Whether the driver counts something else than at the last look."""


class Turns:
    """Looks at the ledger where a training pass turns, as long as that is cheap."""

    SHARE = 0.001
    """Of a process's time, for all looks together."""
    BURST_NS = 20_000_000
    """What looks may take at once: the first passes are always seen."""
    BEAT_NS = 50_000_000
    """Between two beats."""
    BEAT_SHARE = 0.0005
    """Of a process's time, for asking the driver: on a busy host that takes 80 µs and not 5."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._left_ns = float(self.BURST_NS)
        self._counted_ns = self._beat_due_ns = now_ns()
        self._is_passing = False
        """Whether a forward has begun whose backward has not ended."""
        self._is_inferring = False
        """Whether a forward is under way that has no backward."""
        self._is_seen = False
        """Whether the pass that is under way is looked at."""

    def begin_forward(self, *, has_gradients: bool) -> None:
        """A model's forward begins."""
        if not has_gradients:
            self._is_inferring = True
        elif not self._is_passing:
            self._begin_pass()
            if self._is_seen:
                self._ledger.settle()
        self.beat()

    def end_forward(self, *, has_gradients: bool) -> None:
        """It is over: where a backward follows, activations are there."""
        if not has_gradients:
            self.beat()
            self._is_inferring = False
            self._end_pass(Turn.FORWARD_END, is_seen=False)
        elif self._is_seen:
            self._look(Turn.FORWARD_END)
        else:
            self.beat()

    def begin_backward(self) -> None:
        """A backward begins, of a forward that was seen or of one that nobody hooks."""
        if not self._is_passing:
            self._begin_pass()
        if self._is_seen:
            self._look(Turn.BACKWARD_BEGIN)
        else:
            self.beat()

    def end_backward(self) -> None:
        """Gradients are there, and activations are gone."""
        self.beat()
        self._is_passing = False
        self._end_pass(Turn.BACKWARD_END, is_seen=self._is_seen)

    def reached(self, turn: Turn) -> None:
        """Look at a place that is rare, if there is anything left, or if not too much is owed."""
        self._gain()
        if self._left_ns > -self.BURST_NS:
            self._look(turn)

    def beat(self) -> None:
        """Look if what is used has changed; ask for that now and then."""
        began_ns = now_ns()
        if began_ns < self._beat_due_ns:
            return
        has_moved = self._ledger.has_moved()
        ended_ns = now_ns()
        self._beat_due_ns = ended_ns + max(self.BEAT_NS, int((ended_ns - began_ns) / self.BEAT_SHARE))
        if has_moved:
            self.reached(Turn.BEAT)

    def _begin_pass(self) -> None:
        self._is_passing = True
        self._gain()
        self._is_seen = self._left_ns > 0

    def _end_pass(self, turn: Turn, *, is_seen: bool) -> None:
        """Look if the pass was seen, or something that was seen in it is gone now."""
        if is_seen or (self._ledger.has_activations and not self._is_passing):
            self._look(turn)

    def _gain(self) -> None:
        at_ns = now_ns()
        self._left_ns = min(self.BURST_NS, self._left_ns + self.SHARE * (at_ns - self._counted_ns))
        self._counted_ns = at_ns

    def _look(self, turn: Turn) -> None:
        began_ns = now_ns()
        self._ledger.look(turn, in_pass=self._is_passing or self._is_inferring)
        self._left_ns -= now_ns() - began_ns


def at(turns: Turns, turn: Turn) -> Any:
    """Return a hook's `before` or `after` that looks there."""

    def reached(*_: Any) -> None:
        turns.reached(turn)

    return reached


def beating(turns: Turns) -> Any:
    """Return a hook's `before` or `after` that is a beat."""

    def beat(*_: Any) -> None:
        turns.beat()

    return beat
