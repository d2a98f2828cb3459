"""Metrics of a run for Prometheus: the format of its scrapes, as text and as OpenMetrics.

`rltrace.analysis.metrics` has the values; this file gives them names that end with their unit, and labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from rltrace.analysis.fates import Fate, fates
from rltrace.analysis.figures import Figures, figures
from rltrace.analysis.metrics import BOUNDS_SECONDS, Device, Histogram, Metrics, Named, Together, places
from rltrace.analysis.summary import Losses, Summary
from rltrace.host.control_characters import visible
from rltrace.read import columns
from rltrace.read.recording import Process, Recording

LONGEST_LABEL = 128
"""Characters of a label's value; what is longer is cut."""

LOST = ("lost_events", "misfit_records", "torn_records", "orphan_records", "stray_arrows", "unfit_values")
"""What a Recording can lack, as `Losses` has it; each is a `kind` of one metric."""

GPU_COUNTERS = {
    "gpu.used_bytes": ("rltrace_gpu_used", "bytes", 1.0, "Bytes of the GPU that are used, by whatever process"),
    "gpu.utilisation_percent": ("rltrace_gpu_busy", "ratio", 0.01, "Share of the time in which a kernel ran"),
    "gpu.power_watts": ("rltrace_gpu_power", "watts", 1.0, "Power that the GPU draws"),
}
"""A sampler's counter: name, unit and factor of its metric, and what it is."""


class Prometheus:
    """The format of a scrape, as a file: for node_exporter's textfile collector, or to see what `/metrics` says."""

    suffix = ".prom"

    def write(self, recording: Recording, out: BinaryIO) -> None:
        """Write all metrics."""
        families = Families(recording, recording.processes, metrics_of(recording), figures(recording))
        out.write(generate_latest(families.registry()))


def metrics_of(recording: Recording) -> Metrics:
    """Return the metrics of all that was recorded so far."""
    metrics = Metrics()
    for process in recording.processes:
        columns.fold(process, lambda: None, lambda _, rows, process=process: metrics.add(process, rows))  # type: ignore[misc]
    return metrics


def answer(registry: CollectorRegistry, accept: str) -> tuple[str, bytes]:
    """Return the content type and the body for what a scraper accepts: text, or OpenMetrics."""
    encode, content_type = choose_encoder(accept)
    return content_type, encode(registry)


class Families(Collector):
    """What prometheus_client encodes."""

    def __init__(
        self,
        recording: Recording,
        processes: Sequence[Process],
        metrics: Metrics,
        found: Figures | None = None,
        *,
        is_live: bool = False,
    ) -> None:
        """Args:
        recording: Whose metrics they are.
        processes: Its processes, as far as they are known.
        metrics: What was read of it.
        found: Its figures; None if they are not known yet.
        is_live: Whether the run goes on.
        """
        self._recording, self._processes, self._metrics, self._found = recording, processes, metrics, found
        self._is_live = is_live
        self._together = Together(processes, metrics, is_live=is_live)

    def registry(self) -> CollectorRegistry:
        """Return a registry that has these, and nothing else."""
        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        yield from self._run()
        yield from self._seconds()
        yield from self._engines()
        yield from self._memory()
        if self._found is not None:
            yield from _problems(self._found.summary)
            yield from _findings(self._found)

    def _run(self) -> Iterator[Metric]:
        manifest = self._recording.manifest
        info = {"run": self._recording.name, "run_id": str(manifest.get("run_id") or "")}
        yield InfoMetricFamily("rltrace_run", "The Recording", value={key: _text(said) for key, said in info.items()})
        yield GaugeMetricFamily("rltrace_run_live", "1 while a process of the run is alive", self._is_live)
        steps = self._together.steps()
        yield _histogram("rltrace_step", "Length of the steps that ended", [((), steps.histogram)])
        yield CounterMetricFamily("rltrace_tokens", "Tokens of these steps", steps.tokens)
        last = (
            ("rltrace_step_number", "Number of the step that ended last", steps.number),
            ("rltrace_step_reward_mean", "Mean reward of that step", steps.reward_mean),
            ("rltrace_step_tokens_per_second", "Tokens per second of that step", steps.tokens_per_second),
        )
        yield from (GaugeMetricFamily(name, said, value) for name, said, value in last if value is not None)

    def _seconds(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield _by_name("rltrace_phase", "Length of phases, of all ranks", "phase", metrics.phases)
        yield _gauge(
            "rltrace_step_phase",
            "Seconds of a phase in the step that ended last; of several ranks the longest",
            "seconds",
            ("phase", "rank"),
            (((phase, place), seconds) for place, phase, seconds in self._together.phase_seconds()),
        )
        yield _by_name("rltrace_weight_sync_stage", "Length of the stages of weight sync", "stage", metrics.sync_stages)
        yield _by_name(
            "rltrace_request", "Length of requests, as the agent loop, the server or the engine sees them", "span",
            metrics.requests,
        )  # fmt: skip
        yield _by_name("rltrace_tool_call", "Length of the calls of tools and environments", "tool", metrics.tools)
        for name, said, histogram in (
            ("rltrace_request_queue", "How long requests waited in their engine", metrics.queued),
            ("rltrace_request_first_token", "From a request's arrival in its engine to its token", metrics.first_token),
            ("rltrace_trajectory", "Length of trajectories", metrics.trajectories),
        ):
            yield _histogram(name, said, [((), histogram)] if histogram.count else [])

    def _engines(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily("rltrace_request_tokens", "Tokens of requests in engines", labels=("kind",))
        kinds = {"tokens": "generated", "prompt_tokens": "prompt", "cached_tokens": "prompt_cached"}
        for key, many in self._metrics.request_tokens.items():
            tokens.add_metric((kinds[key],), many)
        yield tokens
        requests = [(("running",), self._together.engine("running")), (("waiting",), self._together.engine("waiting"))]
        said = "Requests in the last step of each engine, of all engines"
        yield _gauge(
            "rltrace_engine_requests", said, "", ("state",), ((of, sum(many)) for of, many in requests if many)
        )
        usage = self._together.engine("kv_usage")
        if usage:
            said = "Share of its KV cache that the fullest engine had taken in its last step"
            yield _gauge("rltrace_engine_kv_cache", said, "ratio", (), [((), max(usage))])

    def _memory(self) -> Iterator[Metric]:
        said = "Bytes of a device by owner, as its processes last said"
        yield _of_devices("rltrace_memory", said, self._together.devices())
        gpus = [*self._together.gpus()]
        for counter, (name, unit, factor, said) in GPU_COUNTERS.items():
            having = [gpu for gpu in gpus if counter in gpu.sampled]
            rows = (((gpu.place, gpu.device), gpu.sampled[counter] * factor) for gpu in having)
            yield _gauge(name, said, unit, ("rank", "gpu"), rows)
        if self._found is not None:
            said = "The most bytes of a device that each owner held, each at its own time"
            yield _of_devices("rltrace_memory_peak", said, _peaks(self._processes, self._found.summary))


# ---- what needs the whole Recording -----------------------------------------------------------------------------


def _peaks(processes: Sequence[Process], summary: Summary) -> Iterator[Device]:
    """Yield the peaks of each place: of the device among its ranks with the highest total."""
    by_lane = {memory.lane: memory for memory in summary.memory}
    for place in places(processes):
        own = [by_lane[lane.name] for lane in place.lanes if lane.name in by_lane]
        if own:
            highest = max(own, key=lambda memory: memory.peak_bytes)
            device = highest.device or "cpu" if len(own) == 1 else f"fullest of {len(own)}"
            yield Device(place.name, device, {owner: peak.bytes for owner, peak in highest.owner_peaks.items()})


def _problems(summary: Summary) -> Iterator[Metric]:
    fate_of = fates(summary)
    states = Counter("alive" if one.state == "alive" else fate_of[one.key] for one in summary.processes)
    rows = (((state,), states[state]) for state in ("alive", *get_args(Fate)))
    said = "Processes that are alive, and how the others ended: somebody has to look at those that died"
    yield _gauge("rltrace_processes", said, "", ("state",), rows)
    errors: Named[list[int]] = Named(list)
    for one in summary.errors:
        errors[one.error].append(one.count)
    counted = CounterMetricFamily("rltrace_errors", "Exceptions that left a span, caught or not", labels=("error",))
    for error, counts in errors.by_name.items():
        counted.add_metric((_text(error),), sum(counts))
    yield counted
    yield CounterMetricFamily("rltrace_out_of_memory", "Phases that ended without memory", len(summary.out_of_memory))
    lost = CounterMetricFamily("rltrace_lost_records", "What the Recording lacks", labels=("kind",))
    for kind in LOST:
        lost.add_metric((kind,), _lost(summary.losses, kind))
    yield lost
    yield CounterMetricFamily(
        "rltrace_dropped", "Bytes that were dropped to keep to the disk budget", _lost(summary.losses, "dropped_bytes"),
        unit="bytes",
    )  # fmt: skip
    yield GaugeMetricFamily(
        "rltrace_possible_leaks", "Rows of memory that grew over several sleeps", len(summary.leaks)
    )
    yield GaugeMetricFamily("rltrace_ranks_missing", "Ranks that no process is of", summary.run.ranks_missing)


def _lost(losses: Iterable[Losses], kind: str) -> int:
    return sum(getattr(loss, kind) for loss in losses)


def _findings(found: Figures) -> Iterator[Metric]:
    for name, unit, said, price in _PRICES:
        priced = ((one.id, price(one)) for one in found.why.findings)
        of_each: dict[str, float] = {}
        for one, value in priced:
            if value is not None:
                of_each[one] = of_each.get(one, 0.0) + value
        yield _gauge(name, said, unit, ("finding",), (((one,), value) for one, value in of_each.items()))


_PRICES: tuple[tuple[str, str, str, Callable[[Any], float | None]], ...] = (
    ("rltrace_finding_step", "seconds", "What a finding costs in a steady step", lambda one: one.seconds_per_step),
    ("rltrace_finding_once", "seconds", "What a finding costs the run once", lambda one: one.once_seconds),
    ("rltrace_finding", "bytes", "Bytes that a finding is about", lambda one: one.bytes),
)


# ---- families ---------------------------------------------------------------------------------------------------


def _text(said: str) -> str:
    """Return the value of a label: a name of a Recording, in which nothing is obeyed by a terminal."""
    return visible(said.encode(errors="replace").decode())[:LONGEST_LABEL]


def _gauge(
    name: str, said: str, unit: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    family = GaugeMetricFamily(name, said, labels=labels, unit=unit)
    for of, value in rows:
        family.add_metric([*map(_text, of)], value)
    return family


def _histogram(name: str, said: str, rows: Iterable[tuple[tuple[str, ...], Histogram]], *labels: str) -> Metric:
    family = HistogramMetricFamily(name, said, labels=labels, unit="seconds")
    bounds = [*map(str, BOUNDS_SECONDS), "+Inf"]
    for of, histogram in rows:
        buckets = [*zip(bounds, histogram.counts.cumsum().tolist(), strict=True)]
        family.add_metric([*map(_text, of)], buckets, histogram.seconds)
    return family


def _by_name(name: str, said: str, label: str, histograms: Named[Histogram]) -> Metric:
    return _histogram(name, said, (((of,), histogram) for of, histogram in histograms.by_name.items()), label)


def _of_devices(name: str, said: str, devices: Iterable[Device]) -> Metric:
    rows = (
        ((owner, device.place, device.device), size_bytes)
        for device in devices
        for owner, size_bytes in device.bytes.items()
    )
    return _gauge(name, said, "bytes", ("owner", "rank", "gpu"), rows)
