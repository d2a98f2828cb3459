"""One tiny run, asked for every operator and every allocation of a step: what it recorded, and what it leaves alone.

A sweep makes it, and skips another one. The same without hooks then loses some weights.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from reference_runs import RLTRACE, TINY, write_config
from rltrace_reference import sweep

from rltrace import plugins
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

FIGURES = ("reward_mean", "tokens", "kl", "grad_norm", "logprob_abs_diff_max")
"""Of a step: what a seed determines."""

MIB = 1 << 20
LIMIT_MIB = 300
STEPS = 3

HOLD_ONE_BACK = f"""
import sys
import wrapt

@wrapt.when_imported("rltrace_reference.weight_sync")
def hold_one_back(module):
    load = module.Receiver.load

    def load_all_but_one(receiver, bucket):
        stale = receiver.parameters["model.norm.weight"].clone()
        load(receiver, bucket)
        if ".{STEPS}." in bucket.key:  # of the step behind those that are compared
            receiver.parameters["model.norm.weight"].copy_(stale)

    module.Receiver.load = load_all_but_one
"""
"""The `sitecustomize` of every process of the run without hooks."""


@pytest.fixture(scope="module")
def folder_of_said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each process says what is frozen in it, under its pid."""
    return tmp_path_factory.mktemp("said")


class Swept(NamedTuple):
    """A sweep that has ended."""

    file: Path
    words: list[str]
    out: str
    err: str
    picture: Path


@pytest.fixture(scope="module")
def swept(folder_of_said: Path, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """A sweep of two values: one was stopped before, and the other cannot fit."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "sitecustomize.py").write_text(SAY_WHAT_IS_FROZEN.format(folder=f"{folder_of_said}/"))
    chosen = {"steps": [1]}
    asked: dict[str, Any] = {"ranks": 1, "steps": STEPS, "kernels": chosen, "allocations": chosen, **TINY}
    file = write_config(folder, memory_limit_megabytes=LIMIT_MIB, **asked)
    left = folder / "sweep" / "rollout.kv_cache_megabytes=64"
    left.mkdir(parents=True)
    (left / "manifest.json").write_text("{}")  # of a run that was stopped
    words = [str(file), "--over", "rollout.kv_cache_megabytes=64:320:256", "--out", str(folder / "sweep")]
    picture = folder / "sweep.svg"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        assert sweep.main([*words, "--json", "--picture", str(picture)]) == 0, err.getvalue()
    return Swept(file, words, out.getvalue(), err.getvalue(), picture)


@pytest.fixture(scope="module")
def tiny(swept: Swept) -> Recording:
    return Recording.open(Path(swept.words[-1]) / "rollout.kv_cache_megabytes=64")


def test_values_that_cannot_fit_are_skipped(swept: Swept) -> None:
    """A value that cannot fit is not run, and one that was stopped is run again."""
    assert swept.err == "rollout.kv_cache_megabytes=64: running\n"
    ran, skipped = json.loads(swept.out)["points"]
    assert (ran["value"], ran["skipped"], ran["figures"]["failed_phase"]) == (64, "", None)
    assert 64 * MIB < ran["figures"]["peak_bytes"] < LIMIT_MIB * MIB
    assert (skipped["value"], skipped["figures"]) == (320, None)
    assert skipped["skipped"] == "no room in rollout.generate"
    assert "<svg" in swept.picture.read_text()


def test_ended_runs_are_not_run_again(swept: Swept, capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep that is begun again shows what has ended, and refuses another configuration."""
    assert sweep.main(swept.words) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert [line.split()[0] for line in said.out.splitlines()] == ["rollout.kv_cache_megabytes", "64", "320"]
    swept.file.write_text(swept.file.read_text().replace("seed: 0", "seed: 1"))
    assert sweep.main(swept.words) == 2
    assert "is another configuration than this one; name another folder" in capsys.readouterr().err


class Bare(NamedTuple):
    """The run without hooks."""

    folder: Path
    returncode: int
    errors: str


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    """The same seed without hooks, for a step more, in which a tensor does not arrive."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(HOLD_ONE_BACK)
    config = write_config(folder, ranks=1, steps=STEPS + 1, **TINY)
    environment = {**os.environ, "RLTRACE_DISABLE": ",".join(plugins.INSTRUMENTATIONS)}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [*RLTRACE, "run", str(config), "--out", str(folder / "run")]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    return Bare(folder / "run", done.returncode, done.stderr)


def test_same_figures_without_hooks(tiny: Recording, bare: Bare) -> None:
    """The same seed without hooks gives the same figures."""
    run = Recording.open(bare.folder)
    assert figures(run) == figures(tiny)
    assert {span.name for span in spans(run)} == {"step", "reward", "advantage"}
    reasons = {hook["reason"] for process in run.processes for hook in process.hooks}
    assert reasons == {"disabled by RLTRACE_DISABLE"}


def test_lost_weights_name_the_tensor(bare: Bare) -> None:
    """A run whose weights did not arrive ends with one line that names the tensor."""
    assert bare.returncode == 4
    (line,) = bare.errors.splitlines()
    assert "model.norm.weight did not arrive in the engine of rank 0: checksum" in line


def figures(run: Recording) -> list[list[float]]:
    steps = sorted((span for span in spans(run) if span.name == STEP), key=lambda span: span.start_ns)[:STEPS]
    assert len(steps) == STEPS
    return [[step.args[name] for name in FIGURES] for step in steps]


def spans(run: Recording) -> list[Span]:
    return [event for process in run.processes for event in process.events() if isinstance(event, Span)]


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


def test_driver_does_without_fsdp2(tiny: Recording) -> None:
    """Only workers wait for FSDP2's import, which takes a second: what they return does not bring it to the driver."""
    states = {
        process.identity["role"]: {hook["state"] for hook in process.hooks if hook["instrumentation"] == "fsdp2"}
        for process in tiny.processes
        if process.hooks
    }
    assert states["worker"] == {"installed"}
    assert states["driver"] == {"waiting"}


def test_start_up_objects_are_frozen(tiny: Recording, folder_of_said: Path) -> None:
    """In every process of a run, collections leave out what the start-up made.

    Full collections in the steps do not look at what torch and Ray brought.
    """
    pids = {process.place: process.pid for process in tiny.processes}
    frozen = {place: int((folder_of_said / str(pids[place])).read_text()) for place in ("driver", *PLACES)}
    assert all(count > LEAST for count in frozen.values()), frozen
