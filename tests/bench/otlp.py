"""What sending to a collector takes, and what a live export costs the program: `python tests/bench/otlp.py`.

The collector runs in a process of its own, on the same machine, and keeps what it gets. The cost of a span is measured
as `hot_path.py` does it, in programs under `rltrace exec` that take turns: alone, with an export that a collector
takes, and with one that nobody takes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHIPPED = ("qwen3_8b_4gpu", "verl_8b_4gpu")
TURNS = 4
DEAD = "http://127.0.0.1:9"


def serve(protocol: str) -> None:
    """Be a collector: print the URL, then on each line of stdin how many spans came."""
    from otlp_server import Collector, grpc_collector, http_collector

    with (grpc_collector if protocol == "grpc" else http_collector)(Collector()) as collector:
        print(collector.url, flush=True)
        for _ in sys.stdin:
            print(
                sum(
                    len(scope.spans)
                    for one in collector.requests
                    for of in one.resource_spans
                    for scope in of.scope_spans
                )
            )
            sys.stdout.flush()


def hot() -> None:
    """Measure a span while it is recorded and, maybe, sent: a step of three seconds, of which each name is one."""
    from hot_path import cost_of, pairs_of

    import rltrace

    found = []
    for step in range(3):
        with rltrace.span("step", step=step):
            found.append(cost_of(pairs_of(rltrace.span), rounds=4).floors)
    print(json.dumps(min(found)))


class Server:
    """A collector in a process of its own."""

    def __init__(self, protocol: str) -> None:
        words = [sys.executable, __file__, "serve", protocol]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
        assert self._process.stdin and self._process.stdout
        self._in, self._out = self._process.stdin, self._process.stdout
        self.url = self._out.readline().strip()

    def spans(self) -> int:
        """How many spans it has."""
        self._in.write("\n")
        self._in.flush()
        return int(self._out.readline())

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._in.close()
        self._process.wait()


def environment(**more: str) -> dict[str, str]:
    """Where our programs find ours."""
    path = [str(ROOT / "tests" / "exporters"), str(ROOT / "tests" / "bench"), str(ROOT), str(ROOT / "exporters")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **more}


def throughput(protocol: str) -> None:
    """Print how fast Recordings are read and sent."""
    sys.path[:0] = environment()["PYTHONPATH"].split(os.pathsep)
    from rltrace_exporters.otlp.exporter import Otlp, made

    from rltrace.read.recording import Recording

    os.environ["OTEL_EXPORTER_OTLP_PROTOCOL"] = protocol
    for name in SHIPPED:
        recording = Recording.open(ROOT / "examples" / "recordings" / f"{name}.zip")
        records = sum(1 for process in recording.processes for _ in process.events())
        with Server(protocol) as server:
            began, cpu = time.perf_counter(), time.process_time()
            print(f"{name}, {protocol}: {Otlp().send(recording, server.url)}")
            whole_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
            began = time.perf_counter()
            made(recording)
            read_s = time.perf_counter() - began
            print(f"  {records:,} records at {records / read_s:,.0f}/s; {whole_s:.2f} s in all, {cpu_s:.2f} s of CPU")
            assert server.spans() > 1_000


def sending(protocol: str) -> None:
    """Print how many spans a second are encoded and sent, once they are made."""
    from rltrace_exporters.otlp.collector import Collector
    from rltrace_exporters.otlp.exporter import _all_spans, batched, made

    from rltrace.read.recording import Recording

    spans = list(_all_spans(made(Recording.open(ROOT / "examples" / "recordings" / "verl_8b_4gpu.zip"))[0]))
    with Server(protocol) as server:
        os.environ |= {"OTEL_EXPORTER_OTLP_ENDPOINT": server.url, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
        collector = Collector()
        rates = []
        for _ in range(TURNS):
            began = time.perf_counter()
            assert all(collector.send_spans(batch) for batch in batched(spans))
            rates.append(len(spans) / (time.perf_counter() - began))
        assert server.spans() == TURNS * len(spans)
        print(f"{protocol}: {max(rates):,.0f} spans/s sent, in requests of 512")


def hot_path() -> None:
    """Print what a span costs in programs that take turns."""
    found: dict[str, list[float]] = {"alone": [], "sent": [], "nobody takes it": []}
    with Server("grpc") as server, tempfile.TemporaryDirectory() as scratch:
        ways: dict[str, tuple[list[str], dict[str, str]]] = {
            "alone": ([], {}),
            "sent": (["--otlp", server.url], {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}),
            "nobody takes it": (["--otlp", DEAD], {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}),
        }
        for turn in range(TURNS):
            for name, (options, variables) in ways.items():
                folder = Path(scratch, f"{turn}-{name.split()[0]}")
                floors = _floors(folder, options, variables)
                found[name].append(floors)
        print(f"the collector has {server.spans():,} spans")
    for name, floors in found.items():
        spread = f"{min(floors):.2f}-{max(floors):.2f}"
        print(f"{name}: {statistics.median(floors):.2f} x two clock reads ({spread}, {len(floors)} programs)")


def _floors(folder: Path, options: list[str], variables: dict[str, str]) -> float:
    program = [sys.executable, __file__, "hot"]
    words = [sys.executable, "-m", "rltrace", "exec", "--out", str(folder), "--sample", "0", *options, "--", *program]
    done = subprocess.run(words, env=environment(**variables), stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout))


def main(arguments: list[str]) -> Any:
    """Run all of it, or one part."""
    if arguments[:1] == ["serve"]:
        return serve(arguments[1])
    if arguments[:1] == ["hot"]:
        return hot()
    for protocol in ("grpc", "http/protobuf"):
        throughput(protocol)
        sending(protocol)
    return hot_path()


if __name__ == "__main__":
    main(sys.argv[1:])
