"""`--record-steps` of a loop that marks no steps: in full only those that are asked for, and all steps are inferred."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from helped_loop import helped_loop
from traced_runs import TracedRun, run_traced

from rltrace.analysis import summarize
from rltrace.events import DETAIL, STEP, Span
from rltrace.read.recording import Process

pytestmark = pytest.mark.run

TRAINED = """
    import os
    import time
    import rltrace
    import torch
    child = os.fork()  # two ranks, of which each has steps of its own
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(6):
        with rltrace.span("load", number=number):
            batch = torch.ones(3, 8)
            time.sleep(0.02)
        for _ in range(2):
            loss = model(batch).sum()
            with rltrace.span("own", number=number):
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if child:
        os.waitpid(child, 0)
"""

GENERATED = """
    import rltrace
    import torch
    from rltrace.instrument.torch.generation import begin_generation, end_generation
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(5):
        generation = begin_generation("an engine")  # as hooks on engines do
        with rltrace.span("own", number=number):
            end_generation(generation, None)
        with rltrace.span("own", number=number), torch.no_grad():
            model(torch.ones(3, 8))
        for _ in range(2):
            model(torch.ones(3, 8)).sum().backward()
            optimizer.step()
        with rltrace.span("own", number=number):
            optimizer.zero_grad()
"""

MARKED = """
    import rltrace
    import torch
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(4):
        with rltrace.span("step"):
            with rltrace.span("own", number=number):
                model(torch.ones(3, 8)).sum().backward()
            optimizer.step()
"""

GENERATE = """
    from rltrace.instrument.torch.generation import begin_generation, end_generation
    generation = begin_generation("an engine")
    with rltrace.span("own", number=number):
        end_generation(generation, None)
"""

LATER = """
    import os
    import rltrace
    to_worker, to_driver = os.pipe(), os.pipe()
    import torch
    if child := os.fork():
        os.read(to_driver[0], 1)
        for number in range(4):
            with rltrace.span("step"), rltrace.span("asked", number=number):
                os.write(to_worker[1], b"1")
                os.read(to_driver[0], 1)
        os.waitpid(child, 0)
    else:
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(-1, 4):  # the first one warms up
            if number >= 0:
                os.read(to_worker[0], 1)
            model(torch.ones(3, 8)).sum().backward()
            optimizer.step()
            model(torch.ones(3, 8))
            with rltrace.span("scored", number=number):
                pass
            os.write(to_driver[1], b"1")
"""

WATCHED = helped_loop(4, """
    with rltrace.phase("reward"), rltrace.span("scored", number=number):
        pass
""")  # fmt: skip


def in_full(process: Process, name: str) -> Counter[int]:
    """How often a process recorded its own span of a name, by step."""
    events = [event for event in process.events() if isinstance(event, Span)]
    return Counter(event.args["number"] for event in events if event.name == name)


def steps_of(process: Process) -> dict[int, bool]:
    """Whether each inferred step of a process is in brief."""
    steps = [event for event in process.events() if isinstance(event, Span) and event.name == STEP]
    assert all(one.is_inferred for one in steps)
    return {one.args["step"]: one.args.get("brief", False) for one in steps}


def recorded(tmp_path: Path, program: str, steps: str) -> TracedRun:
    done = run_traced(tmp_path, program, imported="torch", RLTRACE_RECORD_STEPS=steps)
    assert done.returncode == 0, done.err
    return done


def test_a_training_loop(tmp_path: Path) -> None:
    """Of the steps of a loop that trains, each rank records the chosen ones in full, with what prepares them."""
    done = recorded(tmp_path, TRAINED, "2,every:4")
    assert len(done.recording.processes) == 2
    for process in done.recording.processes:
        assert steps_of(process) == {step: step not in (0, 2, 4) for step in range(6)}
        assert in_full(process, "own") == {0: 2, 2: 2, 4: 2}
        assert in_full(process, "load") == {2: 1, 4: 1}, "what comes before the first step is in no step"
    assert Counter(span.name for span in done.spans())["actor.update"] == 12
    summary = summarize(done.recording)
    assert {step.step for step in summary.steps if not step.brief} == {0, 2, 4}
    assert {step.brief_because for step in summary.steps if step.brief} == {"not chosen"}
    assert summary.steady is not None and set(summary.steady.steps) == {2, 4}
    assert not summary.losses


def test_a_loop_that_generates(tmp_path: Path) -> None:
    """A step goes from one generation to the next, however often the optimizer steps in it."""
    (process,) = recorded(tmp_path, GENERATED, "1,3").recording.processes
    assert steps_of(process) == {0: True, 1: False, 2: True, 3: False, 4: True}
    assert in_full(process, "own") == {1: 3, 3: 3}


def test_no_step_is_chosen(tmp_path: Path) -> None:
    """If the run has none of the chosen steps, all of its steps are in brief."""
    done = recorded(tmp_path, GENERATED, "100")
    (process,) = done.recording.processes
    assert steps_of(process) == dict.fromkeys(range(5), True) and not in_full(process, "own")
    assert [span.args["full"] for span in done.spans(DETAIL)] == [False]


def test_a_loop_that_marks_its_steps(tmp_path: Path) -> None:
    """Steps that the program marks are the only ones: nothing is inferred, and nothing stays for that."""
    done = recorded(tmp_path, MARKED, "2")
    (process,) = done.recording.processes
    assert in_full(process, "own") == {2: 1}
    assert [span.args.get("brief", False) for span in done.spans(STEP)] == [True, True, False, True]
    assert Counter(span.name for span in done.spans())["model.forward"] == 1 and not done.spans(DETAIL)


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_process_that_only_generates(tmp_path: Path, asks_first: bool) -> None:
    """What generates for a loop in another process is in its first step with it, and not for the rest of the run."""
    program = helped_loop(4, GENERATE, asks_first=asks_first)
    processes = recorded(tmp_path, program, "0,2").recording.processes
    assert Counter({0: 1, 2: 1}) in [in_full(process, "own") for process in processes]


def test_a_process_whose_run_marks_steps_later(tmp_path: Path) -> None:
    """What trains before anybody has marked a step goes by the marked steps of another process from then on."""
    processes = recorded(tmp_path, LATER, "2").recording.processes
    assert len(processes) == 2
    for name in ("asked", "scored"):
        assert sum((in_full(process, name) for process in processes), Counter()) == {2: 1}


def test_other_processes_follow(tmp_path: Path) -> None:
    """A process that trains nothing records in full while a chosen step of the loop runs that it works for."""
    done = recorded(tmp_path, WATCHED, "1,3")
    scored = [in_full(process, "scored") for process in done.recording.processes]
    assert Counter({1: 1, 3: 1}) in scored
    assert len(done.spans("reward")) == 4
