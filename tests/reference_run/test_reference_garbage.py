"""Full collections in the steps of a run are short: what torch and Ray brought is left out of them."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from reference_runs import TINY, record

from rltrace.events import COLLECTION, STEP, Span

COLLECT_ALL_THE_TIME = """
import gc, sys, threading, time

def collect():
    while True:
        time.sleep(0.2)
        gc.collect()

if "rltrace_reference" in " ".join(sys.orig_argv) or "default_worker" in " ".join(sys.orig_argv):
    threading.Thread(target=collect, daemon=True).start()
"""
"""The `sitecustomize` of every process of the run; a longer one comes to full collections by itself."""


@pytest.mark.run
def test_a_full_collection_in_a_step_does_not_look_at_what_the_start_up_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(COLLECT_ALL_THE_TIME)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    recording = record(tmp_path, steps=4, **TINY)
    spans = {
        process.place: [event for event in process.events() if isinstance(event, Span)]
        for process in recording.processes
    }
    began_ns = min(span.start_ns for span in spans["driver"] if span.name == STEP)
    for place in ("driver", "rank 0 worker", "rank 1 worker", "rank 0 engine", "rank 1 engine"):
        full = [span for span in spans[place] if span.name == COLLECTION and span.args["generation"] == 2]
        before = [span.seconds for span in full if span.start_ns < began_ns]
        inside = [span.seconds for span in full if span.start_ns > began_ns]
        assert before and max(before) > 0.02, place
        # One that takes less than 5 ms is not told at all.
        assert not inside or median(inside) < max(before) / 4, (place, inside, before)
