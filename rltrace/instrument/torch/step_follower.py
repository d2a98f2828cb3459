"""Finds out in which of the chosen steps this process is, and has something kept of each.

A process with `step` spans of its own goes by these, from just before such a span until just after it. One whose loop
marks no steps goes by those that are inferred of it (`loop_steps.py`), unless somebody in the run marks steps: from its
first optimizer step on by those alone, because another rank may be a step ahead. Any other process, a worker or an
engine, looks at each phase boundary whether such a step runs, as `allocation_steps.py` says. It begins at its first
boundary inside the step, and writes at its first one after the step, or when it ends. An engine's worker also looks
whenever it executes its model (`look`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rltrace.events import OPTIMIZER_STEP, STEP
from rltrace.hooks import boundaries
from rltrace.hooks.hook import Hook
from rltrace.host.interruption import own_failure
from rltrace.instrument.torch.kept_step import Event, Keeper, KeptStep
from rltrace.instrument.torch.loop_steps import LoopSteps, optimizer_of
from rltrace.record import allocation_steps, lifecycle, spans
from rltrace.record.allocation_steps import RunningSteps, step_number
from rltrace.record.lock import InterruptibleLock

NO_BOUNDARY = "no phase of this process began or ended in it"


FOLLOWERS: list[Follower] = []
"""The followers of this process: one for each kind of thing of which steps are chosen."""


def look() -> None:
    """Look whether a chosen step runs, at a place that is no phase boundary. Never raises, and never waits."""
    for follower in FOLLOWERS:
        follower.boundary()


def follow(steps: frozenset[int], keeper: Keeper, hook: Hook) -> Callable[[], None]:
    """Keep these steps in this process from here on; return what undoes it."""
    follower = Follower(steps, keeper, hook)
    FOLLOWERS.append(follower)
    undos = (
        boundaries.watch(follower.boundary, is_last=True),
        spans.watch_spans(STEP, follower.step_begins, follower.step_ended),
        spans.watch_spans(OPTIMIZER_STEP, optimizer_of, follower.optimizer_stepped),
        lifecycle.when_stopped(follower.process_ends),
    )
    os.register_at_fork(after_in_child=follower.forget)

    def undo() -> None:
        FOLLOWERS.remove(follower)
        for take_back in undos:
            take_back()

    return undo


@dataclass
class OwnSteps:
    """The steps that this process marks itself."""

    begun: int = 0
    """How many steps have begun, chosen or not."""
    inferred: int | None = None
    """The step that runs if nobody marks any."""
    told: set[int] = field(default_factory=set)
    """The chosen steps that other processes were told about."""
    open: list[int] = field(default_factory=list)
    """The chosen steps that have begun and not ended."""


class Follower:
    """Finds out in which of the chosen steps this process is."""

    def __init__(self, steps: frozenset[int], keeper: Keeper, hook: Hook) -> None:
        self._steps = steps
        self._keeper = keeper
        self._hook = hook
        self.forget()

    def forget(self) -> None:
        """Begin anew: in a forked child, what its parent keeps is not its own."""
        self._lock = InterruptibleLock()
        """It is re-entrant, because a signal handler may mark a phase while it is held."""
        self._left = set(self._steps)
        """The chosen steps that this process has not finished."""
        self._own = OwnSteps()
        self._running: RunningSteps | None = None
        """The steps of other processes; None until somebody asks."""
        self._loop = LoopSteps()
        self._kept = KeptStep(self._hook, self._keeper)

    # -- told by hooks

    def boundary(self, boundary: boundaries.Boundary | None = None) -> None:
        """Look whether a chosen step runs; this never raises, and never waits.

        Args:
            boundary: The phase boundary that was reached; None where a vLLM worker executes its model.
        """
        is_done = self._kept.step is None and (self._own.begun or not self._left)
        if is_done or not self._hook.live:
            return
        try:
            self._lock.run_if_free(self._reach, boundary)
        except own_failure() as error:
            self._hook.failed(error)

    def _reach(self, boundary: boundaries.Boundary | None) -> None:
        if boundary is not None:
            self._infer(self._loop.reaches(boundary))
        self._look()
        if boundary is not None and self._kept.step is None:
            self._keeper.outside()

    def step_begins(self, args: dict[str, Any]) -> int | None:
        """Begin a step of this process, and return its number if the step is chosen. Never raises."""
        try:
            return self._lock.run(self._begin_step, args)
        except own_failure() as error:
            self._hook.failed(error)
            return None

    def _begin_step(self, args: dict[str, Any]) -> int | None:
        number = step_number(args, self._own.begun)
        if not self._own.begun:  # it goes by its own steps from here on
            self._kept.on(Event.DISOWN)
            self._infer(None)
            self._say_marked()
        self._own.begun += 1
        return self._begin_own(number) if number in self._steps and self._hook.live else None

    def step_ended(self, step: int | None) -> None:
        """End a step of this process, whether it went well or not. Never raises."""
        if step is None:
            return
        try:
            self._lock.run(self._end_own, step)
        except own_failure() as error:
            self._hook.failed(error)

    def optimizer_stepped(self, number: Any) -> None:
        """End a step that nobody marks, if this was the last of its optimizers. Never raises."""
        try:
            self._lock.run(self._learn, number)
        except own_failure() as error:
            self._hook.failed(error)

    def process_ends(self) -> None:
        """Write what is kept, and say what could not be kept. Never raises."""
        try:
            self._lock.run(self._end_all)
        except own_failure() as error:
            self._hook.failed(error)

    def _end_all(self) -> None:
        for step in list(self._own.open):
            self._end_own(step)
        self._leave()
        missed = self._left & self._met() if self._keeper.lacks() is None and not self._own.begun else set()
        for step in sorted(missed):
            lifecycle.unavailable(self._keeper.of(step), NO_BOUNDARY)

    # -- steps of this process

    def _begin_own(self, step: int) -> int | None:
        if step in self._own.told:
            return None
        self._own.told.add(step)
        self._own.open.append(step)
        self._tell(step, is_over=False)
        if self._kept.step is None and step in self._left:
            self._kept.enter(step)
        return step

    def _end_own(self, step: int) -> None:
        if step not in self._own.open:
            return
        self._own.open.remove(step)
        # First, because writing takes seconds, in which other processes would take the next step for this one.
        self._tell(step, is_over=True)
        if step == self._kept.step:
            self._leave()

    def _tell(self, step: int, *, is_over: bool) -> None:
        if (current := spans.current()) is not None:
            allocation_steps.say(current.recording, step, current.key, is_over=is_over)

    def _say_marked(self) -> None:
        if (current := spans.current()) is not None:
            allocation_steps.say_marked(current.recording, current.key)

    # -- steps that nobody marks

    def _learn(self, optimizer: Any) -> None:
        number = self._loop.stepped(optimizer)
        if self._kept.step not in self._own.open and self._goes_by_loop():
            self._kept.on(Event.DISOWN)
        self._infer(number)

    def _goes_by_loop(self) -> bool:
        """Return whether this process trains in steps that nobody marks, so that steps of others are not its own."""
        return self._loop.are_known and not self._are_marked()

    def _infer(self, number: int | None) -> None:
        """Begin the step that runs, as far as anybody can tell, and end the one before it."""
        before = self._own.inferred
        if number == before or (number is not None and (self._own.begun or self._are_marked())):
            return
        self._own.inferred = number
        if before is not None:
            self._end_own(before)
        if number in self._steps:
            self._begin_own(number)

    def _are_marked(self) -> bool:
        running = self._of_others()
        return running is not None and running.marked()

    # -- steps of others

    def _look(self) -> None:
        if not self._own.begun and not self._own.open and not self._goes_by_loop():
            running = self._now()
            if self._kept.step not in running:
                self._leave()
            if self._kept.step is None:
                step = next((step for step in running if step in self._left), None)
                if step is not None:
                    self._kept.enter(step)
                return
        self._kept.on(Event.LOOK)

    def _of_others(self) -> RunningSteps | None:
        """Return the steps of other processes; None if this one is not recorded."""
        if self._running is None and (current := spans.current()) is not None:
            self._running = RunningSteps(current.recording)
        return self._running

    def _now(self) -> list[int]:
        running = self._of_others()
        return [] if running is None else running.now()

    def _met(self) -> set[int]:
        self._now()
        return set() if self._running is None else self._running.met

    def _leave(self) -> None:
        if (step := self._kept.step) is not None:
            self._left.discard(step)
            self._kept.on(Event.LEAVE)
