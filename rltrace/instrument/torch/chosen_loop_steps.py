"""Tells which step of a loop runs that marks none, where only some steps are recorded in full (`--record-steps`).

Between two steps that end with an optimizer's step, the next one counts as begun: what prepares it is a part of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from rltrace.events import DETAIL, OPTIMIZER_STEP
from rltrace.hooks import boundaries
from rltrace.hooks.boundaries import Boundary
from rltrace.hooks.hook import Hook
from rltrace.hooks.patching import PatchSet
from rltrace.host.interruption import own_failure
from rltrace.instrument.torch.loop_steps import LoopSteps, optimizer_of
from rltrace.record import chosen_steps, spans


class ChosenLoopSteps:
    """Follows the steps of a loop that marks none, if some are chosen."""

    name = "chosen_loop_steps"
    supports = ("torch >= 2.6",)

    def install(self, patches: PatchSet) -> None:
        """Watch phase boundaries and optimizers; where everything is recorded, nothing is watched."""
        if chosen_steps.are_asked_for():
            patches.use("rltrace.hooks.boundaries:watch", follow, (DETAIL,))


def follow(hook: Hook) -> Callable[[], None]:
    """Follow the steps of this process from here on; return what undoes it."""
    follower = Follower(hook)
    undos = (
        boundaries.watch(follower.boundary, is_last=True),
        spans.watch_spans(OPTIMIZER_STEP, optimizer_of, follower.optimizer_stepped),
    )
    os.register_at_fork(after_in_child=follower.forget)

    def undo() -> None:
        for take_back in undos:
            take_back()

    return undo


class Follower:
    """Tells of the steps of this process."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self.forget()

    def forget(self) -> None:
        """Begin anew, in a forked child."""
        self._loop = LoopSteps()

    def boundary(self, boundary: Boundary) -> None:
        """Tell of the step that runs once a boundary is reached. Never raises."""
        try:
            self._tell(self._loop.reaches(boundary))
        except own_failure() as error:
            self._hook.failed(error)

    def optimizer_stepped(self, number: Any) -> None:
        """Tell of the step that runs once an optimizer has stepped. Never raises."""
        try:
            self._tell(self._loop.stepped(number))
        except own_failure() as error:
            self._hook.failed(error)

    def _tell(self, running: int | None) -> None:
        if self._hook.live:
            self._hook.row.fired()
            is_known = self._loop.are_known
            number = self._loop.next if running is None and is_known else running
            chosen_steps.infer(number, is_sure=is_known, only_generates=self._loop.only_generates)
