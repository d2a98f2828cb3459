"""Every allocation of the steps that `RLTRACE_ALLOCATIONS` names, in every process that uses a GPU.

A process with `step` spans of its own keeps them from just before that span until just after it. Any other, a worker or
an engine, looks at each edge of its phases whether such a step runs, as `allocation_steps.py` says: it begins at its
first edge inside the step and writes at its first one after it, or when it ends. A vLLM worker looks whenever it
executes its model besides (`instrument/vllm/allocations.py`). What came and went before that first edge is not there;
what was allocated before and is still there is. If the allocator's own counts say that nothing came or went since the
edge before, as in a worker that waits while others generate, what is there is known from that edge on. Without the
variable there is no hook.
"""

from __future__ import annotations

import functools
import operator
import os
import threading
from collections.abc import Callable
from typing import Any

from rltrace.events import ALLOCATIONS_KEPT, NO_GPU, STEP, allocations_of
from rltrace.hooks import boundaries
from rltrace.hooks.patching import Hook, PatchSet
from rltrace.host.gpu_use import has_used_gpu
from rltrace.record import allocation_steps, lifecycle, spans
from rltrace.record.allocation_steps import RunningSteps
from rltrace.record.interruption import own_failure
from rltrace.record.torch import allocations

PAUSED = "recording was paused when it ended"
NO_EDGE = "no phase of this process began or ended in it"


class ChosenAllocations:
    """Keeps the chosen steps, where there are any."""

    name = "chosen_allocations"
    supports = ()

    def install(self, patches: PatchSet) -> None:
        """Watch steps, phases and edges; without a chosen step nothing is.

        Raises:
            ValueError: `RLTRACE_ALLOCATIONS` names no steps.
        """
        if steps := allocation_steps.parse(os.environ.get(allocation_steps.VARIABLE, "")):
            patches.use("rltrace.hooks.boundaries:watch", functools.partial(follow, steps), (ALLOCATIONS_KEPT,))


FOLLOWERS: list[Follower] = []
"""Of this process: one, where steps are chosen."""


def look() -> None:
    """What is an edge for chosen steps alone; never raises and never waits."""
    for follower in FOLLOWERS:
        follower.edge()


def follow(steps: frozenset[int], hook: Hook) -> Callable[[], None]:
    """Keep these steps in this process from here on; returns what undoes it."""
    follower = Follower(steps, hook)
    FOLLOWERS.append(follower)
    lifecycle.identify(chosen_steps=sorted(steps))
    undos = (
        boundaries.watch(follower.edge, is_last=True),
        spans.watch_spans(STEP, follower.step_begins, follower.step_ended),
        lifecycle.when_stopped(follower.process_ends),
    )
    os.register_at_fork(after_in_child=follower.forget)

    def undo() -> None:
        FOLLOWERS.remove(follower)
        for take_back in undos:
            take_back()

    return undo


class Follower:
    """What this process has to do with the chosen steps."""

    def __init__(self, steps: frozenset[int], hook: Hook) -> None:
        self._steps = steps
        self._hook = hook
        self.forget()

    def forget(self) -> None:
        """Begin anew: in a forked child, what its parent keeps is not its own."""
        self._lock = threading.RLock()
        """A signal handler may mark a phase in the middle of all this."""
        self._left = set(self._steps)
        """Steps that this process has not been through."""
        self._said: set[int] = set()
        """Steps that are its own, and that it has told the others of."""
        self._own: list[int] = []
        """Those of them that are open."""
        self._steps_begun = 0
        self._running: RunningSteps | None = None
        self._step: int | None = None
        """The chosen step in which this process is, as far as it knows."""
        self._reason: str | None = None
        """Why its allocations are not kept, in that step."""
        self._last: allocations.Stillness | None = None
        """Of its last edge outside of such a step."""

    # -- told by hooks

    def edge(self, edge: boundaries.Edge | None = None) -> None:
        """A phase begins or ends, or without an edge a vLLM worker executes its model; never raises and never waits."""
        is_done = self._step is None and (self._steps_begun or not self._left)
        if is_done or not self._hook.live or not self._lock.acquire(blocking=False):
            return
        try:
            self._look()
            if edge is not None and self._step is None:
                self._last = allocations.stillness()
        except own_failure() as error:
            self._hook.failed(error)
        finally:
            self._lock.release()

    def step_begins(self, args: dict[str, Any]) -> int | None:
        """A step of this process begins; returns its number if it is a chosen one. Never raises."""
        try:
            with self._lock:
                number = step_number(args, self._steps_begun)
                if not self._steps_begun:
                    self._leave_to_others()
                self._steps_begun += 1
                return self._begin_own(number) if number in self._steps and self._hook.live else None
        except own_failure() as error:
            self._hook.failed(error)
            return None

    def step_ended(self, step: int | None) -> None:
        """It is over, well or not; never raises."""
        if step is None:
            return
        try:
            with self._lock:
                self._end_own(step)
        except own_failure() as error:
            self._hook.failed(error)

    def process_ends(self) -> None:
        """Write what is kept, and say what could not be; never raises."""
        try:
            with self._lock:
                for step in list(self._own):
                    self._end_own(step)
                self._leave()
                for step in sorted(self._left & self._met()) if has_used_gpu() and not self._steps_begun else ():
                    lifecycle.unavailable(allocations_of(step), NO_EDGE)
        except own_failure() as error:
            self._hook.failed(error)

    # -- steps of this process

    def _leave_to_others(self) -> None:
        """This process goes by steps of its own from here on: what it has kept of another's is none of them."""
        if self._step is not None and self._reason is None:
            allocations.abandon()
        self._step = None

    def _begin_own(self, step: int) -> int | None:
        if step in self._said:
            return None
        self._said.add(step)
        self._own.append(step)
        self._say(step, is_over=False)
        if self._step is None and step in self._left:
            self._enter(step)
        return step

    def _end_own(self, step: int) -> None:
        if step not in self._own:
            return
        self._own.remove(step)
        self._say(step, is_over=True)  # first: to write takes seconds, in which others would take the next step for it
        if step == self._step:
            self._leave()

    def _say(self, step: int, *, is_over: bool) -> None:
        if (current := spans.current()) is not None:
            allocation_steps.say(current.recording, step, current.key, is_over=is_over)

    # -- steps of others

    def _look(self) -> None:
        if self._steps_begun:
            self._keep()
            return
        running = self._now()
        if self._step not in running:
            self._leave()
        if self._step is None:
            step = next((step for step in running if step in self._left), None)
            if step is not None:
                self._enter(step)
        else:
            self._keep()

    def _now(self) -> list[int]:
        if self._running is None:
            current = spans.current()
            if current is None:
                return []
            self._running = RunningSteps(current.recording)
        return self._running.now()

    def _met(self) -> set[int]:
        self._now()
        return set() if self._running is None else self._running.met

    # -- keeping

    def _enter(self, step: int) -> None:
        self._step, self._reason = step, NO_GPU
        self._keep()

    def _keep(self) -> None:
        """Begin, unless that was tried; CUDA may come up in the middle of a step."""
        if self._step is None or self._reason != NO_GPU or not has_used_gpu():
            return
        self._reason = "the program keeps its own" if allocations.is_kept() else allocations.begin(self._last)
        if self._reason is None:
            self._hook.row.fired()
            if (current := spans.current()) is not None:
                current.append("allocations", step=self._step)

    def _leave(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        self._left.discard(step)
        reason = self._write(step) if self._reason is None else self._reason
        if reason is not None:
            lifecycle.unavailable(allocations_of(step), reason)

    def _write(self, step: int) -> str | None:
        if spans.is_recording():
            return allocations.end(step=step)
        allocations.abandon()
        return PAUSED


def step_number(args: dict[str, Any], place: int) -> int | None:
    """Of a step's span; one without a number has its place, as in `summary`."""
    try:
        return operator.index(args["step"]) if "step" in args else place
    except own_failure(TypeError):
        return None
