"""`rltrace exec --allocations 3`: each process keeps that step, from its first edge in it to its first behind, once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from recordings import Written, sample, span
from test_summary_screen import screen
from traced_runs import TracedRun, run_ranks_traced, run_traced

from rltrace.analysis import summarize
from rltrace.analysis.allocations import BEHIND, GONE
from rltrace.events import (
    ALLOCATIONS,
    ALLOCATIONS_KEPT,
    ALLOCATIONS_RESERVED,
    ALLOCATIONS_WRITTEN,
    NO_GPU,
    STEP,
    Span,
    allocations_of,
)
from rltrace.events import Counter as Sample
from rltrace.read.recording import Process, Recording
from rltrace.record import allocation_steps, spans
from rltrace.record.allocation_steps import RunningSteps

pytestmark = pytest.mark.run

HERE = Path(__file__).parents[1]
CLI = [sys.executable, "-c", "from rltrace.cli import main; main()"]


@pytest.fixture(autouse=True, scope="module")
def can_pretend() -> Iterator[None]:
    """Programs can import what pretends to use a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
        yield


def run(tmp_path: Path, source: str, allocations: str = "2") -> TracedRun:
    """A program in which torch is imported."""
    return run_traced(tmp_path, source, imported="torch", RLTRACE_ALLOCATIONS=allocations)


def kept(process: Process) -> list[Span]:
    """The parts of which a process has every allocation."""
    return [event for event in process.events() if isinstance(event, Span) and event.name == ALLOCATIONS_KEPT]


def named(recording: Recording, name: str) -> Process:
    """The process of that name."""
    (process,) = [process for process in recording.processes if process.name == name]
    return process


def step_of(recording: Recording, number: int) -> Span:
    """The span of a step, of the first process that has it."""
    events = [event for process in recording.processes for event in process.events()]
    steps = [e for e in events if isinstance(e, Span) and e.name == STEP and e.args.get("step") == number]
    return min(steps, key=lambda step: step.start_ns)


def missed(recording: Recording) -> dict[str, str]:
    """Why, by process, none was kept; by step where that is why."""
    found = summarize(recording).allocations_missed
    return {name: one.reason for one in found for name in one.processes or [f"step {one.step}"]}


# ---- a loop of one process --------------------------------------------------------------------------------------

LOOP = """
    import os, signal, sys
    import rltrace
    from pretended_gpu import Tensor, come_up
    come_up(has_text={has_text})
    rltrace.start(name="loop")
    held = Tensor(1000)
    def body(step):
        tensor = Tensor(10 ** step)
        if step == 2:
            {in_step}
        del tensor
    try:
        for step in range(4):
            with rltrace.span("step", step=step):
                body(step)
    except ValueError:
        pass
    {after}
"""


def loop(
    tmp_path: Path, *, in_step: str = "pass", after: str = "pass", steps: str = "2", has_text: bool = True
) -> TracedRun:
    return run(tmp_path, LOOP.format(in_step=in_step, after=after, has_text=has_text), steps)


@pytest.mark.parametrize("in_step", ["pass", "raise ValueError", "sys.exit(0)"])
def test_chosen_step_is_kept_once(tmp_path: Path, in_step: str) -> None:
    """A loop keeps its chosen step once and whole, and nothing else, however it ends."""
    done = loop(tmp_path, in_step=in_step)
    assert done.returncode == 0, done.err
    (whole,) = kept(named(done.recording, "loop"))
    step = step_of(done.recording, 2)
    assert whole.args["step"] == 2
    assert whole.start_ns < step.start_ns < step.end_ns < whole.end_ns
    assert (whole.args["start_bytes"], whole.args["peak_bytes"]) == (1000, 1100)
    assert (whole.args["lost"], whole.args["unaccounted_bytes"], whole.args["mismatches"]) == (0, 0, 0)
    (peak,) = summarize(done.recording).allocations
    assert (peak.step, peak.peak_bytes, peak.late_seconds) == (2, 1100, 0)
    assert missed(done.recording) == {}
    assert not done.err


def test_writing_a_step_is_a_span(tmp_path: Path) -> None:
    """The time that it takes to write a step is a span after the step."""
    done = loop(tmp_path)
    process = named(done.recording, "loop")
    (written,) = [event for event in process.events() if isinstance(event, Span) and event.name == ALLOCATIONS_WRITTEN]
    assert step_of(done.recording, 2).end_ns < written.start_ns < written.end_ns < step_of(done.recording, 3).start_ns
    found = summarize(done.recording)
    assert ALLOCATIONS_WRITTEN in {span.name for span in found.hook_spans}, "it is no span of the program's own"
    assert ALLOCATIONS_WRITTEN not in {span.name for span in found.own_spans}


def test_what_the_program_froze_stays_frozen(tmp_path: Path) -> None:
    """Writing a step thaws nothing: the Python of `warm_python.py` has frozen what it imported."""
    assert loop(tmp_path, after="import gc; print(gc.get_freeze_count() > 0)").out == "True\n"


def test_several_steps_are_kept(tmp_path: Path) -> None:
    """Several steps are kept, and told apart."""
    done = loop(tmp_path, steps="3, 1")
    assert [(part.args["step"], part.args["peak_bytes"]) for part in kept(named(done.recording, "loop"))] == [
        (1, 1010),
        (3, 2000),
    ]
    assert [peak.step for peak in summarize(done.recording).allocations] == [1, 3]


def test_exit_inside_the_step_writes_it(tmp_path: Path) -> None:
    """A process that exits inside of the chosen step has written it."""
    source = """
        import rltrace
        from pretended_gpu import Tensor, come_up
        come_up()
        rltrace.start(name="loop")
        rltrace.span("step", step=2).__enter__()
        held = Tensor(77)
    """
    done = run(tmp_path, source)
    (whole,) = kept(named(done.recording, "loop"))
    assert whole.args["end_bytes"] == 77
    assert allocation_steps.lines(done.recording.path)[-1].endswith('"is_over": true}')


def test_killed_inside_the_step(tmp_path: Path) -> None:
    """Of a process that was killed in the chosen step, the Recording says that the step had begun."""
    done = loop(tmp_path, in_step="os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
    assert missed(done.recording) == {"loop": GONE}
    text = "\n".join(screen(done.recording, 160))
    assert f"allocations of step 2 were not kept by loop: {GONE}" in text


def test_step_that_never_began(tmp_path: Path) -> None:
    """If a chosen step never began, the summary names it, with the steps that did."""
    done = loop(tmp_path, steps="9")
    assert missed(done.recording) == {"step 9": "no such step has begun: the steps of this Recording are 0 to 3"}


def test_a_program_that_marks_no_step_is_told_so(tmp_path: Path) -> None:
    done = run(tmp_path, "import rltrace\nrltrace.start(name='loop')\nwith rltrace.span('own'): pass")
    assert missed(done.recording) == {"step 2": "no such step has begun: no step is marked"}


def test_no_gpu_is_said_in_words(tmp_path: Path) -> None:
    """Where no process uses a GPU, the summary says so and blames no hook."""
    source = "import rltrace, torch\nfor n in range(4):\n    with rltrace.span('step', step=n): pass"
    recording = run(tmp_path, source).recording
    for whole in (False, True):
        text = " ".join(" ".join(screen(recording, 140, whole=whole)).split())
        assert f"allocations of step 2 were not kept by process: {NO_GPU}" in text
        assert text.count("no chosen step's allocations were kept") == 1
        assert not re.search("none of [a-z_, ]*chosen_allocations", text)
        assert "chosen_allocations imported, nothing fired" not in text


def test_torch_without_owners_is_said(tmp_path: Path) -> None:
    """If torch's history can carry no owner, the summary says so."""
    done = loop(tmp_path, has_text=False)
    assert done.returncode == 0, done.err
    (reason,) = missed(done.recording).values()
    assert "cannot carry a text; those of torch 2.11 can" in reason
    assert kept(named(done.recording, "loop")) == []


def test_pause_at_the_end_loses_the_step(tmp_path: Path) -> None:
    """A pause at the end of the step loses it, and the summary says so."""
    done = loop(tmp_path, in_step="rltrace.pause()", after="rltrace.resume()")
    assert missed(done.recording) == {"loop": "recording was paused when it ended"}


def test_own_history_is_left_alone(tmp_path: Path) -> None:
    """A history that the program itself asked for stays as it is."""
    source = """
        import rltrace
        from pretended_gpu import Tensor, come_up
        come_up()
        rltrace.start(name="loop")
        rltrace.start_allocations()
        with rltrace.span("step", step=2):
            Tensor(5)
        Tensor(5000)
        rltrace.stop_allocations()
    """
    done = run(tmp_path, source)
    (whole,) = kept(named(done.recording, "loop"))
    assert (whole.args["peak_bytes"], "step" in whole.args) == (5000, False)
    assert missed(done.recording) == {}


def test_cuda_starts_inside_the_step(tmp_path: Path) -> None:
    """If CUDA is initialized inside of the step, the rest of the step is kept."""
    source = """
        import rltrace
        from pretended_gpu import Tensor, come_up
        rltrace.start(name="loop")
        with rltrace.span("step", step=2):
            held = Tensor(300)
            come_up()
            with rltrace.phase("actor.update"):
                Tensor(40)
    """
    done = run(tmp_path, source)
    (whole,) = kept(named(done.recording, "loop"))
    assert (whole.args["start_bytes"], whole.args["peak_bytes"]) == (300, 340)
    (peak,) = summarize(done.recording).allocations
    assert 0 < peak.late_seconds < 60
    assert "late: how far into the step the last process began to keep its allocations" in "\n".join(
        screen(done.recording, 140, whole=True)
    )


UNUSED = """
    import json
    import rltrace
    from pretended_gpu import GPU, Tensor, come_up
    rltrace.start(name="loop")
    come_up(has_context=False)
    with rltrace.span("step", step=2):
        with rltrace.phase("reward"):
            pass
        print(json.dumps(GPU.stats))
        {then}
        with rltrace.phase("actor.update"):
            pass
"""


def test_without_allocations_nothing_is_ours(tmp_path: Path) -> None:
    """Where CUDA is initialized and nothing is allocated, we allocate nothing either."""
    done = run(tmp_path, UNUSED.format(then="pass"))
    assert json.loads(done.out.splitlines()[0]) == {}
    loop = named(done.recording, "loop")
    assert (kept(loop), loop.unavailable[allocations_of(2)]) == ([], NO_GPU)


def test_later_allocations_are_kept(tmp_path: Path) -> None:
    """What is allocated there later in the step is kept."""
    (whole,) = kept(named(run(tmp_path, UNUSED.format(then="held = Tensor(300)")).recording, "loop"))
    assert (whole.args["start_bytes"], whole.args["peak_bytes"]) == (300, 300)


def test_lost_history_has_no_peak(folder: Path) -> None:
    """If the history of a step is gone, the summary says so, and has no peak."""
    written = Written(folder).process("driver", *(span("step", at_s, at_s + 10, step=at_s // 10) for at_s in (20, 30)))
    behind = [span(ALLOCATIONS_KEPT, 32, 38, step=2, lost=99), sample(f"{ALLOCATIONS}rollout.weights_bytes", 33, 700)]
    written.process("engine", *behind, role="engine", rank=0, chosen_steps=[2], ended_s=40)
    found = summarize(written.read())
    assert found.allocations == []
    assert [(one.step, one.processes, one.reason) for one in found.allocations_missed] == [
        (2, ["rank 0 engine"], BEHIND)
    ]


def test_two_steps_of_one_number(folder: Path) -> None:
    """Of two steps with one number, the peak is that of the one that was kept."""
    steps = [span("step", 10 + 10 * place, 20 + 10 * place, step=place % 2) for place in range(4)]
    written = Written(folder).process("driver", *steps, role="driver")
    levels = [sample(f"{ALLOCATIONS}actor.params_bytes", at_s, size) for at_s, size in ((40, 300), (44, 900), (49, 0))]
    written.process("worker", span(ALLOCATIONS_KEPT, 40, 49, lost=0), *levels, role="worker", rank=0, ended_s=60)
    (peak,) = summarize(written.read()).allocations
    assert (peak.step, peak.peak_bytes, peak.late_seconds) == (1, 900, 0)


def test_step_without_a_number(tmp_path: Path) -> None:
    """A step without a number has the number of its place, as in the summary."""
    done = run(tmp_path, LOOP.format(in_step="pass", after="pass", has_text=True).replace(", step=step)", ")"))
    (whole,) = kept(named(done.recording, "loop"))
    assert whole.args["peak_bytes"] == 1100
    assert [peak.step for peak in summarize(done.recording).allocations] == [2]


@pytest.mark.parametrize("ends", [True, False])
def test_trl_step_ends_with_the_next(tmp_path: Path, ends: bool) -> None:
    """A step of TRL's trainer is kept, though only the next one ends it."""
    source = f"""
        from types import SimpleNamespace
        import rltrace
        from pretended_gpu import Tensor, come_up
        from rltrace.instrument.trl import StepPhases
        come_up()
        rltrace.start(role="worker", rank=0)
        trainer, phases = SimpleNamespace(model=SimpleNamespace(training=True)), StepPhases()
        for step in range(4):
            phases.begin((None, None, SimpleNamespace(global_step=step)), {{}})
            phases.begin_update((trainer,), {{}})
            Tensor(10 ** step)
            phases.end_micro_batch(None, None, None)
            if step != 2 or {ends}:
                phases.end_last((), {{}})
    """
    (whole,) = kept(named(run(tmp_path, source).recording, "rank 0 worker"))
    assert (whole.args["step"], whole.args["peak_bytes"]) == (2, 100)


ANOTHERS = """
    from pathlib import Path
    import rltrace
    from pretended_gpu import Tensor, come_up
    from rltrace.record import allocation_steps
    from rltrace.record.torch import allocations
    come_up()
    folder = Path(rltrace.start(name="loop"))
    {first}
    allocation_steps.say(folder, 2, "another", is_over=False)
    with rltrace.phase("actor.update"):
        Tensor(5)
    for step in (7, 8):
        with rltrace.span("step", step=step), rltrace.phase("actor.update"):
            Tensor(5000)
    {last}
"""
"""Another process is in the chosen step; then this one comes to steps of its own, which nobody chose."""


def test_own_steps_replace_the_drivers(tmp_path: Path) -> None:
    """A process that comes to steps of its own drops what it kept of the driver's."""
    done = run(tmp_path, ANOTHERS.format(first="", last="assert not allocations.is_kept()"))
    assert done.returncode == 0, done.err
    assert kept(named(done.recording, "loop")) == []


def test_vllm_worker_keeps_a_generation(
    tmp_path: Path,
) -> None:
    """A vLLM worker keeps a generation that is no phase of its own, and writes it with the next call.

    As of verl, whose server begins and ends it; the worker itself comes to an edge only as it falls asleep.
    """
    worker = tmp_path / "vllm" / "v1" / "worker" / "gpu_worker.py"
    worker.parent.mkdir(parents=True)
    worker.write_text(
        "from pretended_gpu import Tensor\nclass Worker:\n    def execute_model(self):\n        Tensor(70)\n"
    )
    source = """
        from pathlib import Path
        import rltrace
        from pretended_gpu import come_up
        from rltrace.record import allocation_steps, spans
        from rltrace.record.torch import allocations
        from rltrace.instrument.vllm import allocations as vllm_allocations
        from rltrace.hooks.patching import PatchSet
        from vllm.v1.worker.gpu_worker import Worker
        come_up()
        folder = Path(rltrace.start(name="loop"))
        vllm_allocations.name_hooks(PatchSet("vllm_allocations", spans.current()))  # which needs a driver
        Worker().execute_model()
        allocation_steps.say(folder, 2, "another", is_over=False)
        Worker().execute_model()
        Worker().execute_model()
        allocation_steps.say(folder, 2, "another", is_over=True)
        assert allocations.is_kept()
        Worker().execute_model()
        assert not allocations.is_kept()
    """
    done = run(tmp_path, source)
    assert done.returncode == 0, done.err
    loop = named(done.recording, "loop")
    (whole,) = kept(loop)
    assert (whole.args["step"], whole.args["allocations"], whole.args["peak_bytes"]) == (2, 2, 70)
    samples = [event for event in loop.events() if isinstance(event, Sample) and event.name.startswith(ALLOCATIONS)]
    held = {sample.name: sample.value for sample in samples if sample.value}
    assert held.pop(ALLOCATIONS_RESERVED, None) is not None
    assert held == {f"{ALLOCATIONS}rollout.activations_bytes": 70}, "of the first execution too"


def test_own_history_goes_on(tmp_path: Path) -> None:
    """A program's own history goes on, whichever step another process is in."""
    source = ANOTHERS.format(first="rltrace.start_allocations()", last="rltrace.stop_allocations()")
    (whole,) = kept(named(run(tmp_path, source).recording, "loop"))
    assert (whole.args["peak_bytes"], "step" in whole.args) == (5000, False)


def test_repeated_step_ends_with_the_second_try(tmp_path: Path) -> None:
    """A step that is repeated after a death ends with the second try."""
    running = RunningSteps(tmp_path)
    allocation_steps.say(tmp_path, 3, "first", is_over=False)
    assert running.now() == [3]
    allocation_steps.say(tmp_path, 3, "second", is_over=False)
    allocation_steps.say(tmp_path, 3, "second", is_over=True)
    assert running.now() == []
    allocation_steps.say(tmp_path, 10, "second", is_over=False)
    assert running.now() == [10]


def test_forked_child_keeps_nothing(tmp_path: Path) -> None:
    """A forked child keeps nothing of its parent's step."""
    fork = """
            if not os.fork():
                with rltrace.phase("reward"):
                    pass
                sys.exit(0)
            os.wait()
    """
    done = loop(tmp_path, in_step=fork.strip())
    parts = {process.pid: kept(process) for process in done.recording.processes}
    assert sorted(map(len, parts.values())) == [0, 1]
    assert missed(done.recording) == {"loop": NO_GPU}, "of the child, which has its parent's name"


# ---- workers ----------------------------------------------------------------------------------------------------

RAY = """
    import time
    import ray, rltrace
    from rltrace.hooks import boundaries

    @ray.remote(num_cpus=0)
    class Worker:
        def __init__(self, rank, has_gpu):
            from pretended_gpu import Tensor, come_up
            rltrace.identify(role="worker", rank=rank, device={"host": "here", "uuid": f"GPU-{rank}"})
            self.Tensor = Tensor
            if has_gpu:
                come_up()
            self.held = Tensor(1000)
        def work(self, step, phase):
            self.Tensor(50_000)  # before any edge
            with rltrace.phase(phase):
                self.Tensor(10 * step)
        def work_outside_of_phases(self, step, phase):
            with rltrace.span(phase):
                self.Tensor(10 * step)
        def work_between_hooks(self, step, phase):
            boundaries.reached(boundaries.Boundary((phase,)))
            self.Tensor(10 * step)
        def nothing(self):
            pass

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    rltrace.start(role="driver", name="trainer")
    does = ["work", "work", "work", "work_outside_of_phases", "work_between_hooks"]
    workers = {rank: Worker.remote(rank, has_gpu=rank != 2) for rank in range(5)}

    def call(workers, step, phase):
        return [getattr(worker, does[rank]).remote(step, phase) for rank, worker in workers.items()]

    for step in range(8):
        try:
            with rltrace.span("step", step=step):
                for phase in ("rollout.generate", "actor.update"):
                    ray.get(call(workers, step, phase))
                if step == 4:
                    raise ValueError
        except ValueError:
            pass
        ray.get([worker.nothing.remote() for worker in workers.values()])
        if step == 6:
            workers.pop(1).__ray_terminate__.remote()

    @ray.remote(num_cpus=0)
    def again(workers):
        with rltrace.span("step", step=2):
            ray.get(call(workers, 2, "reward"))

    ray.get(again.remote(workers))
    for worker in workers.values():
        worker.__ray_terminate__.remote()
    time.sleep(1)
    ray.shutdown()
"""
"""Steps of a driver, in which every worker is called twice: step 4 raises, and behind step 6 rank 1 ends.

Rank 2 uses no GPU, ranks 3 and 4 are in no phase, and at the end another driver runs step 2 again.
"""


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    """What was recorded of it, and of a step that never began."""
    done = run(tmp_path_factory.mktemp("ray"), RAY, "2,4,6,99")
    assert done.returncode == 0, done.err
    return done


def part_of(process: Process, step: int) -> Span:
    """The part of a chosen step, which is kept once."""
    (whole,) = [part for part in kept(process) if part.args["step"] == step]
    return whole


@pytest.mark.parametrize("number", [2, 4], ids=["well", "raise"])
def test_actors_keep_the_drivers_step(on_ray: TracedRun, number: int) -> None:
    """Each actor keeps the driver's step, from its first phase in the step to its first one after it."""
    step, following = (step_of(on_ray.recording, number + more) for more in (0, 1))
    for rank in range(2):
        process = named(on_ray.recording, f"rank {rank} worker")
        whole = part_of(process, number)
        phases = [e for e in process.events() if isinstance(e, Span) and e.is_phase]
        of_step = sorted(e.start_ns for e in phases if step.start_ns < e.start_ns < step.end_ns)
        behind = min(e.start_ns for e in phases if e.start_ns > following.start_ns)
        assert len(of_step) == 2
        assert step.start_ns < whole.start_ns < of_step[0]
        assert of_step[1] < whole.end_ns < behind
        # 50,000 of its first call came and went before it looked; of its second call, and of the next step's first
        # one, they are there.
        assert (whole.args["start_bytes"], whole.args["peak_bytes"]) == (1000, 51_000)
        assert (whole.args["lost"], whole.args["unaccounted_bytes"], whole.args["mismatches"]) == (0, 0, 0)
        levels = levels_in(process, whole)
        assert levels.count(51_000) == 2 and 1000 + 10 * number in levels and 1010 + 10 * number not in levels


def levels_in(process: Process, part: Span) -> list[float]:
    """What was held by some owner at some time of a part."""
    samples = [e for e in process.events() if isinstance(e, Sample) and e.name.startswith(ALLOCATIONS)]
    return [sample.value for sample in samples if part.start_ns <= sample.ts_ns <= part.end_ns]


def test_actors_keep_nothing_else(on_ray: TracedRun) -> None:
    """Nothing is kept of other steps, nor of a step that runs again."""
    for rank in range(2):
        process = named(on_ray.recording, f"rank {rank} worker")
        assert [part.args["step"] for part in kept(process)] == [2, 4, 6]
        samples = [e for e in process.events() if isinstance(e, Sample) and e.name.startswith(ALLOCATIONS)]
        assert len(samples) == sum(len(levels_in(process, part)) for part in kept(process))
    lines = [json.loads(line) for line in allocation_steps.lines(on_ray.recording.path)]
    assert [line["is_over"] for line in lines if line.get("step") == 2] == [False, True] * 2


def test_actors_without_it_say_why(on_ray: TracedRun) -> None:
    """An actor without a GPU says so, one without a phase in the step too, and the summary has all others."""
    said = missed(on_ray.recording)
    del said["step 99"]  # which never began
    no_edge = "no phase of this process began or ended in it"
    assert said.pop("worker") == NO_GPU, "in which the step ran again"
    assert said == {"trainer": NO_GPU, "rank 2 worker": NO_GPU, "rank 3 worker": no_edge}
    peaks = summarize(on_ray.recording).allocations
    of_work = {(peak.lane, peak.step): peak.peak_bytes for peak in peaks if peak.lane != "rank 4"}
    assert of_work == {(f"rank {rank}", step): 51_000 for rank in range(2) for step in (2, 4, 6)}
    assert all(0 < peak.late_seconds < 60 for peak in peaks)
    first, whole = ("\n".join(screen(on_ray.recording, 140, whole=whole)) for whole in (False, True))
    assert re.findall("not kept by (.*):", first) == ["rank 3 worker"] * 3
    assert f"allocations of step 4 were not kept by trainer, rank 2 worker: {NO_GPU}" in whole


def test_boundary_of_hooks_alone(on_ray: TracedRun) -> None:
    """A boundary that only hooks tell of is one too: the program marks no phase itself."""
    assert [part.args["step"] for part in kept(named(on_ray.recording, "rank 4 worker"))] == [2, 4, 6]


def test_worker_that_ends_after_the_step(on_ray: TracedRun) -> None:
    """A worker that ends after the step has written it, without a boundary behind it."""
    process = named(on_ray.recording, "rank 1 worker")
    whole = part_of(process, 6)
    assert whole.args["peak_bytes"] == 51_000
    assert not [e for e in process.events() if isinstance(e, Span) and e.is_phase and e.start_ns > whole.end_ns]


WAITING = """
    from pathlib import Path
    import rltrace, torch
    from pretended_gpu import DEVICE, GPU, Tensor, come_up
    from rltrace.record import allocation_steps
    come_up()
    folder = Path(rltrace.start(name="waiting"))
    held, pending = Tensor(1000), Tensor(30)
    with rltrace.phase("weight_sync"):
        cached = [Tensor(500) for _ in range(5)]
        del cached
        GPU.ask_to_free(pending._address)
        {before}
    allocation_steps.say(folder, 2, "another", is_over=False)
    {meanwhile}
    rltrace.counter("waited_bytes", 0)
    with rltrace.phase("actor.update"):
        more = [Tensor(70) for _ in range(9)]
        del more
    allocation_steps.say(folder, 2, "another", is_over=True)
    with rltrace.phase("weight_sync"):
        pass
    type(pending).__del__ = lambda tensor: None
"""
AN_ENGINE = """
import sys
from types import SimpleNamespace as Of
from rltrace.record.torch import allocations
from rltrace.instrument.vllm.allocations import CUMEM, CumemPools
segments = {{4096: Of(handle=(0, 100, 4096, 1), tag="weights", is_asleep={is_asleep})}}
sys.modules[CUMEM] = Of(CuMemAllocator=Of(instance=Of(pointer_to_data=segments)))
allocations.keep_beside(CumemPools())
"""
"""Pools as vLLM's, that sleep and wake up without a word of torch's allocator."""
AWAKE, ASLEEP = (f"exec({AN_ENGINE.format(is_asleep=is_asleep)!r})" for is_asleep in (False, True))
ON_ANOTHER = "torch.cuda.current_device = lambda: DEVICE + 1"
BACK = "torch.cuda.current_device = lambda: DEVICE"


@pytest.mark.parametrize(
    ("before", "meanwhile", "is_known", "start_bytes"),
    [
        pytest.param("", "pass", True, 1030, id="nothing"),
        pytest.param("", "Tensor(3)", False, 1030, id="what came and went"),
        pytest.param("", "GPU.complete_free(pending._address)", False, 1000, id="a stream let go"),
        pytest.param("", "GPU.empty_cache()", False, 1030, id="the cache was emptied"),
        pytest.param("GPU.stats.clear()", "new = Tensor(3); GPU.stats.clear()", False, 1033, id="counts were reset"),
        pytest.param(ON_ANOTHER, BACK, False, 1030, id="another device"),
        pytest.param(AWAKE, "pass", False, 1130, id="an engine"),
        pytest.param(ASLEEP, "pass", False, 1030, id="an engine that sleeps"),
        pytest.param("", AWAKE, False, 1130, id="an engine that came"),
        pytest.param("GPU.ring = 36", "pass", False, 1030 + 6 * 70, id="entries were lost"),
    ],
)
def test_worker_held_while_others_generate(
    tmp_path: Path, before: str, meanwhile: str, is_known: bool, start_bytes: int
) -> None:
    """What a worker holds while others generate is known if its allocator did nothing."""
    done = run(tmp_path, WAITING.format(before=before, meanwhile=meanwhile))
    assert done.returncode == 0, done.err
    process = named(done.recording, "waiting")
    (whole,) = kept(process)
    first, _, _ = sorted((e for e in process.events() if isinstance(e, Span) and e.is_phase), key=lambda e: e.start_ns)
    assert first.end_ns is not None and whole.start_ns > first.end_ns
    (waited,) = [e for e in process.events() if isinstance(e, Sample) and e.name == "waited_bytes"]
    is_first = whole.start_ns < waited.ts_ns
    samples = [e for e in process.events() if isinstance(e, Sample) and e.name.startswith(ALLOCATIONS)]
    assert min(sample.ts_ns for sample in samples) == whole.start_ns
    assert is_first == is_known
    assert whole.args["start_bytes"] == start_bytes


def test_allocator_without_counts(tmp_path: Path) -> None:
    """An allocator that counts nothing is no failure."""
    refuse = """
        def refuse(*_):
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")
        torch.cuda.memory_stats = torch.cuda.memory_stats_as_nested_dict = refuse
        torch.cuda.memory.get_allocator_backend = lambda: "pluggable"
    """
    before = f"exec({textwrap.dedent(refuse)!r})"
    done = run(tmp_path, WAITING.format(before=before, meanwhile="pass"))
    assert (done.returncode, done.err) == (0, "")
    reason = named(done.recording, "waiting").unavailable[allocations_of(2)]
    assert "selects an allocator that keeps no history" in reason


RANK = """
import os

import rltrace
from pretended_gpu import Tensor, come_up

rank = int(os.environ["RANK"])
come_up()
rltrace.start(role="worker", rank=rank)
if rank == 1:
    open("step_begun").read()  # a pipe, which ends as the other rank has opened and closed it
    with rltrace.phase("actor.build"):  # in the step of the other rank, and before its own
        Tensor(7_000)
    open("looked", "w").close()
for step in range(3):
    with rltrace.span("step", step=step):
        if rank == 0 and step == 0:
            open("step_begun", "w").close()
            open("looked").read()
        Tensor(10 ** step)
"""


def test_rank_with_own_steps_keeps_them(tmp_path: Path) -> None:
    """A rank with steps of its own keeps these, and nobody else's."""
    for pipe in ("step_begun", "looked"):
        os.mkfifo(tmp_path / pipe)
    recording = run_ranks_traced(tmp_path, RANK, [{"RANK": rank, "RLTRACE_ALLOCATIONS": "0"} for rank in "01"])
    for rank in range(2):
        process = named(recording, f"rank {rank} worker")
        (whole,) = kept(process)
        (step,) = [e for e in process.events() if isinstance(e, Span) and e.name == STEP and e.args["step"] == 0]
        assert whole.start_ns < step.start_ns < step.end_ns < whole.end_ns
        assert whole.args["peak_bytes"] == 1
    assert missed(recording) == {}


# ---- what is said -----------------------------------------------------------------------------------------------


def test_step_ends_with_its_last_beginner(tmp_path: Path) -> None:
    """A step ends when the process that began it last has ended it."""
    running = RunningSteps(tmp_path)
    assert running.now() == []
    for process, is_over, expected in (
        ("a", False, [3]),
        ("b", False, [3]),
        ("a", True, [3]),
        ("b", True, []),
        ("c", False, []),
    ):
        allocation_steps.say(tmp_path, 3, process, is_over=is_over)
        assert running.now() == expected
    with (tmp_path / allocation_steps.FILE).open("a") as file:
        file.write('{"step": 4, "pro')  # somebody is writing it
    assert running.now() == []
    assert running.met == {3}


@pytest.mark.parametrize(("text", "steps"), [("", set()), ("3", {3}), (" 3, 10,3,5-6", {3, 5, 6, 10})])
def test_steps_are_numbers_separated_by_commas(text: str, steps: set[int]) -> None:
    assert allocation_steps.parse(text) == steps


@pytest.mark.parametrize("text", ["x", "5-3", "-1", "3,,4", "1.5", "0-99999"])
@pytest.mark.parametrize("way", ["option", "variable"])
def test_bad_option_is_refused(text: str, way: str, tmp_path: Path) -> None:
    """Anything but numbers of steps is refused before the command runs."""
    option = [f"--allocations={text}"] if way == "option" else []
    environment = {**os.environ, **({} if option else {allocation_steps.VARIABLE: text})}
    done = subprocess.run(
        [*CLI, "exec", "--out", str(tmp_path / "run"), *option, "--", "touch", str(tmp_path / "ran")],
        env=environment, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and not (tmp_path / "ran").exists()
    assert re.search(r"write 3, 100-110 or 1,5-7|names more than 1,000 numbers", done.stderr), done.stderr


def test_option_reaches_all_processes(tmp_path: Path) -> None:
    """The option reaches each process of the command."""
    (tmp_path / "program.py").write_text("import rltrace\nwith rltrace.span('step', step=3): pass\n")
    command = [sys.executable, str(tmp_path / "program.py")]
    words = ["exec", "--out", str(tmp_path / "run"), "--sample", "0", "--allocations", "3", "--", *command]
    done = subprocess.run([*CLI, *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (process,) = Recording.open(tmp_path / "run").processes
    assert process.chosen_steps == [3]
    said = [json.loads(line) for line in allocation_steps.lines(tmp_path / "run")]
    assert [line.get("is_over") for line in said] == [None, False, True] and "marked_by" in said[0]


def test_without_a_chosen_step(tmp_path: Path) -> None:
    """Where no step is chosen, nothing is watched."""
    source = """
        import rltrace
        from rltrace.hooks import boundaries
        from rltrace.record import lifecycle, spans
        with rltrace.span("step", step=2) as step:
            watchers = [watcher for watcher in boundaries.WATCHERS if "Follower" in repr(watcher)]
            print(type(step) is spans.LiveSpan, lifecycle._endings, watchers)
    """
    done = run(tmp_path, source, "")
    assert done.out == "True [] []\n", done.err
    assert not any("chosen" in hook for hook in done.hooks())
    assert not (done.recording.path / allocation_steps.FILE).exists()


def test_process_that_could_not_know(tmp_path: Path) -> None:
    """A process that could not know the step is named with its host.

    On a host that is not the driver's, in a run that nobody supervises; and one that was killed without a word.
    """
    held = [sample("actor.params_bytes", at, 5) for at in (1, 9)]
    written = Written(tmp_path / "run").process(
        "driver", span("step", 2, 4, step=3), role="driver", chosen_steps=[3], ended_s=9
    )
    written.process("far", *held, role="worker", rank=1, host="far", chosen_steps=[3], ended_s=10)
    written.process("near", *held, role="worker", rank=0, chosen_steps=[3])
    written.process(
        "late", sample("actor.params_bytes", 5, 5), role="engine", rank=0, chosen_steps=[3], start_ns=5 * 10**9
    )
    written.process("bare", sample("own", 3, 5), role="main", chosen_steps=[3])
    assert missed(written.read()) == {
        "rank 1 worker": "far did not hear in time that the step had begun",
        "rank 0 worker": "its process ended before it had looked",
    }


def test_a_watched_span_is_written_as_any_other(folder: Path) -> None:
    import rltrace

    told: list[object] = []
    undo = spans.watch_spans("step", dict, told.append)
    try:
        rltrace.start(folder)
        with rltrace.span("step", step=1) as watched:
            watched.set(tokens=5)
        with rltrace.span("other"):
            pass
        rltrace.stop()
    finally:
        undo()
    found = [event for event in Recording.open(folder).processes[0].events() if isinstance(event, Span)]
    assert [(one.name, one.args) for one in found] == [("step", {"step": 1, "tokens": 5}), ("other", {})]
    assert told == [{"step": 1}]
    assert spans._make_span is spans.LiveSpan
