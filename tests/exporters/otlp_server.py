"""A collector that keeps what it was sent: OTLP over gRPC and HTTP, on the official protobuf services.

It answers well, or as it is told to: not at all, late, or with a refusal.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class Received(NamedTuple):
    """One span as it arrived."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    links: list[tuple[str, str]]
    events: list[tuple[str, int, dict[str, Any]]]
    status: int
    status_message: str
    kind: int
    scope: str
    schema: str


class Point(NamedTuple):
    """One data point as it arrived."""

    name: str
    unit: str
    kind: str
    at_ns: int
    value: float
    attributes: dict[str, Any]
    resource: dict[str, Any]
    count: int


class Collector:
    """What arrived, and how to answer."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.metric_requests: list[ExportMetricsServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.delay_s = 0.0
        """How long each answer takes."""
        self.refusal: tuple[int, grpc.StatusCode] | None = None
        """With which status of HTTP and gRPC requests are refused."""
        self.takes_metrics = True
        """Whether it has anything for them, before it is served: Jaeger and MLflow do not."""
        self.url = ""
        self._lock = threading.Lock()

    def take(self, request: Any, headers: dict[str, str]) -> bool:
        """Keep a request; return whether it is accepted."""
        if self.delay_s:
            time.sleep(self.delay_s)
        with self._lock:
            self.headers.append({name.lower(): value for name, value in headers.items()})
            if self.refusal is not None:
                return False
            if isinstance(request, ExportTraceServiceRequest):
                self.requests.append(request)
            else:
                self.metric_requests.append(request)
        return True

    @property
    def spans(self) -> list[Received]:
        """Every span, in the order in which they arrived."""
        return [span for request in list(self.requests) for span in _spans(request)]

    @property
    def points(self) -> list[Point]:
        """Every data point likewise."""
        return [point for request in list(self.metric_requests) for point in _points(request)]


def _spans(request: ExportTraceServiceRequest) -> Iterator[Received]:
    for of_resource in request.resource_spans:
        resource = _said(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield Received(
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _said(span.attributes),
                    resource,
                    [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                    [(event.name, event.time_unix_nano, _said(event.attributes)) for event in span.events],
                    span.status.code,
                    span.status.message,
                    span.kind,
                    of_scope.scope.name,
                    of_scope.schema_url,
                )


def _points(request: ExportMetricsServiceRequest) -> Iterator[Point]:
    for of_resource in request.resource_metrics:
        resource = _said(of_resource.resource.attributes)
        for metric in (metric for scope in of_resource.scope_metrics for metric in scope.metrics):
            kind = metric.WhichOneof("data")
            for point in getattr(metric, kind).data_points:
                at_ns, said = point.time_unix_nano, _said(point.attributes)
                if kind == "histogram":
                    yield Point(metric.name, metric.unit, kind, at_ns, point.sum, said, resource, point.count)
                else:
                    value = getattr(point, point.WhichOneof("value"))
                    yield Point(metric.name, metric.unit, kind, at_ns, value, said, resource, 1)


def _said(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


class _Traces(TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        return _answer(self._collector, request, context, ExportTraceServiceResponse())


class _Metrics(MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        return _answer(self._collector, request, context, ExportMetricsServiceResponse())


def _answer(collector: Collector, request: Any, context: Any, answer: Any) -> Any:
    if not collector.take(request, dict(context.invocation_metadata())):
        assert collector.refusal is not None
        context.abort(collector.refusal[1], "not today")
    return answer


@contextmanager
def grpc_collector(collector: Collector, port: int = 0) -> Iterator[Collector]:
    """Serve gRPC on this machine."""
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    add_TraceServiceServicer_to_server(_Traces(collector), server)
    if collector.takes_metrics:
        add_MetricsServiceServicer_to_server(_Metrics(collector), server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    collector.url = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(grace=None).wait()


@contextmanager
def http_collector(collector: Collector, port: int = 0) -> Iterator[Collector]:
    """Serve HTTP on this machine."""
    server = _HttpServer(("127.0.0.1", port), _handler(collector))
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                content = gzip.decompress(content)
            kinds = {"/v1/traces": ExportTraceServiceRequest, "/v1/metrics": ExportMetricsServiceRequest}
            if self.path == "/v1/metrics" and not collector.takes_metrics:
                self._answer(404)
                return
            request = kinds[self.path].FromString(content)
            is_taken = collector.take(request, dict(self.headers.items()))
            self._answer(200 if is_taken or collector.refusal is None else collector.refusal[0])

        def _answer(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    return Handler
