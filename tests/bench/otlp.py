"""What sending to a collector takes, and what a live export costs the program: `python tests/bench/otlp.py`; the
latter alone: `python tests/bench/otlp.py hot_path`.

The collector runs in a process of its own, on the same machine, and keeps what it gets. What `hot_path.py` measures is
measured in programs under `rltrace exec` that take turns: alone, with an export that a collector takes, takes slowly,
and that nobody takes.
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

ROOT = Path(__file__).parents[2]
SHIPPED = ("qwen3_8b_4gpu", "verl_8b_4gpu")
TURNS = 4
DEAD = "http://127.0.0.1:9"
PAUSE_SECONDS = 3.0
SLOW_SECONDS = 0.5
"""How long a slow collector takes for each answer."""


def serve(protocol: str, delay_s: str) -> None:
    """Be a collector: print the URL, then on each line of stdin how many spans came."""
    from otlp_server import Collector, grpc_collector, http_collector

    collector = Collector()
    collector.delay_s = float(delay_s)
    with (grpc_collector if protocol == "grpc" else http_collector)(collector):
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
    """Measure what is recorded and, maybe, sent: steps of some seconds, with pauses in which the export catches up."""
    from hot_path import measure_recording

    import rltrace

    found: dict[str, float] = {}
    for step in range(4):
        with rltrace.span("step", step=step):
            for what, cost in measure_recording(rounds=1).items():
                found[what] = min(cost.floors, found.get(what, cost.floors))
            time.sleep(PAUSE_SECONDS)
    print(json.dumps(found))


class Server:
    """A collector in a process of its own."""

    def __init__(self, protocol: str, delay_s: float = 0.0) -> None:
        words = [sys.executable, __file__, "serve", protocol, str(delay_s)]
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


def hot_path() -> bool:
    """Print what spans and counters cost in programs that take turns; return whether all bars are met."""
    from hot_path import LIMITS

    found: dict[str, list[dict[str, float]]] = {}
    with Server("grpc") as server, Server("grpc", SLOW_SECONDS) as slow, tempfile.TemporaryDirectory() as scratch:
        over_grpc = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
        ways: dict[str, tuple[list[str], dict[str, str]]] = {
            "alone": ([], {}),
            "sent": (["--otlp", server.url], over_grpc),
            "taken slowly": (["--otlp", slow.url], over_grpc),
            "nobody takes it": (["--otlp", DEAD], {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}),
        }
        for turn in range(TURNS):
            for name, (options, variables) in ways.items():
                found.setdefault(name, []).append(_floors(Path(scratch, f"{turn}-{name}"), options, variables))
        print(f"the collectors have {server.spans():,} and {slow.spans():,} spans")
    is_met = True
    for name, programs in found.items():
        for what in programs[0]:
            floors = [of_program[what] for of_program in programs]
            cost, spread = statistics.median(floors), f"{min(floors):.2f}-{max(floors):.2f}"
            print(f"{name}, {what}: {cost:.2f} x two clock reads ({spread}, {len(floors)} programs)")
            is_met &= cost <= LIMITS.get(what, cost)
    return is_met


def _floors(folder: Path, options: list[str], variables: dict[str, str]) -> dict[str, float]:
    program = [sys.executable, __file__, "hot"]
    words = [sys.executable, "-m", "rltrace", "exec", "--out", str(folder), "--sample", "0", *options, "--", *program]
    done = subprocess.run(words, env=environment(**variables), stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(arguments: list[str]) -> int:
    """Run all of it, or one part; 1 if a bar is not met."""
    if arguments[:1] == ["serve"]:
        serve(*arguments[1:])
        return 0
    if arguments[:1] == ["hot"]:
        hot()
        return 0
    if arguments[:1] != ["hot_path"]:
        for protocol in ("grpc", "http/protobuf"):
            throughput(protocol)
            sending(protocol)
    return 0 if hot_path() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
