"""What a run measured, as metrics: cumulative sums and histograms, and samples with the times at which they were taken.

Every data point carries a time of the Recording, also if the Recording is exported long afterwards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from rltrace.analysis.errors import NO_ERRORS
from rltrace.events import (
    AGENT_REQUEST,
    REQUEST,
    STEP,
    STEP_FIGURES,
    TOKENS,
    TOOLS,
    Counter,
    Span,
    owner_of_counter,
    subjects,
)
from rltrace_exporters.otlp import generation
from rltrace_exporters.otlp.resources import Source

BATCH_POINTS = 2_000
"""How many data points one request has."""

GPU_SECONDS = 1.0
"""Time between two points of a GPU's memory: it is sampled ten times as often where it changes."""

SUM_NS = 1_000_000_000
"""A sum has one data point for all that came within so long."""

SECONDS_BOUNDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
"""Bounds of histograms of seconds, as the conventions for generative AI advise."""
TOKEN_BOUNDS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)
"""Bounds of histograms of tokens likewise."""

GPU_MEMORY = {"gpu.used_bytes": "used", "gpu.free_bytes": "free", "gpu.reserved_bytes": "reserved"}
"""Samples of a GPU's memory, and the state that each is about."""

_SCOPE = InstrumentationScope("rltrace", schema_url=generation.SCHEMA)
_CUMULATIVE = AggregationTemporality.CUMULATIVE
_Key = tuple[str, tuple[tuple[str, Any], ...]]

_SUMS = {
    "rltrace.phase.time": ("s", "Seconds that a process spent in a phase."),
    "rltrace.requests": ("{request}", "Requests that an engine has finished."),
    "rltrace.tool_calls": ("{call}", "Calls of tools and environments."),
    "rltrace.steps": ("{step}", "Steps that are over."),
    "rltrace.errors": ("{error}", "Spans that an exception left."),
}
_GAUGES = {
    "rltrace.memory.owned": ("By", "Bytes of a device that an owner holds."),
    "rltrace.gpu.memory": ("By", "Memory of a GPU, by what NVML says of it."),
    "rltrace.step.time": ("s", "Length of a step."),
    "rltrace.step.tokens": ("{token}", "Tokens of a step."),
    "rltrace.step.tokens_per_second": ("{token}/s", "Tokens of a step by its length."),
    "rltrace.step.reward_mean": ("1", "Mean reward of a step."),
}
_HISTOGRAMS = {
    "rltrace.phase.duration": ("s", SECONDS_BOUNDS, "How long phases took."),
    "gen_ai.client.operation.duration": ("s", SECONDS_BOUNDS, "Requests as who sent them waits for them."),
    "gen_ai.server.request.duration": ("s", SECONDS_BOUNDS, "Requests from an engine's queue to the last token."),
    "gen_ai.server.time_to_first_token": ("s", SECONDS_BOUNDS, "From an engine's queue to the first token."),
    "gen_ai.client.token.usage": ("{token}", TOKEN_BOUNDS, "Tokens of requests."),
}


class Measures:
    """The metrics of one process."""

    def __init__(self, source: Source, start_ns: int) -> None:
        self._source = source
        self._start_ns = start_ns
        """Since when sums are counted: the beginning of the run, since 1970."""
        self._sums: dict[_Key, float] = {}
        self._increments: dict[_Key, list[tuple[int, float]]] = {}
        self._histograms: dict[_Key, _Distribution] = {}
        self._points: dict[str, list[NumberDataPoint]] = {}
        self._changed: set[_Key] = set()
        self._last_gpu_ns: dict[_Key, int] = {}
        self._last_ns = start_ns

    def add(self, event: Span | Counter) -> None:
        """Measure what the process recorded."""
        if isinstance(event, Counter):
            self._sample(event)
        elif event.end_ns is not None:
            self._last_ns = max(self._last_ns, event.end_ns + self._source.offset_ns)
            self._span(event, event.end_ns)

    def take(self) -> ResourceMetrics | None:
        """Return what has come since the last time; None if nothing has."""
        metrics = [*self._numbers(), *self._distributions()]
        self._points, self._increments = {}, {}
        self._changed.clear()
        if not metrics:
            return None
        scope = ScopeMetrics(_SCOPE, metrics, generation.SCHEMA)
        return ResourceMetrics(self._source.resource, [scope], "")

    # ---- measuring ----

    def _span(self, span: Span, end_ns: int) -> None:
        seconds, at_ns = span.seconds, end_ns + self._source.offset_ns
        if span.is_phase:
            self._count("rltrace.phase.time", at_ns, seconds, **{"rltrace.phase": span.name})
            self._observe("rltrace.phase.duration", seconds, **{"rltrace.phase": span.name})
        elif span.name == STEP:
            self._step(span, at_ns)
        elif span.name in (REQUEST, AGENT_REQUEST):
            self._request(span, at_ns)
        elif span.name in TOOLS:
            tool = span.args.get("tool")
            self._count("rltrace.tool_calls", at_ns, 1, **{"gen_ai.tool.name": str(tool or span.name)})
        error = span.args.get("error")
        if error is not None and error not in NO_ERRORS:
            self._count("rltrace.errors", at_ns, 1, **{"error.type": str(error), "rltrace.name": span.name})

    def _step(self, span: Span, at_ns: int) -> None:
        self._count("rltrace.steps", at_ns, 1)
        self._gauge("rltrace.step.time", at_ns, span.seconds)
        for name in STEP_FIGURES:
            value = span.args.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self._gauge(f"rltrace.step.{name}", at_ns, value)
        tokens = span.args.get(TOKENS)
        if "tokens_per_second" not in span.args and isinstance(tokens, (int, float)) and span.seconds:
            self._gauge("rltrace.step.tokens_per_second", at_ns, tokens / span.seconds)

    def _request(self, span: Span, at_ns: int) -> None:
        said = {
            "gen_ai.operation.name": generation.TEXT_COMPLETION,
            "gen_ai.provider.name": self._source.engine or generation.UNNAMED_PROVIDER,
        }
        if span.name == AGENT_REQUEST:
            self._observe("gen_ai.client.operation.duration", span.seconds, **said)
            return
        self._count("rltrace.requests", at_ns, 1)
        self._observe("gen_ai.server.request.duration", span.seconds, **said)
        first_ns = span.args.get("first_token_ns")
        if isinstance(first_ns, int):
            self._observe("gen_ai.server.time_to_first_token", first_ns / 1e9, **said)
        for kind, name in (("input", "prompt_tokens"), ("output", TOKENS)):
            tokens = span.args.get(name)
            if isinstance(tokens, int):
                self._observe("gen_ai.client.token.usage", tokens, **said, **{"gen_ai.token.type": kind})

    def _sample(self, sample: Counter) -> None:
        at_ns = sample.ts_ns + self._source.offset_ns
        owner = owner_of_counter(sample.name)
        if owner is not None:
            self._gauge("rltrace.memory.owned", at_ns, int(sample.value), **{"rltrace.owner": owner})
            return
        if sample.name in STEP_FIGURES:
            self._gauge(f"rltrace.step.{sample.name}", at_ns, sample.value)
            return
        name, of = subjects(sample.name)
        if name in GPU_MEMORY and len(of) == 1:
            key = (name, tuple((uuid, "") for uuid in of))
            if at_ns - self._last_gpu_ns.get(key, 0) >= GPU_SECONDS * 1e9:
                self._last_gpu_ns[key] = at_ns
                said = {"hw.id": of[0], "hw.memory.state": GPU_MEMORY[name]}
                self._gauge("rltrace.gpu.memory", at_ns, int(sample.value), **said)

    def _gauge(self, name: str, at_ns: int, value: float, **attributes: Any) -> None:
        self._points.setdefault(name, []).append(NumberDataPoint(attributes, self._start_ns, at_ns, value))

    def _count(self, name: str, at_ns: int, by: float, **attributes: Any) -> None:
        self._increments.setdefault((name, tuple(sorted(attributes.items()))), []).append((at_ns, by))

    def _observe(self, name: str, value: float, **attributes: Any) -> None:
        key = (name, tuple(sorted(attributes.items())))
        if key not in self._histograms:
            self._histograms[key] = _Distribution(_HISTOGRAMS[name][1])
        self._histograms[key].add(value)
        self._changed.add(key)

    # ---- as the SDK's values ----

    def _numbers(self) -> Iterator[Metric]:
        for name, points in self._points.items():
            unit, words = _GAUGES[name]
            points.sort(key=lambda point: point.time_unix_nano)
            yield Metric(name, words, unit, Gauge(points))
        summed: dict[str, list[NumberDataPoint]] = {}
        for key, increments in self._increments.items():
            summed.setdefault(key[0], []).extend(self._summed(key, sorted(increments)))
        for name, points in summed.items():
            unit, words = _SUMS[name]
            yield Metric(name, words, unit, Sum(points, _CUMULATIVE, is_monotonic=True))

    def _summed(self, key: _Key, increments: Sequence[tuple[int, float]]) -> Iterator[NumberDataPoint]:
        """Yield how a sum grew, with one point for all that came within a second."""
        value, attributes = self._sums.get(key, 0), dict(key[1])
        seconds = [at_ns // SUM_NS for at_ns, _ in increments]
        for (at_ns, by), second, following in zip(increments, seconds, [*seconds[1:], None], strict=True):
            value += by
            if second != following:
                yield NumberDataPoint(attributes, self._start_ns, at_ns, value)
        self._sums[key] = value

    def _distributions(self) -> Iterator[Metric]:
        names = sorted({name for name, _ in self._changed})
        for name in names:
            unit, bounds, words = _HISTOGRAMS[name]
            points = [
                self._histograms[key].point(dict(key[1]), self._start_ns, self._last_ns, bounds)
                for key in sorted(self._changed)
                if key[0] == name
            ]
            yield Metric(name, words, unit, Histogram(points, _CUMULATIVE))


class _Distribution:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._buckets = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._least, self._most = float("inf"), float("-inf")

    def add(self, value: float) -> None:
        self._buckets[bisect_left(self._bounds, value)] += 1
        self._sum += value
        self._least, self._most = min(self._least, value), max(self._most, value)

    def point(
        self, attributes: dict[str, Any], start_ns: int, at_ns: int, bounds: Sequence[float]
    ) -> HistogramDataPoint:
        buckets = list(self._buckets)
        return HistogramDataPoint(
            attributes, start_ns, at_ns, sum(buckets), self._sum, buckets, bounds, self._least, self._most
        )


def points_in(metrics: MetricsData) -> int:
    """Return how many data points there are."""
    return sum(map(_points_of, metrics.resource_metrics))


def _points_of(process: ResourceMetrics) -> int:
    return sum(len(metric.data.data_points) for scope in process.scope_metrics for metric in scope.metrics)


def batches(taken: Sequence[ResourceMetrics]) -> Iterator[MetricsData]:
    """Yield metrics in requests of a bounded size."""
    waiting: list[ResourceMetrics] = []
    points = 0
    for of_process in taken:
        for part in _parts(of_process):
            many = _points_of(part)
            if waiting and points + many > BATCH_POINTS:
                yield MetricsData(waiting)
                waiting, points = [], 0
            waiting.append(part)
            points += many
    if waiting:
        yield MetricsData(waiting)


def _parts(whole: ResourceMetrics) -> Iterator[ResourceMetrics]:
    """Yield a process's metrics in parts, where a metric has too many points for one request."""
    for scope in whole.scope_metrics:
        small = []
        for metric in scope.metrics:
            points = metric.data.data_points
            if len(points) <= BATCH_POINTS or not isinstance(metric.data, (Sum, Gauge)):
                small.append(metric)
                continue
            for begin in range(0, len(points), BATCH_POINTS):
                few = points[begin : begin + BATCH_POINTS]
                data = Gauge(few) if isinstance(metric.data, Gauge) else Sum(few, _CUMULATIVE, is_monotonic=True)
                yield _with(whole, scope, [Metric(metric.name, metric.description, metric.unit, data)])
        yield _with(whole, scope, small)


def _with(whole: ResourceMetrics, scope: ScopeMetrics, metrics: Sequence[Metric]) -> ResourceMetrics:
    return ResourceMetrics(whole.resource, [ScopeMetrics(scope.scope, metrics, scope.schema_url)], whole.schema_url)
