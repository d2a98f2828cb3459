"""Records in full only the steps and ranks that somebody asked for; of all others, what figures of a step begin with.

What stays is in `ALWAYS`: steps, phases, memory at their boundaries, and errors. Only the process that runs the
training loop knows the number of a step. It says in a small file of the Recording when a chosen one begins and ends.
Any other process looks at the size of that file whenever one of its phases begins: so it records in full from its first
phase in the step to its first one behind it.

While nobody in the run marks steps, what they are inferred from stays too, and a hook tells which one runs (`infer`).

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
    DETAIL,
    INFERRED_FROM,
    KERNELS_KEPT,
    KERNELS_WRITTEN,
    MEMORY_EDGE,
    MEMORY_MOVES,
    OUT_OF_MEMORY,
    PHASES,
    STEP,
)
from rltrace.host import clock
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
                    KERNELS_KEPT, KERNELS_WRITTEN, DETAIL})  # fmt: skip
"""Names of spans that are recorded in any step."""
ALWAYS_UNMARKED = ALWAYS | INFERRED_FROM
"""The same while nobody marks steps."""


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
        self._inferred: int | None = None
        """The step that runs in this process, or comes next, if nobody marks any."""
        self._infers = False
        """Whether a hook has told of such a step."""
        self._goes_by_loop = False
        """Whether this process trains in steps that nobody marks, so that steps of others are not its own."""
        self._only_generates = True
        self._said: set[tuple[int, bool]] = set()
        """The inferred steps that others were told of, and whether they are over."""
        self._detail: bool | None = None
        """What was last written of whether everything is recorded; None if nothing was, for no step was inferred."""
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
        self._record(in_full=self._steps is None or self._is_in_one_of(self._steps))

    def _is_in_one_of(self, steps: Numbers) -> bool:
        of_others = self._running.now()
        if self._goes_by_loop:
            return steps.has(self._inferred)
        # A process that only generates never learns that its step is over: it is when another one has ended it.
        is_over = self._only_generates and self._inferred in self._running.ended
        return (steps.has(self._inferred) and not is_over) or any(map(steps.has, of_others))

    def infer(self, number: int | None, *, is_sure: bool, only_generates: bool) -> None:
        """Go by a step that nobody marks, unless somebody in the run marks steps. Never raises.

        Args:
            number: The step that runs, or comes next; None outside of any.
            is_sure: Whether this process trains, so that it goes by no other's steps.
            only_generates: Whether it has begun no update yet.
        """
        try:
            self._lock.run(self._infer, number, is_sure, only_generates)
        except own_failure():
            self._recorder.lose()

    def _infer(self, number: int | None, is_sure: bool, only_generates: bool) -> None:
        if self._begun:
            return
        if self._running.marked():
            number, is_sure = None, False
        before, self._inferred = self._inferred, number
        self._goes_by_loop, self._only_generates = is_sure, only_generates
        if number != before:
            self._say_inferred(before, is_over=True)
            # One that may only generate never says when its step is over: it is another's, if that has begun it.
            if not (only_generates and number in self._running.met):
                self._say_inferred(number, is_over=False)
        self._infers |= number is not None
        self._look()

    def _say_inferred(self, number: int | None, *, is_over: bool) -> None:
        """Tell other processes of a step, once."""
        if number is None or self._steps is None or not self._steps.has(number) or (number, is_over) in self._said:
            return
        self._said.add((number, is_over))
        allocation_steps.say(self._recorder.recording, number, self._recorder.key, is_over=is_over)

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
        if self._begun == 1:
            self._say_inferred(self._inferred, is_over=True)
            allocation_steps.say_marked(self._recorder.recording, self._recorder.key)
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
        if in_full and is_rank_chosen:
            spans.be_brief(None)
        else:
            spans.be_brief(ALWAYS if self._begun or self._running.are_marked else ALWAYS_UNMARKED)
        if self._infers and in_full != self._detail:
            self._detail, now_ns = in_full, clock.now_ns()
            spans.automatic_span_at(DETAIL, now_ns, now_ns, full=in_full)


def follow(recorder: Recorder) -> None:
    """Record in full only what the environment asks for, from here on; all, if it asks for nothing."""
    steps = _chosen(STEPS_VARIABLE, has_periods=True)
    ranks = _chosen(RANKS_VARIABLE, has_periods=False)
    if steps is None and ranks is None:
        return
    follower = Follower(recorder, steps, ranks)
    _followers.append(follower)
    spans.watch_phases(follower.look)
    _undos.append(spans.watch_spans(STEP, follower.step_begins, follower.step_ended))
    follower.look()


def are_asked_for() -> bool:
    """Return whether the environment asks for some steps only."""
    return bool(os.environ.get(STEPS_VARIABLE, "").strip())


def infer(number: int | None, *, is_sure: bool, only_generates: bool) -> None:
    """Go by a step of this process that nobody marks; see `Follower.infer`. Never raises."""
    for follower in _followers:
        follower.infer(number, is_sure=is_sure, only_generates=only_generates)


_followers: list[Follower] = []
"""The one of this process, while it does not record everything."""
_undos: list[Callable[[], None]] = []


def forget() -> None:
    """Record everything again."""
    _followers.clear()
    while _undos:
        _undos.pop()()
    spans.watch_phases(None)
    spans.be_brief(None)
