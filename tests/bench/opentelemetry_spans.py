"""What a span of the OpenTelemetry API costs more while it is recorded: `python tests/bench/opentelemetry_spans.py`.

The work and the unit are those of `hot_path.py`: pairs of nested spans with two attributes, in thread CPU time, beside
the same without our hooks. Exits with 1 if a bar is not met.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hot_path import OPERATIONS, Block, Cost, cost_of, pairs_of
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from rich.console import Console
from rich.table import Table

import rltrace
from rltrace import instrument
from rltrace.record import spans

ROUNDS = 3
SHARE_OF_SDK = 1.0
"""Recording a span of the SDK costs at most this share of what the SDK itself costs."""


class Nowhere(SpanExporter):
    """The cheapest exporter that there can be."""

    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def sdk() -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    return provider


def block_of(tracer: Any) -> Block:
    start = tracer.start_as_current_span

    def span(name: str, **attributes: Any) -> Any:
        return start(name, attributes=attributes)

    return pairs_of(span)


def measure(folder: Path) -> dict[str, Cost]:
    """The cost of each, without hooks and with them."""
    without, api = sdk(), trace.NoOpTracer()
    costs = {"SDK": cost_of(block_of(without.get_tracer("bench")), ROUNDS)}
    costs["API alone"] = cost_of(block_of(api), ROUNDS)
    rltrace.start(folder, max_bytes=16 << 20)
    recorder = spans.current()
    assert recorder is not None
    installed = instrument.install(recorder, ["opentelemetry", "opentelemetry_sdk"])
    recorded = sdk()
    costs["rltrace.span"] = cost_of(pairs_of(rltrace.span), ROUNDS)
    costs["SDK, recorded"] = cost_of(block_of(recorded.get_tracer("bench")), ROUNDS)
    costs["API alone, recorded"] = cost_of(block_of(api), ROUNDS)
    installed.undo()
    rltrace.stop()
    without.shutdown()
    recorded.shutdown()
    return costs


def main(show: Callable[..., None]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        costs = measure(Path(folder, "recording"))
    table = Table("a span", "× two clock reads", "µs", title=f"{OPERATIONS} spans a block")
    for name, cost in costs.items():
        table.add_row(name, f"{cost.floors:.1f}", f"{cost.nanoseconds / 1000:.2f}")
    show(table)
    share = (costs["SDK, recorded"].floors - costs["SDK"].floors) / costs["SDK"].floors
    show(f"recording a span adds {share:.0%} to what the SDK costs; at most {SHARE_OF_SDK:.0%}")
    return share <= SHARE_OF_SDK


if __name__ == "__main__":
    sys.exit(0 if main(Console().print) else 1)
