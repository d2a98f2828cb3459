"""Sends what is handed over, in threads of its own, again and again until the collector takes it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    content: Any
    """Spans, or metrics."""
    many: int
    """How many spans or data points."""


class _Queue:
    """What waits of one signal, and the thread that sends it."""

    def __init__(self, send: Callable[[Any], bool]) -> None:
        self._send = send
        self._waiting: deque[_Batch] = deque()
        self._some = threading.Condition()
        self._is_over = self._is_given_up = False
        self._hurry = threading.Event()
        self.sent = 0
        self.failures = 0
        """How many requests failed in a row."""
        threading.Thread(target=self._send_all, name="rltrace-otlp", daemon=True).start()

    @property
    def waiting(self) -> int:
        with self._some:
            return sum(batch.many for batch in self._waiting)

    @property
    def is_empty(self) -> bool:
        with self._some:
            return not self._waiting

    def add(self, content: Any, many: int) -> None:
        with self._some:
            self._waiting.append(_Batch(content, many))
            self._some.notify_all()

    def hurry(self) -> None:
        self._hurry.set()
        with self._some:
            self._is_over = True
            self._some.notify_all()

    def finish(self, until: float) -> None:
        with self._some:
            while self._waiting and time.monotonic() < until:
                self._some.wait(max(0.0, until - time.monotonic()))
            self._is_given_up = bool(self._waiting)

    def _send_all(self) -> None:
        while not self._is_given_up:
            with self._some:
                while not self._waiting:
                    if self._is_over:
                        return
                    self._some.wait()
                batch = self._waiting[0]
            if self._send(batch.content):
                self.failures = 0
                with self._some:
                    self._waiting.popleft()
                    self.sent += batch.many
                    self._some.notify_all()
            else:
                self.failures += 1
                self._pause()

    def _pause(self) -> None:
        wait_s = wait_seconds(self.failures)
        if self._hurry.is_set():
            time.sleep(min(wait_s, FIRST_WAIT_SECONDS))
        else:
            self._hurry.wait(wait_s)


class Sender:
    """A queue of spans and one of metrics in front of a collector: a backend may take only one of them."""

    def __init__(self, collector: Collector) -> None:
        self._spans, self._metrics = _Queue(collector.send_spans), _Queue(collector.send_metrics)

    @property
    def sent_spans(self) -> int:
        """How many spans the collector took."""
        return self._spans.sent

    @property
    def failures(self) -> int:
        """How many requests failed in a row."""
        return max(self._spans.failures, self._metrics.failures)

    @property
    def waiting_spans(self) -> int:
        """How many spans wait, those among them that are being sent."""
        return self._spans.waiting

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return self._spans.is_empty and self._metrics.is_empty

    @property
    def is_full(self) -> bool:
        """Whether so much waits that nothing more should be read."""
        return self._spans.waiting + self._metrics.waiting >= MOST_WAITING

    def add_spans(self, spans: Sequence[ReadableSpan]) -> None:
        """Put spans behind those that wait."""
        for begin in range(0, len(spans), BATCH_SPANS):
            few = spans[begin : begin + BATCH_SPANS]
            self._spans.add(few, len(few))

    def add_metrics(self, metrics: MetricsData) -> None:
        """Put metrics behind those that wait."""
        self._metrics.add(metrics, points_in(metrics))

    def finish(self, limit_s: float) -> None:
        """Wait until everything is sent, at most so long; what waits then is given up."""
        until = time.monotonic() + limit_s
        for queue in (self._spans, self._metrics):
            queue.hurry()
        for queue in (self._spans, self._metrics):
            queue.finish(until)
