"""The thread that gives steps to trackers, so that the program waits for none: some write files, some ask a server."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rltrace.host.interruption import own_failure
from rltrace.instrument.trackers.open_runs import OpenRun
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
    scalars: Mapping[str, float]


class Handing:
    """Tells trackers what was put into its queue, in order. There is one in a process."""

    def __init__(self) -> None:
        self._steps: queue.Queue[Step | threading.Event | None] = queue.Queue(MOST_STEPS)
        self._thread: threading.Thread | None = None

    def put(self, runs: Sequence[OpenRun], number: int, scalars: Mapping[str, float]) -> None:
        """Queue a step; drop it if too many wait. The first one starts the thread."""
        try:
            self._steps.put_nowait(Step(runs, number, scalars))
        except queue.Full:
            complain_once("a tracker does not keep up with the steps, so that some of them are not in it")
        if self._thread is None:
            atexit.register(self.finish)  # before what the tracker itself registered when its run was opened
            self._thread = threading.Thread(target=self._tell, name="rltrace trackers", daemon=True)
            self._thread.start()

    def settle(self) -> None:
        """Wait until what is queued is told, but not long: a run is about to be closed."""
        if self._thread is not None and threading.current_thread() is not self._thread:
            told = threading.Event()
            self._steps.put_nowait(told)
            told.wait(CLOSE_SECONDS)

    def finish(self) -> None:
        """Wait for the steps that are queued, but not long. Never raises."""
        try:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._steps.put(None, timeout=FINISH_SECONDS)
                thread.join(FINISH_SECONDS)
        except own_failure():
            pass

    def forget(self) -> None:
        """Begin anew, in a forked child: the thread is its parent's."""
        self._steps, self._thread = queue.Queue(MOST_STEPS), None

    def _tell(self) -> None:
        while (step := self._steps.get()) is not None:
            if isinstance(step, threading.Event):
                step.set()
                continue
            for run in step.runs:
                try:
                    run.log(step.number, step.scalars)
                except Exception as error:  # the tracker's own: its run was finished, its server is gone
                    complain_once(f"{run.name} did not take a step: {type(error).__name__}: {error}")


HANDING = Handing()
