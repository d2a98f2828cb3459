"""A collector that takes requests and never answers, beside a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from otlp_server import Collector, http_collector

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
