"""Records in full only the steps and ranks that somebody asked for; of all others, what figures of a step begin with.

What stays is in `ALWAYS`: steps, phases, memory at their boundaries, and errors. Only the process that runs the
training loop knows the number of a step. It says in a small file of the Recording when a chosen one begins and ends.
Any other process looks at the size of that file whenever one of its phases begins: so it records in full from its first
phase in the step to its first one behind it.

Nothing of this is in the way of a process that records everything.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from rltrace.events import (
    ALLOCATIONS_KEPT,
    ALLOCATIONS_WRITTEN,
    BRIEF,
    KERNELS_KEPT,
    KERNELS_WRITTEN,
    MEMORY_EDGE,
    MEMORY_MOVES,
    OUT_OF_MEMORY,
    PHASES,
    STEP,
)
from rltrace.host.interruption import own_failure
from rltrace.record import allocation_steps, spans
from rltrace.record.allocation_steps import RunningSteps, step_number
from rltrace.record.announcement import complain_once
from rltrace.record.lock import InterruptibleLock
from rltrace.record.step_numbers import Numbers, numbers
from rltrace.record.writer import Recorder

STEPS_VARIABLE, RANKS_VARIABLE = "RLTRACE_RECORD_STEPS", "RLTRACE_RECORD_RANKS"
"""Environment variables: `100-110,every:50` and `0,8-15`."""

ALWAYS = frozenset({STEP, *PHASES, *MEMORY_MOVES, MEMORY_EDGE, OUT_OF_MEMORY, ALLOCATIONS_KEPT, ALLOCATIONS_WRITTEN,
                    KERNELS_KEPT, KERNELS_WRITTEN})  # fmt: skip
"""Names of spans that are recorded in any step."""


def _chosen(variable: str, *, has_periods: bool) -> Numbers | None:
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    try:
        return numbers(text, has_periods=has_periods)
    except ValueError as error:
        complain_once(f"{variable} is ignored: {error}")
        return None


class Follower:
    """Finds out whether this process is in a step that is recorded in full."""

    def __init__(self, recorder: Recorder, steps: Numbers | None, ranks: Numbers | None) -> None:
        self._recorder = recorder
        self._steps, self._ranks = steps, ranks
        self._lock = InterruptibleLock()
        """It is re-entrant, because a signal handler may mark a phase while it is held."""
        self._begun = 0
        """How many steps of its own this process has begun: from then on it goes by them."""
        self._running = RunningSteps(recorder.recording)

    def look(self) -> None:
        """Ask, where a phase begins, whether a chosen step runs. Never raises, and never waits."""
        if self._begun:
            return
        try:
            self._lock.run_if_free(self._look)
        except own_failure():
            self._recorder.lose()

    def _look(self) -> None:
        are_chosen = self._steps is None or any(self._steps.has(step) for step in self._running.now())
        self._record(in_full=are_chosen)

    def step_begins(self, args: dict[str, Any]) -> int | None:
        """Begin a step of this process; return its number if others are told of it. Never raises."""
        try:
            return self._lock.run(self._begin_step, args)
        except own_failure():
            self._recorder.lose()
            return None

    def _begin_step(self, args: dict[str, Any]) -> int | None:
        number = step_number(args, self._begun)
        self._begun += 1
        is_chosen = self._steps is None or self._steps.has(number)
        if not is_chosen:
            args[BRIEF] = True
        self._record(in_full=is_chosen)
        if number is None or not is_chosen or self._steps is None:
            return None
        allocation_steps.say(self._recorder.recording, number, self._recorder.key, is_over=False)
        return number

    def step_ended(self, number: int | None) -> None:
        """Say that a step is over. Never raises."""
        try:
            if number is not None:
                allocation_steps.say(self._recorder.recording, number, self._recorder.key, is_over=True)
        except own_failure():
            self._recorder.lose()

    def _record(self, *, in_full: bool) -> None:
        rank = self._recorder.who.get("rank")
        is_rank_chosen = self._ranks is None or rank is None or self._ranks.has(rank)
        spans.be_brief(None if in_full and is_rank_chosen else ALWAYS)


def follow(recorder: Recorder) -> None:
    """Record in full only what the environment asks for, from here on; all, if it asks for nothing."""
    steps = _chosen(STEPS_VARIABLE, has_periods=True)
    ranks = _chosen(RANKS_VARIABLE, has_periods=False)
    if steps is None and ranks is None:
        return
    follower = Follower(recorder, steps, ranks)
    spans.watch_phases(follower.look)
    _undos.append(spans.watch_spans(STEP, follower.step_begins, follower.step_ended))
    follower.look()


_undos: list[Callable[[], None]] = []


def forget() -> None:
    """Record everything again."""
    while _undos:
        _undos.pop()()
    spans.watch_phases(None)
    spans.be_brief(None)
