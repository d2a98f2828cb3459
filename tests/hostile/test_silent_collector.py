"""A collector that takes requests and never answers, beside a run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from otlp_server import Collector, grpc_collector, http_collector
from rltrace_exporters.otlp.exporter import Otlp
from test_live_export import GRPC, recorded, start, step_numbers, until

from rltrace.events import STEP, Span
from rltrace.read.recording import Recording
from rltrace.run.live_export import FLUSH_SECONDS

PROGRAM = Path(__file__).parents[1] / "programs" / "two_processes.py"


def test_nobody_waits_for_it(tmp_path: Path) -> None:
    """The program takes as long as without it, and the Recording has everything; the command ends after the limit, with
    a line that says how many spans were not sent."""
    collector = Collector()
    collector.delay_s = 60
    with http_collector(collector):
        options = ["--out", str(tmp_path / "run"), "--sample", "0", "--otlp", collector.url]
        program = [sys.executable, str(PROGRAM), "3", "200", "0.2"]
        words = [sys.executable, "-m", "rltrace", "exec", *options, "--", *program]
        done = subprocess.run(
            words, check=False, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60
        )
    events = [event for process in Recording.open(tmp_path / "run").processes for event in process.events()]
    steps = [event for event in events if isinstance(event, Span) and event.name == STEP]
    assert [one.args["step"] for one in steps] == [0, 1, 2]
    assert sum(one.seconds for one in steps) < FLUSH_SECONDS / 2
    assert sum(isinstance(event, Span) and event.name.startswith("call.") for event in events) == 600
    line = next(line for line in done.stderr.splitlines() if "were not" in line)
    assert "0 spans of 3 steps were sent, 617 were not" in line
    assert "`rltrace export RUN --to otlp` sends them" in line


def test_ten_thousand_a_second_and_a_collector_that_dies(tmp_path: Path) -> None:
    """At 10,000 spans a second the collector is killed, comes back slow, and recovers: what arrives is the same each
    time, the line says whether that is all, and a later export has every span."""
    collector = Collector()
    with grpc_collector(collector):
        url = collector.url
        process = start(tmp_path / "run", url, 20, 9_000, 0.9, **GRPC)
        until(lambda: step_numbers(collector))
    time.sleep(2)
    collector.delay_s = 0.3
    before = len(collector.requests)
    with grpc_collector(collector, int(url.rpartition(":")[2])):
        until(lambda: len(collector.requests) > before + 5)
        is_going_on = process.poll() is None
        collector.delay_s = 0
        _, err = process.communicate()
    assert is_going_on and "spans of" in err
    live = {one.span_id: one for one in collector.spans}
    assert all(live[one.span_id] == one for one in collector.spans) and len(live) > 10_000
    recording = Recording.open(tmp_path / "run")
    with http_collector(Collector()) as later:
        Otlp().send(recording, later.url)
    exported = {one.span_id for one in later.spans}
    assert len(exported) == len(later.spans) == 1 + sum(1 for _ in recorded(recording)) > 20 * 9_000
    assert live.keys() <= exported
    assert ("were not" in err or "was not" in err) == (live.keys() != exported)
