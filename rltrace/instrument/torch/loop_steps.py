"""The steps of a loop that marks none, by what is known while it runs: `read/inferred.py` knows all of it later.

Generations, log-probs and updates are in steps; what an engine or a model does until it is ready is not. A step lasts
from one generation behind an update to the next. Without generations it lasts until the optimizer that steps most
rarely has stepped; which one that is, nobody knows before the second step.
"""

from __future__ import annotations

from typing import Any

from rltrace.hooks import boundaries
from rltrace.hooks.boundaries import Boundary
from rltrace.instrument.torch.loop_boundaries import GENERATION, LOG_PROBS, UPDATE

IN_STEPS = frozenset({GENERATION, LOG_PROBS, UPDATE})
"""What begins a step if none runs."""


def optimizer_of(args: dict[str, Any]) -> Any:
    """Return which optimizer steps in a span of that, as `LoopSteps.stepped` takes it. Never raises."""
    return args.get("number")


class LoopSteps:
    """Counts the steps of this process."""

    def __init__(self) -> None:
        self._number: int | None = None
        """The step that runs."""
        self._begun = 0
        """How many have begun with a generation."""
        self._has_learned = True
        self.only_generates = True
        """Whether no update has begun in this process: it may be one that only generates for another."""
        self._counts: dict[object, int] = {}
        """How often each optimizer has stepped."""

    @property
    def is_complete(self) -> bool:
        """Whether the step that runs would be one if nothing came any more: generated and learned from."""
        return self._number is not None and bool(self._begun) and self._has_learned

    @property
    def are_known(self) -> bool:
        """Whether steps of this process can be told apart: an optimizer has stepped, and nobody tells of phases."""
        return bool(self._counts) and not boundaries.are_told()

    @property
    def next(self) -> int:
        """The number of the step that comes next."""
        return self._begun or self._counts.get(self._rarest(), 0)

    def reaches(self, boundary: Boundary) -> int | None:
        """Return the step that runs once a boundary is reached; None outside of any."""
        if boundaries.are_told():
            self._number = None
        elif not boundary.is_end and not IN_STEPS.isdisjoint(boundary.names):
            self.only_generates &= UPDATE not in boundary.names
            self._begins(is_generation=GENERATION in boundary.names)
        return self._number

    def stepped(self, optimizer: object) -> int | None:
        """Return the step that runs once an optimizer has stepped; None outside of any."""
        self._has_learned = True
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        if not self._begun and optimizer == self._rarest():
            self._number = None
        return self._number

    def _begins(self, *, is_generation: bool) -> None:
        if is_generation and self._has_learned:
            self._number, self._begun, self._has_learned = self._begun, self._begun + 1, False
        elif not self._begun and self._number is None:
            self._number = self.next

    def _rarest(self) -> object:
        """Return the optimizer that has stepped least often; of several, the last one."""
        return min(reversed(self._counts), key=lambda one: self._counts[one], default=None)
