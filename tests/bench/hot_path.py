"""What recording costs the traced program, beside its peers: `python tests/bench/hot_path.py`.

One process. A block of a tool lies between two blocks of the floor (two clock reads, what any span must do), in thread
CPU time with the garbage collector on; the figure is the median of the ratios of such neighbours, so that what else the
machine does cancels out. The work is pairs of nested spans of a name, an int that varies and a text. Exits with 1 if a
bar is not met.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

import rltrace
from rltrace.read.recording import Recording

OPERATIONS = 2000
"""Spans or samples in a block: one to ten milliseconds."""

ROUNDS = 8
BLOCKS = 25
"""The best of so many rounds counts, each the median of so many blocks: neighbours only make it worse."""

MILLION = 1_000_000

Block = Callable[[], int]
"""Does `OPERATIONS` and returns the thread's CPU nanoseconds."""


class Cost(NamedTuple):
    """Of one operation."""

    floors: float
    nanoseconds: float


class Bar(NamedTuple):
    """A promise and what was measured of it."""

    what: str
    measured: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


def floor(clock: Callable[[], int] = time.perf_counter_ns) -> int:
    began = time.thread_time_ns()
    for _ in range(OPERATIONS):
        clock()
        clock()
    return time.thread_time_ns() - began


def pairs_of(span: Callable[..., Any]) -> Block:
    """A block of spans that take keywords."""

    def block() -> int:
        began = time.thread_time_ns()
        for n in range(OPERATIONS // 2):
            with span("outer", bytes=n, dtype="bf16"), span("inner", bytes=n, dtype="bf16"):
                pass
        return time.thread_time_ns() - began

    return block


def positional_pairs_of(span: Callable[..., Any]) -> Block:
    def block() -> int:
        began = time.thread_time_ns()
        for n in range(OPERATIONS // 2):
            with span(n, "bf16"), span(n, "bf16"):
                pass
        return time.thread_time_ns() - began

    return block


def samples_of(counter: Callable[[str, float], None]) -> Block:
    def block() -> int:
        began = time.thread_time_ns()
        for n in range(OPERATIONS):
            counter("allocated_bytes", n)
        return time.thread_time_ns() - began

    return block


def cost_of(block: Block, rounds: int = ROUNDS) -> Cost:
    """Median ratio to the floor around it, in the best of some rounds."""
    return min(_round(block, BLOCKS) for _ in range(rounds))


def _round(block: Block, blocks: int) -> Cost:
    ratios, times = [], []
    for _ in range(blocks):
        before, spent, after = floor(), block(), floor()
        ratios.append(2 * spent / (before + after))
        times.append(spent / OPERATIONS)
    return Cost(statistics.median(ratios), statistics.median(times))


# ---------------------------------------------------------------- ours


def measure_ours(folder: Path) -> dict[str, Cost]:
    costs = {"span, disabled": cost_of(pairs_of(rltrace.span))}
    rltrace.start(folder, max_bytes=16 << 20)
    costs |= measure_recording()
    rltrace.stop()
    return costs


def measure_recording(rounds: int = ROUNDS) -> dict[str, Cost]:
    """In a process that records."""
    typed = rltrace.typed_span("typed", bytes=int, dtype=str)

    async def in_a_task(block: Block) -> Cost:
        return cost_of(block, rounds)

    return {
        "span": cost_of(pairs_of(rltrace.span), rounds),
        "typed span": cost_of(positional_pairs_of(typed), rounds),
        "counter": cost_of(samples_of(rltrace.counter), rounds),
        "span in an asyncio task": asyncio.run(in_a_task(pairs_of(rltrace.span))),
        "typed span in an asyncio task": asyncio.run(in_a_task(positional_pairs_of(typed))),
    }


def measure_a_million(folder: Path) -> list[Bar]:
    """CPU, memory and disk of a million spans in one go."""
    rltrace.start(folder)
    with rltrace.span("warm"):
        pass
    block, floor_ns, spent_ns = pairs_of(rltrace.span), 0, 0
    memory_before = _anonymous_bytes()
    for _ in range(MILLION // OPERATIONS):
        floor_ns += floor()
        spent_ns += block()
    growth = _anonymous_bytes() - memory_before
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    disk = sum(path.stat().st_size for path in process.folder.glob("*.seg"))
    assert sum(1 for _ in process.events()) == MILLION + 1 and process.lost_events == 0
    return [
        Bar("a million spans, CPU each", spent_ns / floor_ns, 14, "x floor"),
        Bar("a million spans, anonymous memory", growth / 1e6, 1.0, "MB"),
        Bar("a million spans, disk each", disk / MILLION, 75, "bytes"),
    ]


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon: this needs Linux 4.5 or newer")


# ---------------------------------------------------------------- peers


def measure_peers() -> tuple[dict[str, Cost], list[str]]:
    """Of those that are installed; the others are named."""
    costs, missing = {}, []
    peers = {
        "OpenTelemetry SDK, batch processor, exporter that does nothing": _opentelemetry,
        "viztracer, log_event": _viztracer_event,
        "viztracer, add_raw": _viztracer_raw,
        "torch record_function, no profiler": _record_function,
    }
    for name, make in peers.items():
        try:
            block, end = make()
        except ImportError as error:
            missing.append(f"{name}: {error}")
            continue
        costs[name] = cost_of(block, ROUNDS // 4)
        end()
    return costs, missing


def _opentelemetry() -> tuple[Block, Callable[[], object]]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Nowhere(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    start = provider.get_tracer("bench").start_as_current_span

    def span(name: str, **attributes: Any) -> Any:
        return start(name, attributes=attributes)

    return pairs_of(span), provider.shutdown


def _viztracer() -> Any:
    """Without the profile hook that its constructor installs: it would slow down every call, the floor's too."""
    from viztracer import VizTracer

    tracer = VizTracer(verbose=0, tracer_entries=1_000_000)
    tracer.start()
    tracer.enable_thread_tracing()
    sys.setprofile(None)
    return tracer


def _viztracer_event() -> tuple[Block, Callable[[], object]]:
    tracer = _viztracer()

    def span(name: str, **_: Any) -> Any:  # it takes no arguments
        return tracer.log_event(name)

    return pairs_of(span), lambda: _end_viztracer(tracer)


def _viztracer_raw() -> tuple[Block, Callable[[], object]]:
    tracer = _viztracer()
    add_raw, clock = tracer.add_raw, tracer.getts

    class Raw:
        __slots__ = ("args", "name", "start")

        def __init__(self, name: str, **args: Any) -> None:
            self.name = name
            self.args = args

        def __enter__(self) -> Raw:
            self.start = clock()
            return self

        def __exit__(self, *_: object) -> None:
            add_raw({"ph": "X", "name": self.name, "ts": self.start, "dur": clock() - self.start, "args": self.args})

    return pairs_of(Raw), lambda: _end_viztracer(tracer)


def _end_viztracer(tracer: Any) -> None:
    tracer.stop()
    tracer.clear()
    sys.setprofile(None)


def _record_function() -> tuple[Block, Callable[[], object]]:
    from torch.profiler import record_function

    def span(name: str, **args: Any) -> Any:
        return record_function(name, str(args["bytes"]))

    return pairs_of(span), lambda: None


# ---------------------------------------------------------------- what is promised


LIMITS = {"span": 13, "span in an asyncio task": 17, "typed span": 9, "span, disabled": 2.5, "counter": 3}
"""The most that each may cost, in floors."""


def bars_of(ours: dict[str, Cost], peers: dict[str, Cost]) -> list[Bar]:
    bars = [Bar(what, ours[what].floors, limit, "x floor") for what, limit in LIMITS.items()]
    for name, cost in peers.items():
        if name.startswith("OpenTelemetry"):
            cheaper = cost.floors / ours["span"].floors
            bars.append(Bar("span, cheaper than the OpenTelemetry SDK", cheaper, 12, "times", at_least=True))
    return bars


def show(ours: dict[str, Cost], peers: dict[str, Cost], bars: Iterable[Bar], missing: list[str]) -> None:
    console = Console(width=110)
    floor_ns = min(floor() for _ in range(50)) / OPERATIONS
    console.print(
        f"Python {platform.python_version()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; "
        f"floor (two clock reads) {floor_ns:.0f} ns"
    )
    costs = Table(
        "one span or sample", "ns", "x floor", "x span", title="Cost in the traced program", title_justify="left"
    )
    for name, cost in (ours | peers).items():
        prefix = "rltrace " if name in ours else ""
        relative = cost.floors / ours["span"].floors
        costs.add_row(prefix + name, f"{cost.nanoseconds:,.0f}", f"{cost.floors:.2f}", f"{relative:.2f}")
    console.print(costs)
    promises = Table("bar", "measured", "limit", "", title="Bars", title_justify="left")
    for bar in bars:
        sign = ">=" if bar.at_least else "<="
        verdict = "[green]met[/]" if bar.is_met else "[red]MISSED[/]"
        promises.add_row(bar.what, f"{bar.measured:.2f} {bar.unit}", f"{sign} {bar.limit:g}", verdict)
    console.print(promises)
    for line in missing:
        console.print(f"not measured: {line}")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        ours = measure_ours(Path(folder) / "hot")
        bars = measure_a_million(Path(folder) / "million")
        peers, missing = measure_peers()
        bars = bars_of(ours, peers) + bars
        show(ours, peers, bars, missing)
    return 0 if all(bar.is_met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
