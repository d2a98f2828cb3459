"""The connection to a collector: the SDK's own OTLP exporters, chosen and set up by the standard variables."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from rltrace.errors import ConfigError
from rltrace.record import redaction
from rltrace_exporters.otlp.endpoint import (
    DEFAULT_ENDPOINTS,
    GRPC,
    HTTP,
    METRICS_EXPORTER,
    PROTOCOL,
    address,
    are_metrics_wanted,
    protocol,
    require,
)

BATCH_SPANS = 512
"""How many spans one request has, as in the SDK's own batches."""


NO_SUCH_THING = re.compile(r"\b(404|405|501|UNIMPLEMENTED)\b")
"""How a backend says that it takes no metrics at all, as Jaeger and MLflow do: by HTTP, and by gRPC."""


class Collector:
    """Where spans and metrics go. It reads the standard variables when it is made."""

    def __init__(self) -> None:
        self.address = address()
        """Where spans go, as it may be printed."""
        self.reason = ""
        """Why the last request failed, as the exporter said it."""
        self.no_metrics = "" if are_metrics_wanted() else f"{METRICS_EXPORTER}=none"
        """Why metrics are not sent; empty if they are."""
        self._spans = _exporter(protocol("TRACES"), "trace_exporter", "OTLPSpanExporter")
        self._metrics = _exporter(protocol("METRICS"), "metric_exporter", "OTLPMetricExporter")
        self._heard = _Listener()

    def send_spans(self, spans: Sequence[ReadableSpan]) -> bool:
        """Send a batch, with the exporter's own retries within its timeout; return whether the collector took it."""
        why_not = self._send(lambda: self._spans.export(spans) is SpanExportResult.SUCCESS)
        self.reason = self.reason if why_not is None else why_not
        return why_not is None

    def send_metrics(self, metrics: MetricsData) -> bool:
        """Send metrics likewise, unless the collector takes none, or the variables say so."""
        if self.no_metrics:
            return True
        why_not = self._send(lambda: self._metrics.export(metrics) is MetricExportResult.SUCCESS)
        if why_not is not None and NO_SUCH_THING.search(why_not):
            self.no_metrics = why_not
            return True
        self.reason = self.reason if why_not is None else why_not
        return why_not is None

    def _send(self, export: Callable[[], bool]) -> str | None:
        """Return why the collector did not take something; None if it did."""
        self._heard.begin()
        try:
            is_taken = export()
        except Exception as error:
            is_taken, said = False, [f"{type(error).__name__}: {error}"]
        else:
            said = self._heard.said()
        if is_taken:
            return None
        return redaction.text(_first_line(said[-1])) if said else "no reason was given"

    def close(self) -> None:
        """Close the connections."""
        self._spans.shutdown()
        self._metrics.shutdown()
        self._heard.stop()


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


class _Listener(logging.Handler):
    """Hears what the exporters log, which nobody else does: a collector that is down says so repeatedly.

    The SDK's own filters drop what was said a short time ago, and with it why a request failed.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: dict[int | None, list[str]] = {}
        """By thread."""
        self._logger = logging.getLogger("opentelemetry")
        self._propagated = self._logger.propagate
        self._logger.addHandler(self)
        self._logger.propagate = False
        names = [name for name in logging.root.manager.loggerDict if name.startswith("opentelemetry.exporter.otlp")]
        self._filters = [(logger, one) for logger in map(logging.getLogger, names) for one in logger.filters]
        for logger, one in self._filters:
            logger.removeFilter(one)

    def begin(self) -> None:
        """Forget what was heard in this thread."""
        self._said[threading.get_ident()] = []

    def said(self) -> list[str]:
        """Return what was heard in this thread since."""
        return self._said.get(threading.get_ident(), [])

    def emit(self, record: logging.LogRecord) -> None:
        self._said.setdefault(record.thread, []).append(record.getMessage())

    def stop(self) -> None:
        """Let others hear again."""
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagated
        for logger, one in self._filters:
            logger.addFilter(one)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else text
