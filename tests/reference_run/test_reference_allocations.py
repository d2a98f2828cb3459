"""`allocations: {steps: [1]}` in a run without a GPU: the run is the same, and every process says why it kept none."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference_runs import TINY, record

from rltrace.events import ALLOCATIONS_KEPT


@pytest.mark.run
def test_without_a_gpu_worker_and_engine_say_that_none_was_kept(tmp_path: Path) -> None:
    recording = record(tmp_path, steps=2, ranks=1, allocations={"steps": [1]}, **TINY)
    processes = {process.place: process for process in recording.processes}
    for place in ("rank 0 worker", "rank 0 engine"):
        assert processes[place].unavailable["allocations"] == "RuntimeError: this process uses no GPU"
        assert ALLOCATIONS_KEPT not in {event.name for event in processes[place].events()}
