"""Sends a Recording while it grows: what was appended is read, and a step is sent once it is over."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from opentelemetry.sdk.trace import ReadableSpan

from rltrace.analysis.clocks import TimeLine
from rltrace.events import STEP, Counter, Span
from rltrace.host import clock
from rltrace.host.clock import Domain
from rltrace.read.following import Follower, News
from rltrace.read.recording import Process, Recording
from rltrace_exporters.otlp import resources
from rltrace_exporters.otlp.collector import Collector
from rltrace_exporters.otlp.endpoint import set_up, variables
from rltrace_exporters.otlp.exporter import batched
from rltrace_exporters.otlp.metrics import Measures, batches
from rltrace_exporters.otlp.sending import Sender
from rltrace_exporters.otlp.traces import Traces

HELD_SECONDS = 900.0
"""How long steps are held, at most, because a process may still turn out to have a step, or a phase of theirs."""

READING_SHARE = 0.7
"""Share of the time after a run in which what is left may be read; the rest of it is for sending that."""


class Delivery(NamedTuple):
    """What came of sending a run."""

    address: str
    spans: int
    steps: int
    is_all: bool
    """Whether everything was sent."""
    left_spans: int
    is_read: bool
    """Whether no more is left than these spans."""
    reason: str
    no_metrics: str
    """Why metrics were not sent; empty if they were."""

    def __str__(self) -> str:
        said = f"{self.address}: {self.spans:,} spans of {self.steps:,} steps were sent"
        metrics = f"; no metrics ({self.no_metrics})" if self.no_metrics else ""
        if self.is_all:
            return said + metrics
        left = (
            f"{self.left_spans:,} were not" if self.is_read else "what came last was not, it could not be read in time"
        )
        why = f": {self.reason}" if self.reason else ""
        return f"{said}, {left}{why}; the Recording has all of them: `rltrace export RUN --to otlp` sends them{metrics}"


class LiveOtlp:
    """A run that is sent while it goes on."""

    def __init__(self, recording: Recording, url: str) -> None:
        """Connect; nothing is sent yet, and nobody needs to listen.

        Args:
            recording: The Recording, which may have nothing in it yet.
            url: Where the collector listens; the standard variables say it if this is empty.

        Raises:
            RltraceError: the URL or a variable makes no sense, or a package is missing.
        """
        self._recording = recording
        with variables(set_up(url, os.environ)):
            self._collector = Collector()
        self._sender = Sender(self._collector)
        self._follower = Follower(recording)
        self._traces = Traces(str(recording.manifest["run_id"]), resources.of_run(recording))
        self._measures: dict[str, Measures] = {}
        self._spans: Iterator[list[ReadableSpan]] = iter(())
        """Of what is over, which is put together as the queue takes it."""
        self._is_handed_over = False
        self._polled_ns = 0
        """When the poll before this one began, in nanoseconds since 1970 by the run's clock."""
        self._offsets: dict[Domain, int] = {}
        """For each clock what to add to its times; it stays what it was when its first process came."""

    @property
    def address(self) -> str:
        """Where it sends to, as it may be printed."""
        return self._collector.address

    @property
    def is_over(self) -> bool:
        """Whether the run has ended and all of it was sent, or the collector takes nothing now."""
        return self._follower.is_over and (
            (self._is_handed_over and self._sender.is_empty) or self._sender.failures > 0
        )

    @property
    def steps_sent(self) -> int:
        """How many steps were put together so far."""
        return self._traces.steps_sent

    @property
    def waiting_spans(self) -> int:
        """How many spans were put together and are not sent yet."""
        return self._sender.waiting_spans

    def poll(self) -> None:
        """Read what was appended, and hand over what is over; nothing while too much waits to be sent."""
        if not self._hand_over_all(is_patient=True):
            return
        began_ns = self._now_ns()
        for news in self._follower.poll():
            self._take(news)
        self._spans = batched(self._over(self._settled_ns(self._polled_ns)))
        self._polled_ns = began_ns
        self._hand_over_metrics()
        self._is_handed_over = self._hand_over_all(is_patient=True)

    def _settled_ns(self, read_ns: int) -> int:
        """Return until when no step and no phase will be inferred any more, of what was read until a time."""
        until = [
            self._follower.inferred_until_ns(process.key) + self._offset_ns(process)
            for process in self._follower.processes
        ]
        return max(min([read_ns, *until]), read_ns - round(HELD_SECONDS * 1e9))

    def _over(self, before_ns: int) -> Iterator[ReadableSpan]:
        """Yield what was over at a time."""
        yield from self._traces.over(before_ns + 1)
        open_spans = {process.key: self._follower.open_spans(process.key) for process in self._follower.processes}
        if not self._traces.has_steps_to_send and not any(map(_has_step, open_spans.values())):
            yield from self._traces.special(before_ns, open_spans)

    def finish(self, limit_s: float) -> Delivery:
        """Read and send the rest within a limit; return what was sent and what was not."""
        until = time.monotonic() + limit_s
        is_read = self._read_rest(until - limit_s * (1 - READING_SHARE))
        self._sender.finish(max(0.0, until - time.monotonic()))
        left = self._sender.waiting_spans
        is_all = is_read and self._sender.is_empty
        return Delivery(
            self.address,
            self._sender.sent_spans,
            self._traces.steps_sent,
            is_all,
            left,
            is_read,
            self._collector.reason,
            self._collector.no_metrics,
        )

    def _read_rest(self, until: float) -> bool:
        """Read and hand over what is left until a time; return whether that was all."""
        if not self._hand_over_all(until=until):
            return False
        for news in self._follower.poll():
            if time.monotonic() > until:
                return False
            self._take(news)
        for process in self._follower.processes:
            self._traces.add_open(self._traces.sources[process.key], self._follower.open_spans(process.key))
        self._hand_over_metrics()
        self._spans = batched(self._traces.rest())
        return self._hand_over_all(until=until)

    # ---- reading ----

    def _take(self, news: News) -> None:
        process = news.process
        source = self._traces.process(process, self._offset_ns(process))
        if process.key not in self._measures:
            self._measures[process.key] = Measures(source, self._recording.manifest["created_unix_ns"])
        measured = self._measures[process.key]
        events: list[Span | Counter] = [*news.ended, *news.samples]
        for event in events:
            measured.add(event)
            self._traces.add(source, event)

    def _offset_ns(self, process: Process) -> int:
        """Return what to add to a process's times to get nanoseconds since 1970."""
        domain = process.time_domain
        if domain not in self._offsets:
            self._offsets[domain] = TimeLine(_Known(self._follower)).offset_ns(process)
        return self._offsets[domain]

    def _now_ns(self) -> int:
        offset_ns = self._offsets.get(clock.own_domain())
        return time.time_ns() if offset_ns is None else clock.now_ns() + offset_ns

    def _hand_over_all(self, *, is_patient: bool = False, until: float = math.inf) -> bool:
        """Put the spans of what is over into the queue; return whether that was all.

        Args:
            is_patient: Leave some for later if too much waits to be sent.
            until: When to leave the rest.
        """
        while not (is_patient and self._sender.is_full) and time.monotonic() <= until:
            batch = next(self._spans, None)
            if batch is None:
                return True
            self._sender.add_spans(batch)
        return False

    def _hand_over_metrics(self) -> None:
        taken = [found for measured in self._measures.values() if (found := measured.take()) is not None]
        for metrics in batches(taken):
            self._sender.add_metrics(metrics)


class _Known:
    """What a time line asks of a Recording, of the processes that are known by now."""

    def __init__(self, follower: Follower) -> None:
        self.processes = follower.processes
        own = follower.recording.own_domain
        self.time_domain = own if own or not self.processes else self.processes[0].time_domain


def _has_step(spans: Sequence[Span]) -> bool:
    return any(span.name == STEP for span in spans)
