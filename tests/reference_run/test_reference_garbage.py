"""Full collections in the steps of a run do not look at what torch and Ray brought."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference_runs import TINY, record

SAY_WHAT_IS_FROZEN = """
import gc, os, threading, time

def say():
    while True:
        time.sleep(0.2)
        with open({folder!r} + str(os.getpid()), "w") as file:
            file.write(str(gc.get_freeze_count()))

threading.Thread(target=say, daemon=True).start()
"""
"""The `sitecustomize` of every process of the run."""

LEAST = 50_000
"""Objects of a process that has loaded torch."""


@pytest.mark.run
def test_what_the_start_up_made_is_left_out_of_collections_in_every_process_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (said := tmp_path / "said").mkdir()
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(SAY_WHAT_IS_FROZEN.format(folder=f"{said}/"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    recording = record(tmp_path, steps=8, **TINY)
    pids = {process.place: process.pid for process in recording.processes}
    places = ("driver", "rank 0 worker", "rank 1 worker", "rank 0 engine", "rank 1 engine")
    frozen = {place: int((said / str(pids[place])).read_text()) for place in places}
    assert all(count > LEAST for count in frozen.values()), frozen
