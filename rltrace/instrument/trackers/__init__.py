"""Trackers: seconds and bytes of each step, in the run that the program itself has open in W&B, MLflow or TensorBoard.

In: the phases, samples and steps of this process, as they are recorded, and `RLTRACE_TRACKERS`, without which nothing
here is done. Steps that nobody marks are inferred, as far as that is possible while they go on. Out: scalars named
`rltrace/...`, per step. `totals.py` adds up a step, in memory. At its end they are queued, which is all that the
program waits for: a thread (`handing.py`) gives them to the runs that are open then (`open_runs.py`), and what a
tracker raises ends there. The thread adds what other processes did, as far as a process beside the run says so
(`others.py`).

To add a tracker, write a class like `WandbRun` in `open_runs.py`, and name its finder in `FINDERS` there.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from rltrace.events import OPTIMIZER_STEP, STEP
from rltrace.hooks import boundaries
from rltrace.hooks.boundaries import Boundary
from rltrace.hooks.hook import Hook
from rltrace.hooks.patching import PatchSet
from rltrace.host import clock
from rltrace.host.interruption import own_failure
from rltrace.instrument.torch.loop_steps import LoopSteps, optimizer_of
from rltrace.instrument.trackers.handing import HANDING, Step
from rltrace.instrument.trackers.open_runs import (
    EVENT_FILES,
    OpenRun,
    WandbRun,
    active_run_of_mlflow,
    find_runs,
    forget_file,
)
from rltrace.instrument.trackers.totals import OfStep, Totals
from rltrace.record import lifecycle, spans
from rltrace.record.allocation_steps import step_number
from rltrace.record.trackers import are_wanted


class Trackers:
    """Hands the totals of each step to the open runs."""

    name = "trackers"
    supports = ()

    def install(self, patches: PatchSet) -> None:
        """Watch steps, phases and samples; nothing is watched unless trackers are wanted."""
        if are_wanted(os.environ):
            patches.use("rltrace.record.spans:watch_spans", follow)
            patches.around("mlflow.tracking.fluent:end_run", active_run_closes, nothing)


class Tensorboard:
    """Finds the event files that the program writes for TensorBoard, as torch's `SummaryWriter` does."""

    name = "tensorboard"
    supports = ("tensorboard >= 2.10",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks; there is none unless trackers are wanted."""
        name_file_hooks(patches, "tensorboard.summary.writer.event_file_writer:EventFileWriter")


class TensorboardX:
    """Finds those that the program writes by tensorboardX."""

    name = "tensorboardx"
    supports = ("tensorboardX >= 2.5",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks; there is none unless trackers are wanted."""
        name_file_hooks(patches, "tensorboardX.event_file_writer:EventFileWriter")


def name_file_hooks(patches: PatchSet, writer: str) -> None:
    """Name the hooks on what writes an event file, if trackers are wanted."""
    if are_wanted(os.environ):
        patches.around(f"{writer}.__init__", first_argument, file_opened)
        patches.around(f"{writer}.close", file_closes, nothing)


class Wandb:
    """Lets W&B have the last steps before the program ends its run there."""

    name = "wandb"
    supports = ("wandb >= 0.16",)

    def install(self, patches: PatchSet) -> None:
        """Name the hook; there is none unless trackers are wanted."""
        if are_wanted(os.environ):
            patches.around("wandb.sdk.wandb_run:Run.finish", run_closes, nothing)


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a method is called on."""
    return args[0]


def file_opened(writer: Any, result: Any, error: BaseException | None) -> None:
    """Note an event file that was opened."""
    if error is None:
        EVENT_FILES.append(weakref.ref(writer))


def file_closes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write what is queued for an event file, before the program closes it."""
    HANDING.closes(args[0])
    forget_file(args[0])


def run_closes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell a run of W&B what is queued, before the program ends it."""
    HANDING.closes(args[0])
    WandbRun(args[0]).closes()


def active_run_closes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell MLflow's active run likewise."""
    if (run := active_run_of_mlflow()) is not None:
        HANDING.closes(run.tracked)


def nothing(token: Any, result: Any, error: BaseException | None) -> None:
    """Do nothing."""


def follow(hook: Hook) -> Callable[[], None]:
    """Follow the steps of this process from here on; return what undoes it."""
    follower = Follower(hook)
    undos = (
        spans.watch_spans(STEP, follower.step_begins, follower.step_ended),
        spans.watch_phase_ends(follower.totals.add_phase),
        spans.watch_samples(follower.totals.add_sample),
        spans.watch_spans(OPTIMIZER_STEP, optimizer_of, follower.optimizer_stepped),
        boundaries.watch(follower.boundary),
        lifecycle.when_stopped(HANDING.finish),
    )
    HANDING.last = follower.last_step
    os.register_at_fork(after_in_child=follower.forget)

    def undo() -> None:
        HANDING.last = None
        for take_back in undos:
            take_back()

    return undo


class Follower:
    """Adds up each step of this process, and hands it over at its end."""

    def __init__(self, hook: Hook) -> None:
        self.totals = Totals()
        self._hook = hook
        self._steps = 0
        self._loop = LoopSteps()
        self._inferred: tuple[int, int] | None = None
        """The step that goes on if nobody marks any, and when it began."""
        self._learned_ns = 0
        """When an optimizer has last stepped in it."""

    def step_begins(self, args: dict[str, Any]) -> tuple[int | None, int] | None:
        """Return the number of a step that begins, and when it did. Never raises."""
        try:
            number = step_number(args, self._steps)
            self._steps += 1
            self.totals.begin()
            return number, clock.now_ns()
        except own_failure() as error:
            self._hook.failed(error)
            return None

    def step_ended(self, begun: tuple[int | None, int] | None) -> None:
        """Hand a step over to the runs that are open. Never raises, and never waits."""
        try:
            if begun is None or not self._hook.live:
                return
            number, start_ns = begun
            if number is not None and (runs := find_runs()):
                HANDING.put(self._step(runs, number, self.totals.end(clock.now_ns() - start_ns)))
        except own_failure() as error:
            self._hook.failed(error)

    def _step(self, runs: Sequence[OpenRun], number: int, totals: OfStep) -> Step:
        self._hook.row.fired()
        recorder = spans.current()
        return Step(runs, number, totals, None if recorder is None else recorder.recording)

    def last_step(self, tracked: Any) -> Step | None:
        """Return the step that goes on in a loop that marks none, if no other needs to follow: it has learned.

        Args:
            tracked: What is closed, so that its run is told; None if all are that are open.
        """
        if self._inferred is None or self._steps or not self._loop.is_complete or not self._hook.live:
            return None
        number, start_ns = self._inferred
        runs = [run for run in find_runs() if tracked is None or run.tracked == tracked]
        return self._step(runs, number, self.totals.so_far(self._learned_ns - start_ns)) if runs else None

    def boundary(self, boundary: Boundary) -> None:
        """Begin the next step of a loop that marks none, if this is where it begins. Never raises."""
        try:
            if not self._steps:
                self._infer(self._loop.reaches(boundary))
        except own_failure() as error:
            self._hook.failed(error)

    def optimizer_stepped(self, number: Any) -> None:
        """End a step that nobody marks, if this was the last of its optimizers. Never raises."""
        try:
            if not self._steps:
                self._learned_ns = clock.now_ns()
                self._infer(self._loop.stepped(number))
        except own_failure() as error:
            self._hook.failed(error)

    def _infer(self, number: int | None) -> None:
        """Let a step go on from here that nobody marks, and hand over the one before it."""
        before = self._inferred
        if number == (None if before is None else before[0]):
            return
        self.step_ended(before)
        self.totals.begin()
        self._inferred = None if number is None else (number, clock.now_ns())

    def forget(self) -> None:
        """Forget the step and the thread of the parent, in a forked child."""
        self.totals.begin()
        self._inferred = None
        HANDING.forget()


__all__ = ["Tensorboard", "Trackers", "Wandb"]
