"""Sends what is handed over, in a thread of its own, again and again until the collector takes it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.trace import ReadableSpan

from rltrace_exporters.otlp.collector import BATCH_SPANS, Collector
from rltrace_exporters.otlp.metrics import points_in

MOST_WAITING = 20_000
"""How many spans and data points wait to be sent before nothing more is read: the Recording keeps them."""

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 30.0
"""How long it waits after a request that failed; twice as long after each further one."""


def wait_seconds(failures: int) -> float:
    """Return how long to wait after so many requests that failed in a row; a collector may be away for days."""
    doublings = min(failures - 1, 16)
    return min(FIRST_WAIT_SECONDS * 2.0**doublings, LONGEST_WAIT_SECONDS)


class _Batch(NamedTuple):
    content: Sequence[ReadableSpan] | MetricsData
    spans: int
    points: int


class Sender:
    """A queue in front of a collector, and the thread that empties it."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._waiting: deque[_Batch] = deque()
        self._some = threading.Condition()
        self._is_over = self._is_given_up = False
        self._hurry = threading.Event()
        self.sent_spans = 0
        """How many spans the collector took."""
        self.failures = 0
        """How many requests failed in a row."""
        self._thread = threading.Thread(target=self._send_all, name="rltrace-otlp", daemon=True)
        self._thread.start()

    @property
    def waiting_spans(self) -> int:
        """How many spans wait, those among them that are being sent."""
        with self._some:
            return sum(batch.spans for batch in self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        with self._some:
            return not self._waiting

    @property
    def is_full(self) -> bool:
        """Whether so much waits that nothing more should be read."""
        with self._some:
            return sum(batch.spans + batch.points for batch in self._waiting) >= MOST_WAITING

    def add_spans(self, spans: Sequence[ReadableSpan]) -> None:
        """Put spans behind those that wait."""
        for begin in range(0, len(spans), BATCH_SPANS):
            few = spans[begin : begin + BATCH_SPANS]
            self._add(_Batch(few, len(few), 0))

    def add_metrics(self, metrics: MetricsData) -> None:
        """Put metrics behind what waits."""
        self._add(_Batch(metrics, 0, points_in(metrics)))

    def finish(self, limit_s: float) -> None:
        """Wait until everything is sent, at most so long; what waits then is given up."""
        self._hurry.set()
        until = time.monotonic() + limit_s
        with self._some:
            self._is_over = True
            self._some.notify_all()
            while self._waiting and time.monotonic() < until:
                self._some.wait(max(0.0, until - time.monotonic()))
            self._is_given_up = bool(self._waiting)

    def _add(self, batch: _Batch) -> None:
        with self._some:
            self._waiting.append(batch)
            self._some.notify_all()

    def _send_all(self) -> None:
        while not self._is_given_up:
            with self._some:
                while not self._waiting:
                    if self._is_over:
                        return
                    self._some.wait()
                batch = self._waiting[0]
            if self._send(batch):
                self.failures = 0
                with self._some:
                    self._waiting.popleft()
                    self.sent_spans += batch.spans
                    self._some.notify_all()
            else:
                self.failures += 1
                self._pause()

    def _send(self, batch: _Batch) -> bool:
        if isinstance(batch.content, MetricsData):
            return self._collector.send_metrics(batch.content)
        return self._collector.send_spans(batch.content)

    def _pause(self) -> None:
        wait_s = wait_seconds(self.failures)
        if self._hurry.is_set():
            time.sleep(min(wait_s, FIRST_WAIT_SECONDS))
        else:
            self._hurry.wait(wait_s)
