"""The connection to a collector: the SDK's own OTLP exporters, chosen and set up by the standard variables."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from rltrace.errors import ConfigError, MissingExtraError
from rltrace.record.manifest import redact_text

ENDPOINT, PROTOCOL = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"
GRPC, HTTP = "grpc", "http/protobuf"
GRPC_PORT = 4317
DEFAULT_ENDPOINTS = {GRPC: "http://localhost:4317", HTTP: "http://localhost:4318"}

BATCH_SPANS = 512
"""How many spans one request has, as in the SDK's own batches."""


def set_up(url: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the standard variables for a collector, given only its URL; port 4317 means gRPC.

    Args:
        url: `http://host:4317`, `https://host`, ...; nothing to leave all to the variables.
        environment: Variables that are set already; a protocol in them counts.

    Raises:
        ConfigError: it is no URL.
    """
    if not url:
        return {}
    split = urlsplit(url)
    if split.scheme not in ("http", "https") or not split.hostname:
        raise ConfigError(f"--otlp {shown(url)}: not a URL; write it as http://HOST:4318, or http://HOST:4317 for gRPC")
    variables = {ENDPOINT: url}
    if PROTOCOL not in environment:
        variables[PROTOCOL] = GRPC if split.port == GRPC_PORT else HTTP
    return variables


def shown(url: str) -> str:
    """Return a URL as it may be printed: without a user and a password, and without its query."""
    split = urlsplit(url)
    host = split.netloc.rpartition("@")[2]
    return redact_text(urlunsplit((split.scheme, host, split.path, "", "")))


class Collector:
    """Where spans and metrics go. It reads the standard variables when it is made."""

    def __init__(self) -> None:
        self.protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(PROTOCOL) or HTTP
        of_metrics = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL") or os.environ.get(PROTOCOL) or HTTP
        self.reason = ""
        """Why the last request failed, as the exporter said it."""
        self._spans = _exporter(self.protocol, "trace_exporter", "OTLPSpanExporter")
        self._metrics = _exporter(of_metrics, "metric_exporter", "OTLPMetricExporter")

    @property
    def address(self) -> str:
        """Where spans go, as it may be printed."""
        endpoint = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get(ENDPOINT)
        return f"{shown(endpoint or DEFAULT_ENDPOINTS[self.protocol])} ({self.protocol})"

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
            self.reason = redact_text(_first_line(said[-1])) if said else "no reason was given"
        return is_taken

    def close(self) -> None:
        """Close the connections."""
        with _heard():
            self._spans.shutdown()
            self._metrics.shutdown()


def _exporter(protocol: str, signal: str, name: str) -> Any:
    """Return one of the SDK's exporters.

    Raises:
        ConfigError: there is none for this protocol.
        MissingExtraError: its package is not installed.
    """
    if protocol not in DEFAULT_ENDPOINTS:
        raise ConfigError(f"{PROTOCOL}={protocol}: no such protocol; choose {GRPC} or {HTTP}")
    package = "grpc" if protocol == GRPC else "http"
    try:
        module = import_module(f"opentelemetry.exporter.otlp.proto.{package}.{signal}")
    except ImportError as error:
        raise MissingExtraError(
            f"OTLP over {protocol} needs {error.name}, which is not installed here", "otel"
        ) from None
    return getattr(module, name)()


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
