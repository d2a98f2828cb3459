"""One tiny run, asked for every operator and every allocation of a step: what it recorded, and what it leaves alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from reference_runs import TINY, record

from rltrace.events import ALLOCATIONS_KEPT, OPERATOR, STEP, Span
from rltrace.read.recording import Recording

pytestmark = pytest.mark.run

PLACES = ("rank 0 worker", "rank 0 engine")

SAY_WHAT_IS_FROZEN = """
import gc, os, threading, time

def say():
    count = 0
    while not count:  # it takes a while to count them: once
        time.sleep(0.2)
        count = gc.get_freeze_count()
    place = {folder!r} + str(os.getpid())
    with open(place + ".new", "w") as file:
        file.write(str(count))
    os.replace(place + ".new", place)  # the process may end at any moment

threading.Thread(target=say, daemon=True).start()
"""
"""The `sitecustomize` of every process of the run."""

LEAST = 50_000
"""Objects of a process that has loaded torch."""


@pytest.fixture(scope="module")
def folder_of_said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each process says what is frozen in it, under its pid."""
    return tmp_path_factory.mktemp("said")


@pytest.fixture(scope="module")
def tiny(folder_of_said: Path, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    path = tmp_path_factory.mktemp("path")
    (path / "sitecustomize.py").write_text(SAY_WHAT_IS_FROZEN.format(folder=f"{folder_of_said}/"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)
        chosen = {"steps": [1]}
        return record(tmp_path_factory.mktemp("tiny"), ranks=1, steps=3, kernels=chosen, allocations=chosen, **TINY)


def test_operators_of_the_chosen_step(tiny: Recording) -> None:
    """Operators are recorded in the chosen step and lie inside it.

    In the workers and in the engines, and of no other step.
    """
    events = {
        process.place: [event for event in process.events() if isinstance(event, Span)] for process in tiny.processes
    }
    steps = {span.args["step"]: span for span in events["driver"] if span.name == STEP}
    for place in PLACES:
        operators = [span for span in events[place] if span.name.startswith(OPERATOR)]
        assert len(operators) > 50, place
        for span in operators:
            error_ns = span.args["error_ns"]
            assert steps[1].start_ns - error_ns <= span.start_ns <= span.end_ns <= steps[1].end_ns + error_ns
    assert {"op.aten::mm", "op.aten::_foreach_copy_"} <= {span.name for span in events["rank 0 worker"]}


def test_no_gpu_keeps_no_allocation(tiny: Recording) -> None:
    """Without a GPU, worker and engine say that no allocation was kept."""
    processes = {process.place: process for process in tiny.processes}
    for place in PLACES:
        assert processes[place].unavailable["allocations"] == "RuntimeError: this process uses no GPU"
        assert ALLOCATIONS_KEPT not in {event.name for event in processes[place].events()}


def test_start_up_objects_are_frozen(tiny: Recording, folder_of_said: Path) -> None:
    """In every process of a run, collections leave out what the start-up made.

    Full collections in the steps do not look at what torch and Ray brought.
    """
    pids = {process.place: process.pid for process in tiny.processes}
    frozen = {place: int((folder_of_said / str(pids[place])).read_text()) for place in ("driver", *PLACES)}
    assert all(count > LEAST for count in frozen.values()), frozen
