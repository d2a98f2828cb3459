"""Trackers: a real run of W&B (offline), MLflow and TensorBoard, with what rltrace adds and without."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from warm_python import run_source

from rltrace import plugins
from rltrace.analysis.figures import figures
from rltrace.hooks.patching import PatchSet
from rltrace.instrument.trackers.handing import MOST_STEPS, Handing, Step
from rltrace.instrument.trackers.totals import OfStep, Totals
from rltrace.read.recording import Recording
from rltrace.record.trackers import FILE, of_finding
from rltrace.run import step_totals

PROGRAM = Path(__file__).parents[1] / "programs" / "tracked_steps.py"

STEPS = (10, 11, 12)
BLOCK_BYTES = 1 << 15

MISSING = [name for name in ("mlflow", "tensorboard", "tensorboardX", "wandb") if find_spec(name) is None]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


class Told(NamedTuple):
    """What the trackers have after a run of the program."""

    said: dict[str, Any]
    stderr: str
    wandb: list[dict[str, Any]]
    """The rows of the run's history."""
    tensorboard: dict[str, list[tuple[int, float]]]
    """By tag: steps and values."""
    tensorboardx: dict[str, list[tuple[int, float]]]
    mlflow: dict[str, list[tuple[int, float]]]


def records_of_leveldb(content: bytes) -> Iterator[bytes]:
    """Records of W&B's file: LevelDB's log, behind 7 bytes of a header that belong to the first block."""
    at, record = 7, b""
    while at + 7 <= len(content):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < 7:  # zeros that fill the block
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of it
            yield record
            record = b""


def rows_of_wandb(file: str) -> list[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in records_of_leveldb(Path(file).read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def scalars_of_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found: dict[str, list[tuple[int, float]]] = {}
    for file in folder.glob("events.*"):
        for event in EventFileLoader(str(file)).Load():
            for one in event.summary.value:
                (value,) = one.tensor.float_val or [one.simple_value]
                found.setdefault(one.tag, []).append((event.step, value))
    return found


def metrics_of_mlflow(folder: Path, run: str) -> dict[str, list[tuple[int, float]]]:
    """What is in MLflow's files, of which each is a metric's, and each line an instant, a value and a step."""
    (metrics,) = folder.glob(f"*/{run}/metrics")
    lines = {file: map(str.split, file.read_text().splitlines()) for file in metrics.rglob("*") if file.is_file()}
    return {str(file.relative_to(metrics)): [(int(s), float(v)) for _, v, s in of] for file, of in lines.items()}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    """What the program's trackers have, with `RLTRACE_TRACKERS=1`."""
    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        environment = {**os.environ, "WANDB_SILENT": "true", "RLTRACE_QUIET": "1", "RLTRACE_TRACKERS": "1"}
        done = subprocess.run(
            [sys.executable, PROGRAM, folder], capture_output=True, text=True, cwd=folder, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        said = json.loads((folder / "said.json").read_text())
        yield Told(
            said,
            done.stderr,
            rows_of_wandb(said["wandb_file"]),
            scalars_of_tensorboard(folder / "events"),
            scalars_of_tensorboard(folder / "events_x"),
            metrics_of_mlflow(folder / "mlruns", said["mlflow_run"]),
        )


OURS = (
    "rltrace/memory/actor.params_peak_gib",
    "rltrace/memory/rollout.weights_peak_gib",
    "rltrace/phase/actor.update_seconds",
    "rltrace/phase/weight_sync_seconds",
    "rltrace/step_seconds",
)


@pytest.mark.parametrize("tracker", ["tensorboard", "tensorboardx", "mlflow"])
def test_each_step_is_there(told: Told, tracker: str) -> None:
    """Each step of the program is in its run, under the step's own number, with seconds and peaks of that step."""
    scalars: dict[str, list[tuple[int, float]]] = getattr(told, tracker)
    assert tuple(sorted(name for name in scalars if name.startswith("rltrace/"))) == OURS
    assert all(tuple(step for step, _ in scalars[name]) == STEPS for name in OURS)
    assert [value for _, value in scalars["rltrace/memory/actor.params_peak_gib"]] == [10, 11, 12]
    assert [value for _, value in scalars["rltrace/memory/rollout.weights_peak_gib"]] == [3, 3, 3]
    names = ("rltrace/step_seconds", "rltrace/phase/actor.update_seconds", "rltrace/phase/weight_sync_seconds")
    for (_, step), (_, update), (_, sync) in zip(*(scalars[name] for name in names), strict=True):
        assert update >= 0.02 and sync >= 0.02 and step >= update + sync - 1e-6


def test_wandb_has_them_on_an_axis_of_their_own(told: Told) -> None:
    """In W&B they come with the program's next row, and `rltrace/step` says which step they are of."""
    ours = [row for row in told.wandb if "rltrace/step" in row]
    assert tuple(row["rltrace/step"] for row in ours) == STEPS
    assert all(set(OURS) <= row.keys() for row in ours)
    assert [row["rltrace/memory/actor.params_peak_gib"] for row in ours] == [10, 11, 12]


def test_the_programs_own_values_stay(told: Told) -> None:
    """What the program logs is there as it logged it, and W&B has counted its four calls and no more."""
    logged = [(step, step / 10) for step in STEPS]
    assert told.mlflow["loss"] == logged
    assert dict(told.tensorboard["loss"]) == dict(told.tensorboardx["loss"]) == pytest.approx(dict(logged))
    assert told.said["wandb_steps"] == [1, 2, 3, 4]
    logged_by_it = [row for row in told.wandb if row.keys() & {"loss", "last"}]  # the last step may have a row alone
    own = [(row["_step"], row.get("loss"), row.get("last")) for row in logged_by_it]
    assert own == [(0, 1.0, None), (1, 1.1, None), (2, 1.2, None), (3, None, 1.0)]


def test_nothing_is_said(told: Told) -> None:
    """There is no line on stderr, not of a step after the trackers were closed either."""
    assert told.stderr == ""


@pytest.mark.parametrize("name", ["trackers", "tensorboard", "tensorboardx", "wandb"])
@pytest.mark.parametrize("said", [None, "", "0"])
def test_it_is_off_by_default(name: str, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable there is no hook at all."""
    monkeypatch.delenv("RLTRACE_TRACKERS", raising=False)
    if said is not None:
        monkeypatch.setenv("RLTRACE_TRACKERS", said)
    patches = PatchSet(name, None)  # type: ignore[arg-type]
    plugins.load(plugins.INSTRUMENTATIONS[name])().install(patches)
    assert not patches.hooks


DRIVER = """
import json, os, pathlib, subprocess, sys, time
import rltrace
from rltrace.instrument.trackers.handing import HANDING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

rltrace.identify(role="driver")
lines = pathlib.Path(os.environ["RLTRACE_DIR"], "steps.jsonl")
writer = EventFileWriter(sys.argv[1])
pipe = subprocess.PIPE

def is_told(number):
    said = lines.read_text().splitlines(keepends=True) if lines.exists() else []
    return number in [json.loads(line)["step"] for line in said if line.endswith("\\n")]

worker = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdin=pipe, stdout=pipe, text=True)
worker.stdout.readline()
for number in range(int(sys.argv[3])):
    with rltrace.span("step", step=number), rltrace.phase("reward"):
        worker.stdin.write("go\\n")
        worker.stdin.flush()
        worker.stdout.readline()
        time.sleep(0.05)  # what the driver does alone, which is a finding
    while not is_told(number):
        time.sleep(0.05)  # until the process beside the run has looked
    HANDING.settle(60)
worker.stdin.close()
worker.wait()
writer.close()
"""
WORKER = """
import sys, time
import rltrace
rltrace.identify(role="worker", rank=0)
rltrace.counter("actor.params_bytes", 2 << 30)
print("here", flush=True)
for _ in sys.stdin:
    with rltrace.phase("actor.update"):
        time.sleep(0.05)
    print("done", flush=True)
"""


def test_a_driver_tells_of_its_workers(tmp_path: Path) -> None:
    """Under `rltrace exec --trackers` the driver's run has the phases and bytes of its workers, at the same step."""
    run = ["--trackers", "--sample", "0", "--out", str(tmp_path / "run"), "--", sys.executable, "-c", DRIVER]
    command = [sys.executable, "-m", "rltrace", "exec", *run, str(tmp_path / "events"), WORKER, "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found = scalars_of_tensorboard(tmp_path / "events")
    assert [step for step, _ in found["rltrace/phase/reward_seconds"]] == [0, 1, 2]
    updates = dict(found["rltrace/phase/actor.update_seconds"])
    assert set(updates) == {0, 1, 2} and min(updates.values()) >= 0.05
    assert dict(found["rltrace/memory/actor.params_peak_gib"]) == {0: 2, 1: 2, 2: 2}


PATIENT = """
import sys, time
import rltrace
from rltrace.instrument.trackers import handing
handing.CLOSE_SECONDS = handing.FINISH_SECONDS = 60.0  # a busy machine tells trackers later than a program waits
rltrace.instrument(sys.argv[1])
"""
LOOP = f"""{PATIENT}
import torch
from tensorboard.summary.writer.event_file_writer import EventFileWriter

writer, model = EventFileWriter(sys.argv[2]), torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        time.sleep(0.02)
    optimizer.step()
    optimizer.zero_grad()
with rltrace.span("step", step=9):
    pass
writer.close()
"""


def test_a_loop_without_marks(tmp_path: Path) -> None:
    """Its steps are told as far as they can be known while it goes on, until the program marks one itself."""
    done = run_source("torch", LOOP, tmp_path, "run", "events", RLTRACE_TRACKERS="1")
    assert done.returncode == 0, done.stderr
    told = scalars_of_tensorboard(tmp_path / "events")["rltrace/step_seconds"]
    assert [step for step, _ in told] == [0, 1, 2, 3, 9]
    assert all(seconds >= 0.04 for step, seconds in told if step != 9)


GENERATING = f"""{PATIENT}
import mlflow, torch, wandb
from rltrace.instrument.torch.loop_boundaries import BOUNDARIES, GENERATION
from tensorboard.summary.writer.event_file_writer import EventFileWriter

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
mlflow.set_tracking_uri("file:mlruns")
run = mlflow.start_run()
tracked = wandb.init(project="tracked", dir=".", mode="offline", settings=wandb.Settings(x_disable_stats=True))
writer, beside = (EventFileWriter(name) for name in sys.argv[2:4])
for step in range(3):
    BOUNDARIES.begins(GENERATION)  # as the hook on `generate` says it
    model(torch.ones(1, 2)).sum().backward()
    time.sleep(0.02)
    optimizer.step()
    optimizer.zero_grad()
    if step == 1:
        beside.close()  # not one that is told of steps
writer.close()
mlflow.end_run()
print("RESULT", run.info.run_id, tracked.settings.sync_file)
"""


def test_the_last_step_of_a_loop_without_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, once, before the program closes its runs, and where it leaves that to the tracker, here W&B.

    There it has a row of its own, because no row of the program follows.
    """
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    variables = {"RLTRACE_TRACKERS": "1", "WANDB_SILENT": "true", "RLTRACE_QUIET": "1"}
    done = run_source("torch", GENERATING, tmp_path, "run", "events", "x", **variables)
    assert done.returncode == 0, done.stderr
    assert "did not take a step" not in done.stderr
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    _, run, file = said.split()
    told = scalars_of_tensorboard(tmp_path / "events")["rltrace/step_seconds"]
    assert [step for step, _ in told] == [0, 1, 2] and min(seconds for _, seconds in told) >= 0.02
    assert [step for step, _ in metrics_of_mlflow(tmp_path / "mlruns", run)["rltrace/step_seconds"]] == [0, 1, 2]
    assert {row["rltrace/step"] for row in rows_of_wandb(str(tmp_path / file)) if "rltrace/step" in row} >= {2}
    assert "rltrace/step_seconds" not in scalars_of_tensorboard(tmp_path / "x")


def test_findings_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What bounds a step, as far as the run is known, is in the program's own run, with its price, under each step.

    Under which step the first ones are depends on how fast the process beside the run is.
    """
    monkeypatch.setattr(step_totals, "FINDINGS_SECONDS", 0.0)
    monkeypatch.setattr(step_totals, "FINDINGS_SHARE", 1e9)
    variables = {"RLTRACE_DIR": str(tmp_path / "run"), "RLTRACE_TRACKERS": "1"}
    words = [sys.executable, "-c", DRIVER, str(tmp_path / "events"), WORKER, "6"]
    with subprocess.Popen(words, env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True) as program:
        while not (tmp_path / "run" / "manifest.json").exists():
            time.sleep(0.02)
        totals = step_totals.StepTotals(Recording.open(tmp_path / "run"))
        with (tmp_path / "run" / FILE).open("a") as lines:
            while program.poll() is None:
                step_totals.tell(totals, lines)
                time.sleep(0.05)
        assert program.returncode == 0, program.stderr and program.stderr.read()
    told = {name: dict(of) for name, of in scalars_of_tensorboard(tmp_path / "events").items() if "/finding/" in name}
    assert all(set(of) <= set(range(6)) and min(of.values()) > 0 for of in told.values())
    said = [json.loads(line) for line in (tmp_path / "run" / FILE).read_text().splitlines()]
    for line in said:
        found = {name: price for name, price in line["scalars"].items() if "/finding/" in name}
        assert {name: of[line["step"]] for name, of in told.items() if line["step"] in of} == pytest.approx(found)
    prices = {
        of_finding(one.id): one.seconds_per_step for one in figures(Recording.open(tmp_path / "run")).why.findings
    }
    alone = of_finding("driver_phases")
    assert told[alone][5] >= 0.05 and (prices[alone] or 0.0) >= 0.05


class Slow:
    """A tracker that waits for its server."""

    name = "slow"

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.numbers: list[int] = []

    def log(self, number: int, scalars: Any) -> None:
        self.may_go_on.wait(10)
        self.numbers.append(number)
        raise ConnectionError("the server is gone")


def test_a_slow_tracker_holds_nobody_up(capfd: pytest.CaptureFixture[str]) -> None:
    """Steps of a tracker that waits are queued, then dropped with one line; what it raises ends in its thread."""
    slow, handing = Slow(), Handing()
    for number in range(MOST_STEPS + 10):
        handing.put(Step([slow], number, OfStep(0, {}, {})))
    slow.may_go_on.set()
    handing.finish()
    assert slow.numbers[:3] == [0, 1, 2] and len(slow.numbers) in (MOST_STEPS, MOST_STEPS + 1)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "does not keep up" in lines[0] and "slow did not take a step: ConnectionError" in lines[1]


def test_a_peak_is_of_its_step() -> None:
    """What an owner held when the step began counts; what it held in the step before does not."""
    totals = Totals()
    totals.add_sample("actor.params_bytes", 5 << 30)
    totals.add_sample("actor.params_bytes", 2 << 30)
    totals.add_sample("tokens", 7)
    totals.begin()
    totals.add_sample("actor.params_bytes", 1 << 30)
    totals.add_phase("reward", 0, 500_000_000)
    totals.add_phase("reward", 10**9, 2 * 10**9)
    assert totals.end(3 * 10**9).scalars() == {
        "rltrace/step_seconds": 3.0,
        "rltrace/phase/reward_seconds": 1.5,
        "rltrace/memory/actor.params_peak_gib": 2.0,
    }
