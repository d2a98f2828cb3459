"""The connection to a collector: the SDK's own OTLP exporters, chosen and set up by the standard variables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from rltrace.errors import ConfigError
from rltrace.record import redaction
from rltrace_exporters.otlp.endpoint import DEFAULT_ENDPOINTS, GRPC, HTTP, PROTOCOL, address, protocol, require

BATCH_SPANS = 512
"""How many spans one request has, as in the SDK's own batches."""


class Collector:
    """Where spans and metrics go. It reads the standard variables when it is made."""

    def __init__(self) -> None:
        self.address = address()
        """Where spans go, as it may be printed."""
        self.reason = ""
        """Why the last request failed, as the exporter said it."""
        self._spans = _exporter(protocol("TRACES"), "trace_exporter", "OTLPSpanExporter")
        self._metrics = _exporter(protocol("METRICS"), "metric_exporter", "OTLPMetricExporter")

    def send_spans(self, spans: Sequence[ReadableSpan]) -> bool:
        """Send a batch, with the exporter's own retries within its timeout; return whether the collector took it."""
        return self._send(lambda: self._spans.export(spans) is SpanExportResult.SUCCESS)

    def send_metrics(self, metrics: MetricsData) -> bool:
        """Send metrics likewise."""
        return self._send(lambda: self._metrics.export(metrics) is MetricExportResult.SUCCESS)

    def _send(self, export: Callable[[], bool]) -> bool:
        with _heard() as said:
            try:
                is_taken = export()
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
                is_taken = False
        if not is_taken:
            self.reason = redaction.text(_first_line(said[-1])) if said else "no reason was given"
        return is_taken

    def close(self) -> None:
        """Close the connections."""
        with _heard():
            self._spans.shutdown()
            self._metrics.shutdown()


def _exporter(used: str, signal: str, name: str) -> Any:
    """Return one of the SDK's exporters.

    Raises:
        ConfigError: there is none for this protocol.
        MissingExtraError: its package is not installed.
    """
    if used not in DEFAULT_ENDPOINTS:
        raise ConfigError(f"{PROTOCOL}={used}: no such protocol; choose {GRPC} or {HTTP}")
    require()
    package = "grpc" if used == GRPC else "http"
    return getattr(import_module(f"opentelemetry.exporter.otlp.proto.{package}.{signal}"), name)()


@contextmanager
def _heard() -> Iterator[list[str]]:
    """Yield what the exporters log meanwhile, which nobody else hears: a collector that is down says so repeatedly."""
    logger = logging.getLogger("opentelemetry")
    said: list[str] = []
    handler = _Listener(said)
    was, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(was)
        logger.propagate = propagates


class _Listener(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else text
