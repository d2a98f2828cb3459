"""The thread that gives steps to trackers, so that the program waits for none: some write files, some ask a server."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rltrace.host.interruption import own_failure
from rltrace.instrument.trackers.open_runs import OpenRun
from rltrace.instrument.trackers.others import Others
from rltrace.instrument.trackers.totals import OfStep
from rltrace.record.announcement import complain_once

MOST_STEPS = 256
"""How many steps wait for a tracker that is slow; more are dropped, the newest first."""
FINISH_SECONDS = 1.0
"""How long the end of the process waits for the steps that are not told yet."""
CLOSE_SECONDS = 0.2
"""How long the end of a tracker's run waits for them."""


class Step(NamedTuple):
    """A step, and whom it is told."""

    runs: Sequence[OpenRun]
    number: int
    totals: OfStep
    recording: Path | None = None
    """Where others may say more of it."""


class Handing:
    """Tells trackers what was put into its queue, in order. There is one in a process."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[Step | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._haste = threading.Event()
        """Set while somebody waits for what is queued."""
        self._others: Others | None = None
        self.last: Callable[[Any], Step | None] | None = None
        """Returns the step that goes on, if nothing more has to come of it; `Follower.last_step` is documented."""

    def put(self, step: Step) -> None:
        """Queue a step; drop it if too many wait. The first one starts the thread."""
        if self._steps.qsize() < MOST_STEPS:
            self._steps.put(step)
        else:
            complain_once("a tracker does not keep up with the steps, so that some of them are not in it")
        if self._thread is None:
            atexit.register(self.close)  # before what the tracker itself registered when its run was opened
            self._thread = threading.Thread(target=self._tell, name="rltrace trackers", daemon=True)
            self._thread.start()

    def closes(self, tracked: Any) -> None:
        """Tell a run that is about to be closed the step that goes on, and what is queued."""
        self._put_last(tracked)
        self.settle(CLOSE_SECONDS)

    def close(self) -> None:
        """Tell the runs that are open at the end of the process likewise. Never raises."""
        try:
            self._put_last(None)
            self.last = None  # they close themselves next
        except own_failure():
            pass
        self.finish()

    def _put_last(self, tracked: Any) -> None:
        if self.last is not None and (step := self.last(tracked)) is not None:
            self.put(step)

    def settle(self, seconds: float) -> None:
        """Wait until what is queued is told, but not long."""
        if self._thread is not None and threading.current_thread() is not self._thread:
            told = threading.Event()
            self._haste.set()
            self._steps.put(told)
            told.wait(seconds)
            self._haste.clear()

    def finish(self) -> None:
        """Wait for the steps that are queued, but not long. Never raises."""
        try:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._haste.set()
                self._steps.put(None)
                thread.join(FINISH_SECONDS)
        except own_failure():
            pass

    def forget(self) -> None:
        """Begin anew, in a forked child: the thread is its parent's."""
        self._steps, self._thread, self._others = queue.SimpleQueue(), None, None
        self._haste = threading.Event()

    def _tell(self) -> None:
        while (step := self._steps.get()) is not None:
            if isinstance(step, threading.Event):
                step.set()
                continue
            scalars = {**self._of_others(step), **step.totals.scalars()}
            for run in step.runs:
                try:
                    run.log(step.number, scalars)
                except Exception as error:  # the tracker's own: its run was finished, its server is gone
                    complain_once(f"{run.name} did not take a step: {type(error).__name__}: {error}")

    def _of_others(self, step: Step) -> Mapping[str, float]:
        """Return what other processes did in a step, as far as that is known."""
        try:
            if self._others is None and step.recording is not None:
                self._others = Others(step.recording)
            return {} if self._others is None else self._others.of(step.number, self._haste)
        except Exception as error:  # a line that is none
            complain_once(f"trackers are told of this process alone: {type(error).__name__}: {error}")
            return {}


HANDING = Handing()
