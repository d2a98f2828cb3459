"""Where a collector listens: a URL that the user named, or the standard variables. OpenTelemetry is not loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from urllib.parse import urlsplit, urlunsplit

from rltrace.errors import ConfigError, MissingExtraError
from rltrace.record import redaction

ENDPOINT, PROTOCOL = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"
METRICS_EXPORTER = "OTEL_METRICS_EXPORTER"
GRPC, HTTP = "grpc", "http/protobuf"
GRPC_PORT = 4317
DEFAULT_ENDPOINTS = {GRPC: "http://localhost:4317", HTTP: "http://localhost:4318"}
NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc", "opentelemetry.exporter.otlp.proto.http")


def require() -> None:
    """Refuse to go on without the packages that send.

    Raises:
        MissingExtraError: one of them is not installed.
    """
    for name in NEEDED:
        if not _is_installed(name):
            raise MissingExtraError(f"OTLP needs {name}, which is not installed here", "otel")


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:  # not even what it is in
        return False


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


@contextmanager
def variables(more: Mapping[str, str]) -> Iterator[None]:
    """Have these variables set for as long as an exporter is made, which reads them then."""
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        for name in more:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def shown(url: str) -> str:
    """Return a URL as it may be printed: without a user and a password, and without its query."""
    split = urlsplit(url)
    host = split.netloc.rpartition("@")[2]
    return redaction.text(urlunsplit((split.scheme, host, split.path, "", "")))


def address() -> str:
    """Return where the standard variables say that spans go, as it may be printed."""
    said = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get(ENDPOINT)
    used = protocol("TRACES")
    return f"{shown(said or DEFAULT_ENDPOINTS.get(used, ''))} ({used})"


def protocol(signal: str) -> str:
    """Return by which protocol they say that a signal, TRACES or METRICS, is sent."""
    return os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or os.environ.get(PROTOCOL) or HTTP


def are_metrics_wanted() -> bool:
    """Return whether they say that metrics are sent at all."""
    return os.environ.get(METRICS_EXPORTER, "").strip().lower() != "none"
