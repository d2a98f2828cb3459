"""`rltrace exec --kernels 3`: each process has every operator of that step, by the real profiler, and of no other.

Without a GPU the profiler sees operators only; what a kernel says of its launch is read here from a stand-in's events,
and on a real GPU in `tests/gpu/test_gpu_kernels.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helped_loop import helped_loop
from recordings import Written, span
from test_summary_screen import screen
from torch.autograd import DeviceType
from traced_runs import TracedRun, run_traced

from rltrace.analysis import summarize
from rltrace.events import KERNELS_KEPT, KERNELS_WRITTEN, STEP, Span, kernels_of
from rltrace.hooks import boundaries
from rltrace.hooks.boundaries import Boundary
from rltrace.instrument.torch.loop_boundaries import GENERATION, LOG_PROBS, UPDATE
from rltrace.instrument.torch.loop_steps import LoopSteps
from rltrace.read.recording import Process, Recording
from rltrace.record.torch import kernels
from rltrace.record.torch.kernels import GAVE_WAY, Launches

pytestmark = pytest.mark.run

MM = "op.aten::mm"


def spans_of(process: Process, name: str) -> list[Span]:
    return sorted((e for e in process.events() if isinstance(e, Span) and e.name == name), key=lambda one: one.start_ns)


def inside(spans: list[Span], around: Span) -> list[Span]:
    """Those that lie in a step, within the error that each of them states."""
    assert around.end_ns is not None
    return [
        one for one in spans
        if around.start_ns - one.args["error_ns"] <= one.start_ns and one.end_ns <= around.end_ns + one.args["error_ns"]
    ]  # fmt: skip


# ---- a loop that marks its steps --------------------------------------------------------------------------------

MARKED = """
    import gc
    import threading
    import rltrace
    import torch
    from torch.profiler import ProfilerActivity, profile

    def multiply(times):
        for _ in range(times):
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))

    def own():
        return profile(activities=[ProfilerActivity.CPU])

    def step(number):
        with rltrace.span("step", step=number):
            multiply(2)
            if number == 2:
                thread = threading.Thread(target=multiply, args=(5,))
                thread.start()
                thread.join()
            if number == 5:
                with own() as theirs:
                    multiply(3)
                print(sum(event.name == "aten::mm" for event in theirs.events()))
            if number == 7:
                raise ValueError

    for number in range(4):
        step(number)
    with own() as theirs:
        step(4)
    print(sum(event.name == "aten::mm" for event in theirs.events()))
    step(5)
    try:
        step(7)
    except ValueError:
        pass
    step(8)
    with own() as theirs:
        multiply(1)
    print(sum(event.name == "aten::mm" for event in theirs.events()))
    print(gc.get_freeze_count() > 0)
"""


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    done = run_traced(tmp_path_factory.mktemp("marked"), MARKED, imported="torch", RLTRACE_KERNELS="2,4,5,7,99")
    assert done.returncode == 0, done.err
    return done


@pytest.fixture(scope="module")
def loop(marked: TracedRun) -> Process:
    (process,) = marked.recording.processes
    return process


def test_only_chosen_steps_have_operators(loop: Process) -> None:
    """Each operator of a chosen step lies in it, on the Recording's clock, whichever thread calls it; no other step has
    any."""
    steps = {one.args["step"]: one for one in spans_of(loop, STEP)}
    found = spans_of(loop, MM)
    assert {number: len(inside(found, step)) for number, step in steps.items()} == {
        0: 0, 1: 0, 2: 7, 3: 0, 4: 0, 5: 2, 7: 2, 8: 0,
    }  # fmt: skip
    assert len(found) == 11 and len({(one.thread, one.task) for one in inside(found, steps[2])}) == 2


def test_what_was_recorded_is_said(loop: Process) -> None:
    """A span around each part says of which step it is, how many operators it has and how far off their times are."""
    whole = spans_of(loop, KERNELS_KEPT)
    assert [one.args["step"] for one in whole] == [2, 5, 7] and all(one.args["kernels"] == 0 for one in whole)
    operators = [one for one in loop.events() if isinstance(one, Span) and one.name.startswith("op.")]
    assert sum(one.args["operators"] for one in whole) == len(operators)
    assert {one.args["error_ns"] for one in operators} == {one.args["error_ns"] for one in whole}
    assert all(one.args["error_ns"] < 1_000_000 for one in whole)
    assert len(spans_of(loop, KERNELS_WRITTEN)) == 3


def test_programs_own_profiler_goes_first(marked: TracedRun, loop: Process) -> None:
    """A profiler of the program's own sees all that it would see; the summary says what we lack for it."""
    assert marked.out.split()[:3] == ["2", "3", "1"]
    assert "own profiler is active" in loop.unavailable[kernels_of(4)] and loop.unavailable[kernels_of(5)] == GAVE_WAY
    missed = {one.step: one.reason for one in summarize(marked.recording).kernels_missed}
    assert missed == {**{step: loop.unavailable[kernels_of(step)] for step in (4, 5)}, 99: "no such step has begun"}
    text = " ".join(screen(marked.recording))
    assert "kernels of step 99 were not recorded: no such step has begun" in text
    assert "no chosen step's kernels were recorded" not in text


def test_what_the_program_froze_stays_frozen(marked: TracedRun) -> None:
    """Writing a step thaws nothing: the Python of `warm_python.py` has frozen what it imported."""
    assert marked.out.split()[3:] == ["True"]


def test_a_process_that_was_killed_says_so(tmp_path: Path) -> None:
    """Kernels that a process recorded and did not live to write are missed; those of a live one are on their way."""
    written = Written(tmp_path / "run").process("one", span("step", 1, 2, step=3), kernel_steps=[3])
    file = next((written.folder / "processes").glob("*/process.jsonl"))
    with file.open("a") as lines:
        lines.write(json.dumps({"kind": "kernels", "step": 3}) + "\n")
    (missed,) = summarize(Recording.open(written.folder)).kernels_missed
    assert (missed.step, missed.processes) == (3, ["process"]) and "before they were written" in missed.reason


# ---- a loop that marks nothing ----------------------------------------------------------------------------------

UNMARKED = """
    import os
    import torch
    child = os.fork()  # two ranks, of which each has steps of its own
    actor, critic = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (actor, critic)]
    for number in range(5):
        for model, optimizer in zip((actor, critic), optimizers):
            for _ in range(1 + number):
                model(torch.ones(3, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    if child:
        os.waitpid(child, 0)
"""


def test_inferred_steps_are_chosen_too(tmp_path: Path) -> None:
    """Of a loop that marks no steps, the step is recorded that the reader infers, in each process."""
    done = run_traced(tmp_path, UNMARKED, imported="torch", RLTRACE_KERNELS="3")
    assert done.returncode == 0, done.err
    assert len(done.recording.processes) == 2
    for process in done.recording.processes:
        steps = {one.args["step"]: one for one in spans_of(process, STEP)}
        assert len(steps) == 5 and all(one.is_inferred for one in steps.values())
        forwards = spans_of(process, "op.aten::linear")
        assert len(forwards) == len(inside(forwards, steps[3])) == 8
        assert len(spans_of(process, "op.aten::add_")) >= 4  # the optimizers'
        assert [one.args["step"] for one in spans_of(process, KERNELS_KEPT)] == [3]
    assert summarize(done.recording).kernels_missed == []


AHEAD = """
    import os
    import torch
    ahead, behind = os.pipe(), os.pipe()
    child = os.fork()  # two ranks, of which the parent is a step ahead
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(4):
        if not child and number == %(chosen)d - 1:
            os.read(ahead[0], 1)
        for _ in range(1 + number):
            model(torch.ones(3, 8)).sum().backward()
        if child and number == %(chosen)d:
            os.write(ahead[1], b"1")
            os.read(behind[0], 1)
        if not child and number == %(chosen)d - 1:
            os.write(behind[1], b"1")
        optimizer.step()
        optimizer.zero_grad()
    if child:
        os.waitpid(child, 0)
"""


@pytest.mark.parametrize("chosen", [1, 3])
def test_a_rank_ahead_does_not_begin_the_steps_of_another(tmp_path: Path, chosen: int) -> None:
    """A rank that reaches a step first does not make the others record the end of the step before."""
    done = run_traced(tmp_path, AHEAD % {"chosen": chosen}, imported="torch", RLTRACE_KERNELS=str(chosen))
    assert done.returncode == 0, done.err
    for process in done.recording.processes:
        step = next(one for one in spans_of(process, STEP) if one.args["step"] == chosen)
        forwards = spans_of(process, "op.aten::linear")
        assert len(forwards) == len(inside(forwards, step)) == chosen + 1
    assert summarize(done.recording).kernels_missed == []


START_ENGINE = """
    from rltrace.hooks.boundaries import Boundary, reached
    reached(Boundary(("rollout.load",), is_end=False))  # as a hook on an engine tells of its start-up
    reached(Boundary(("rollout.load",)))
"""
USE_ENGINE = """
    reached(Boundary(("cumem.map",), is_end=False))
    for _ in range(1 + number):
        torch.ones(3, 8).sigmoid()
"""
ENGINE = helped_loop(3, USE_ENGINE, START_ENGINE)


def test_an_engine_follows_the_steps_of_its_loop(tmp_path: Path) -> None:
    """An engine that loads its weights begins no step: it has steps when the loop that asks it has them."""
    done = run_traced(tmp_path, ENGINE, imported="torch", RLTRACE_KERNELS="0")
    assert done.returncode == 0, done.err
    of_process = {
        len(spans_of(one, "op.aten::sigmoid")): len(spans_of(one, "op.aten::linear"))
        for one in done.recording.processes
    }
    assert of_process == {0: 1, 1: 0}


def begins(loop: LoopSteps, *phases: str) -> list[int | None]:
    """The step that runs as each of these phases begins."""
    return [loop.reaches(Boundary((phase,), is_end=False)) for phase in phases]


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Nobody has told of a phase; returns what tells of one."""
    monkeypatch.setattr(boundaries, "_told", False)
    return lambda: monkeypatch.setattr(boundaries, "_told", True)


def test_a_generation_behind_an_update_begins_a_step(untold: Callable[[], None]) -> None:
    """With generations a step goes from one behind an update to the next, however many updates it has."""
    loop = LoopSteps()
    assert begins(loop, GENERATION, LOG_PROBS, GENERATION, UPDATE) == [0, 0, 0, 0]
    assert [loop.stepped(1), loop.stepped(1)] == [0, 0]
    assert begins(loop, LOG_PROBS, GENERATION, UPDATE) == [0, 1, 1] and loop.stepped(1) == 1
    assert begins(loop, GENERATION) == [2] and loop.are_known
    untold()
    assert begins(loop, UPDATE) == [None] and not loop.are_known


def test_what_comes_before_begins_no_step(untold: Callable[[], None]) -> None:
    """A model that is built, an engine that loads and one that wakes up are before the first step, or between two."""
    loop = LoopSteps()
    assert begins(loop, "actor.build", "rollout.load", "rollout.capture") == [None, None, None]
    assert begins(loop, UPDATE) == [0] and loop.stepped(1) is None
    assert begins(loop, "cumem.map", "rollout.wake_weights", UPDATE) == [None, None, 1]


def test_the_rarest_optimizer_ends_a_step(untold: Callable[[], None]) -> None:
    """Without generations a step ends with the optimizer that steps most rarely; from the second step on that is
    known."""
    loop = LoopSteps()
    assert begins(loop, UPDATE) == [0] and loop.stepped("actor") is None
    begins(loop, UPDATE)
    assert loop.stepped("critic") is None
    for step in (1, 2, 3):
        for optimizer in ("actor", "actor", "critic"):
            assert begins(loop, UPDATE) == [step]
            assert loop.stepped(optimizer) == (None if optimizer == "critic" else step)


# ---- processes without steps of their own -----------------------------------------------------------------------

WORKERS = """
    import multiprocessing, os, sys
    import rltrace

    def work(pipe, name):
        import torch
        rltrace.identify(name=name)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while pipe.recv():
            with rltrace.phase("actor.update"):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            pipe.send(1)

    if __name__ == "__main__":
        rltrace.identify(name="driver")
        pipe, other = multiprocessing.Pipe()
        worker = multiprocessing.get_context("spawn").Process(target=work, args=(other, "worker"))
        worker.start()
        for step in range(4):
            with rltrace.span("step", step=step):
                pipe.send(1)
                pipe.recv()
        pipe.send(0)
        worker.join()
"""


def test_a_worker_follows_the_steps_of_its_driver(tmp_path: Path) -> None:
    """A worker records the step that its driver runs, from its first phase in it on, though its own optimizer steps."""
    done = run_traced(tmp_path, WORKERS, RLTRACE_KERNELS="2")
    assert done.returncode == 0, done.err
    processes = {process.name: process for process in done.recording.processes}
    (step,) = [one for one in spans_of(processes["driver"], STEP) if one.args["step"] == 2]
    forwards = spans_of(processes["worker"], "op.aten::linear")
    assert len(forwards) == len(inside(forwards, step)) == 1
    assert "torch" in processes["driver"].unavailable[kernels_of(2)]  # it has not imported it
    assert not any("kernels of step" in line for line in screen(done.recording))


# ---- the option, and without it ---------------------------------------------------------------------------------


def test_the_option_reaches_all_processes(tmp_path: Path) -> None:
    """`exec --kernels` takes the grammar of `--allocations`, and each process hears of each step."""
    cli = [sys.executable, "-c", "from rltrace.cli import main; main()", "exec"]
    program = "import os, msgspec; print(os.environ['RLTRACE_KERNELS'])"
    words = ["--out", str(tmp_path / "run"), "--sample", "0", "--kernels", "3,5-7", "--", sys.executable, "-c", program]
    done = subprocess.run([*cli, *words], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "3,5,6,7\n"
    (process,) = Recording.open(tmp_path / "run").processes
    assert process.kernel_steps == [3, 5, 6, 7]
    bad = subprocess.run([*cli, "--kernels", "every:5", "--", "true"], check=False, capture_output=True, text=True)
    assert bad.returncode == 2 and "'every:5' is neither a number nor a range" in bad.stderr


def test_without_the_option_there_is_no_hook(tmp_path: Path) -> None:
    """Where no step is chosen, nothing is watched, and the profiler is as it was."""
    source = """
        import rltrace
        import torch
        from torch.autograd.profiler import profile
        print(hasattr(profile._prepare_trace, "__wrapped__"), type(rltrace.span("step")).__name__)
    """
    done = run_traced(tmp_path, source, imported="torch")
    assert done.out == "False LiveSpan\n", done.err
    assert not any("profiler" in target for target in done.hooks())


# ---- what a kernel says of its launch ---------------------------------------------------------------------------


class Event(SimpleNamespace):
    """An event as torch.profiler has it: of the host, or of a GPU."""

    def __getattr__(self, name: str) -> Callable[[], Any]:
        return lambda: self.said.get(name, 0)


def event(name: str, start_ns: int, end_ns: int, *, on: str = "CPU", **said: Any) -> Event:
    times = {"start_ns": start_ns, "duration_ns": end_ns - start_ns}
    return Event(said={"name": name, "device_type": getattr(DeviceType, on), **times, **said})


def test_a_kernel_names_its_launch_and_its_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel says how long before it was launched, and in which operator; what repeats a range on the GPU is none."""
    events = [
        event("aten::mm", 1000, 2000, correlation_id=7, start_thread_id=1),
        event("cudaLaunchKernel", 1200, 1300, correlation_id=70, start_thread_id=1),
        event("gemm", 5000, 6000, on="CUDA", correlation_id=70, linked_correlation_id=7, device_resource_id=13),
        event("Memset", 6000, 6100, on="CUDA", correlation_id=99, device_resource_id=13),
        event("a range", 5000, 6000, on="CUDA", is_user_annotation=True),
    ]
    launches = Launches.of(events[:2])
    assert launches.said(events[2]) == {"behind_host_ns": 3800, "operator": "aten::mm"}
    assert launches.said(events[3]) == {}
    written: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(kernels.spans, "automatic_span_at", lambda name, *_, **args: written.append((name, args)))
    marks = [event(kernels.MARK, at, at + 10) for at in (0, 20, 8000, 8020)]
    results = SimpleNamespace(events=lambda: [*marks, *events])
    profile = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
    windows = [(at, at + 10) for at in (0, 20, 8000, 8020)]
    profiling = kernels._Profiling(profile, {"step": 3}, 0, has_device=True, windows=windows)
    assert kernels._write(profiling, 9000) is None
    assert [name for name, _ in written] == [
        "op.aten::mm", "op.cudaLaunchKernel", "kernel.gemm", "kernel.Memset", KERNELS_KEPT,
    ]  # fmt: skip
    assert written[2][1] == {"lane": 14, "error_ns": 1, "behind_host_ns": 3800, "operator": "aten::mm"}
    assert written[-1][1]["step"] == 3 and (written[-1][1]["operators"], written[-1][1]["kernels"]) == (2, 2)
    results.events = lambda: marks
    assert kernels._write(profiling, 9000) == kernels.NO_KERNELS
