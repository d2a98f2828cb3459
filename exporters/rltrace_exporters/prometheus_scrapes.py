"""What `/metrics` of `rltrace view` answers: a Recording read once, or followed while its run goes on.

A scraper waits a few seconds only. So reading and judging happen in threads of their own, and a scrape that comes too
early is told to come again. Nothing is read before the first scrape.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from rltrace.analysis.figures import Figures, figures
from rltrace.analysis.metrics import Metrics
from rltrace.host.pace import Pace
from rltrace.limits import Limits
from rltrace.read.following import Follower
from rltrace.read.perfetto_ui import Refusal
from rltrace.read.recording import Process, Recording
from rltrace_exporters.prometheus import Families, answer, metrics_of

PATIENCE_SECONDS = 8.0
"""How long a scrape may take: Prometheus gives up after 10 s unless it is told otherwise."""
FIRST_FIGURES_SECONDS = 2.0
"""How long a scrape waits for the first findings; without them, a later one has them."""
FIGURES_SECONDS = 30.0
"""How old figures of a run that goes on are at least, before they are computed anew ..."""
FIGURES_SHARE = 0.05
"""... and the most of a processor that computing them may take."""

NOT_YET = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "The Recording is being read; ask again.")


class _Seen(NamedTuple):
    """What was read so far."""

    recording: Recording
    processes: Sequence[Process]
    metrics: Metrics
    is_live: bool


class Scrapes:
    """Answers scrapes of one Recording."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self._path, self._limits = path, limits
        self._reading, self._judging = _Task(self._read), _Task(self._judge)
        self._lock = threading.Lock()
        """Held while metrics are added, and while they are written out."""
        self._follower: Follower | None = None
        """What reads a run that goes on."""
        self._metrics = Metrics()
        """What it has read."""
        self._seen: _Seen | None = None
        self._figures: Figures | None = None
        self._are_final = False
        """Whether the figures are those of a run that is over."""
        self._pace = Pace(FIGURES_SHARE, least_seconds=FIGURES_SECONDS)

    def __call__(self, accept: str) -> tuple[str, bytes] | Refusal:
        """Return what a scrape is answered: its content type and its text."""
        until = time.monotonic() + PATIENCE_SECONDS
        self._reading.begin()
        self._judging.begin()
        is_read = self._reading.wait(until)
        if self._figures is None:  # a small Recording has its findings in the first scrape
            self._judging.wait(time.monotonic() + FIRST_FIGURES_SECONDS)
        if not is_read or not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
            return NOT_YET
        try:
            if self._seen is None:
                return Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, f"The Recording cannot be read: {self._reading.error}")
            recording, processes, metrics, is_live = self._seen
            families = Families(recording, processes, metrics, self._figures, is_live=is_live)
            return answer(families.registry(), accept)
        finally:
            self._lock.release()

    def _read(self) -> None:
        if self._seen is not None and not self._seen.is_live:
            return
        with self._lock:
            if self._follower is not None:
                self._follow(self._follower)
            if self._follower is None or self._follower.is_over:
                self._read_whole()

    def _read_whole(self) -> None:
        """Read a Recording that is whole, and begin to follow another one. One that was followed until its end is read
        once more: only then can steps be inferred that nobody marked."""
        recording = Recording.open(self._path, self._limits)
        is_over = recording.is_settled and recording.processes  # one without processes is beginning
        if is_over or self._follower is not None:
            self._seen = _Seen(recording, recording.processes, metrics_of(recording), is_live=False)
            self._follower = None
        else:
            self._follower = Follower(recording)
            self._follow(self._follower)

    def _follow(self, follower: Follower) -> None:
        """Add what was appended since the last scrape."""
        for news in follower.poll():
            self._metrics.add(news.process, news.columns)
        self._seen = _Seen(follower.recording, follower.processes, self._metrics, is_live=True)

    def _judge(self) -> None:
        if self._are_final or not self._pace.is_due:
            return
        began = time.monotonic()
        recording = Recording.open(self._path, self._limits)
        is_settled = recording.is_settled
        self._figures = figures(recording)
        self._are_final = is_settled
        self._pace.took(time.monotonic() - began)


class _Task:
    """Something that happens in a thread, one at a time."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.error: Exception | None = None
        """What kept the last one from its end."""

    def begin(self) -> None:
        """Begin it, unless it is under way."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="rltrace metrics", daemon=True)
                self._thread.start()

    def wait(self, until: float) -> bool:
        """Return whether it is over, at the latest when `time.monotonic` is `until`."""
        thread = self._thread
        if thread is not None:
            thread.join(max(0.0, until - time.monotonic()))
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
            self.error = None
        except Exception as error:  # the Recording was moved, its disk is gone: the next scrape tries again
            self.error = error
