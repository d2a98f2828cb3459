"""Sends a Recording to a collector: `rltrace export RUN --to otlp`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator

from opentelemetry.sdk.trace import ReadableSpan

from rltrace.analysis.clocks import TimeLine
from rltrace.errors import OutputError
from rltrace.events import Span
from rltrace.read.recording import Process, Recording
from rltrace_exporters.otlp import resources
from rltrace_exporters.otlp.collector import BATCH_SPANS, Collector
from rltrace_exporters.otlp.endpoint import set_up, variables
from rltrace_exporters.otlp.metrics import Measures, batches, points_in
from rltrace_exporters.otlp.resources import Source
from rltrace_exporters.otlp.traces import Traces


class Otlp:
    """The format that is sent, and not written."""

    suffixes: tuple[str, ...] = ()

    def send(self, recording: Recording, url: str) -> str:
        """Send all spans and metrics, and return what was sent, in one line.

        Args:
            recording: What to send.
            url: Where the collector listens; the standard variables say it if this is empty.

        Raises:
            OutputError: the collector did not take all of it.
        """
        began = time.monotonic()
        with variables(set_up(url, os.environ)):
            collector = Collector()
        try:
            spans, points, steps = _send(recording, collector)
        finally:
            collector.close()
        seconds = time.monotonic() - began
        metrics = f"no metrics ({collector.no_metrics})" if collector.no_metrics else f"{points:,} data points"
        return f"{collector.address}: {spans:,} spans of {steps:,} steps, {metrics}, in {seconds:.1f} s"


def _send(recording: Recording, collector: Collector) -> tuple[int, int, int]:
    traces, measures = made(recording)
    spans = points = 0
    for batch in batched(_all_spans(traces)):
        if not collector.send_spans(batch):
            raise _refused(collector, f"{spans:,} spans were sent, and no others")
        spans += len(batch)
    taken = [found for measured in measures if (found := measured.take()) is not None]
    for metrics in batches(taken):
        if not collector.send_metrics(metrics):
            raise _refused(collector, f"all {spans:,} spans were sent, and {points:,} data points")
        points += points_in(metrics)
    return spans, points, traces.steps_sent


def _refused(collector: Collector, sent: str) -> OutputError:
    return OutputError(
        f"{collector.address}: {collector.reason}; {sent}; send all of it again once the collector takes it: "
        "what it has already is not doubled"
    )


def _all_spans(traces: Traces) -> Iterator[ReadableSpan]:
    yield from traces.over()
    yield from traces.rest()


def made(recording: Recording) -> tuple[Traces, list[Measures]]:
    """Read a Recording, and return its traces and the metrics of each process."""
    run_id = str(recording.manifest["run_id"])
    time_line = TimeLine(recording)
    offsets = {process.key: time_line.offset_ns(process) for process in recording.processes}
    traces = Traces(run_id, resources.of_run(recording))
    measures = []
    for process in recording.processes:
        source = traces.process(process, offsets[process.key])
        measured = Measures(source, recording.manifest["created_unix_ns"])
        _read(process, source, traces, measured)
        measures.append(measured)
    return traces, measures


def _read(process: Process, source: Source, traces: Traces, measured: Measures) -> None:
    left_open = []
    for event in process.events():
        measured.add(event)
        if isinstance(event, Span) and event.end_ns is None:
            left_open.append(event)
        else:
            traces.add(source, event)
    traces.add_open(source, left_open)


def batched(spans: Iterable[ReadableSpan]) -> Iterator[list[ReadableSpan]]:
    """Yield spans in batches of the size of a request."""
    batch: list[ReadableSpan] = []
    for span in spans:
        batch.append(span)
        if len(batch) == BATCH_SPANS:
            yield batch
            batch = []
    if batch:
        yield batch
