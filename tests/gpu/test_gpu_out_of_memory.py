"""A GPU runs out of memory: what was asked for and who held the card are in the Recording before anybody dies of it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pynvml
import pytest
from gpu_runs import GIB, GRANULE_BYTES, MIB, exec_, reference_run, rltrace_
from test_gpu_memory import ENGINE

from rltrace.analysis import Summary, summarize
from rltrace.analysis.observations import Observations
from rltrace.events import SAMPLER, Span, subject
from rltrace.read.recording import Recording

UPDATES, UPDATE_BYTES = 12, 64 * MIB
KV_CACHE_BYTES = 2 * GIB
TOO_MUCH = 1 << 40
"""More than any card has."""

ACTOR = f"""
import os, pickle, signal, subprocess, sys, time
import pynvml
import torch
import rltrace
from rltrace.record import lifecycle
from rltrace_reference.device_memory import DeviceMemory
from rltrace_reference.worker import Worker

lifecycle.identify(role="worker", rank=0)
pynvml.nvmlInit()
uuid = f"GPU-{{torch.cuda.get_device_properties(0).uuid}}"

class Actor:
    size_bytes = {UPDATE_BYTES}

    def __init__(self):
        self.kept = [torch.ones({3 * GIB}, dtype=torch.uint8, device="cuda")]

    def update(self, batch, step):
        self.kept.append(torch.empty(self.size_bytes, dtype=torch.uint8, device="cuda"))

    def onload(self, optimizer):
        pass

    def offload(self, changed):
        pass

engine = subprocess.Popen([sys.executable, sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

def ask(*words):
    engine.stdin.write(pickle.dumps(words))
    engine.stdin.flush()
    return pickle.load(engine.stdout)

worker = Worker.__new__(Worker)  # of which an update alone is needed: the phase `actor.update`
worker.actor, worker.memory = Actor(), DeviceMemory(None)
ask("start")
ask("allocate", "kv_cache", {KV_CACHE_BYTES})
for step in range({UPDATES}):
    worker.update([], step)
    time.sleep(0.1)
worker.actor.size_bytes = {TOO_MUCH}
# Asked by itself, beside the ledger.
free_bytes = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid), version=pynvml.nvmlMemory_v2).free
with rltrace.span("asked", free_bytes=free_bytes, uuid=uuid):
    pass
try:
    worker.update([], {UPDATES})
except torch.OutOfMemoryError:
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
try:
    ask("allocate", "weights", {2 * TOO_MUCH})  # torch aborts where a pool's second segment of a name has no room
except EOFError:  # it died of it
    try:
        engine.wait(20)
    except subprocess.TimeoutExpired:  # an interpreter with an allocator that failed may not come to its end
        engine.kill()
        engine.wait()
torch.empty({4 * TOO_MUCH}, dtype=torch.uint8, device="cuda")  # which nobody catches
"""


class Run(NamedTuple):
    """What became of the actor, and what it left."""

    returncode: int
    stderr: str
    folder: Path
    summary: Summary

    def asked(self) -> Span:
        """What the actor was told of the card just before it asked for too much."""
        processes = Recording.open(self.folder).processes
        spans = [event for process in processes for event in process.events() if isinstance(event, Span)]
        (found,) = [span for span in spans if span.name == "asked"]
        return found


def run_actor(folder: Path, then: str) -> Run:
    """An actor that holds more with each update, beside an engine, and then asks for too much; `die`: of SIGKILL."""
    done = exec_(folder, {"actor": ACTOR, "engine": ENGINE}, str(folder / "engine.py"), then, sample_s=0.1)
    summary = summarize(Recording.open(folder / "run"))
    for failure in summary.out_of_memory:
        print(failure.process, failure.reason[:80], failure.asked_bytes, failure.free_bytes, failure.bound)
    return Run(done.returncode, done.stderr, folder / "run", summary)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_actor(tmp_path_factory.mktemp("goes_on"), "go on")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_actor(tmp_path_factory.mktemp("killed"), "die")


def test_each_failure_is_told_once(run: Run) -> None:
    """Each failure is told once, whoever asked for the memory and whether or not somebody caught the error."""
    assert run.returncode == 1, run.stderr[-3000:]
    assert run.stderr.count("OutOfMemoryError") >= 2, "of the engine and of the actor, as without rltrace"
    told = [(failure.asked_bytes, failure.process) for failure in run.summary.out_of_memory]
    assert [asked_bytes for asked_bytes, _ in told] == [TOO_MUCH, 2 * TOO_MUCH, 4 * TOO_MUCH]
    actors = {name for _, name in told[::2]}
    assert len(actors) == 1 and told[1][1] not in actors


def test_free_bytes_match_the_actors_nvml(run: Run) -> None:
    """The free bytes are what NVML said to the actor just before it asked."""
    caught = run.summary.out_of_memory[0]
    assert caught.free_bytes == pytest.approx(run.asked().args["free_bytes"], abs=GRANULE_BYTES)
    assert caught.bound is not None and caught.bound.startswith(f"GPU {run.asked().args['uuid']} of ")


ACTORS_BYTES = 3 * GIB + UPDATES * UPDATE_BYTES


@pytest.mark.parametrize("place", [0, 1])
def test_rows_cover_all_processes(place: int, run: Run) -> None:
    """The rows are those of all processes of the GPU, whichever of them ran out of memory.

    The second time it was vLLM's allocator, which has what it asked for on its list of segments.
    """
    moment = run.summary.out_of_memory[place].moment
    assert moment is not None and moment.is_consistent
    assert moment.bytes["rollout.kv_cache"] == KV_CACHE_BYTES
    assert moment.bytes["unattributed"] == pytest.approx(ACTORS_BYTES, abs=GRANULE_BYTES)
    assert abs(moment.bytes["unaccounted"]) < 256 * MIB


def test_gone_process_has_no_rows(run: Run) -> None:
    """A process that is gone by then has no bytes in the rows."""
    moment = run.summary.out_of_memory[2].moment
    assert moment is not None and moment.bytes.get("rollout.kv_cache", 0) == 0
    assert moment.bytes["unattributed"] == pytest.approx(ACTORS_BYTES, abs=GRANULE_BYTES)


def test_ledger_survives_a_kill_right_after(killed: Run) -> None:
    """The ledger of that moment survives a kill right after it."""
    assert killed.returncode == 128 + signal.SIGKILL, killed.stderr[-3000:]
    (failure,) = killed.summary.out_of_memory
    assert (failure.process, failure.asked_bytes) == ("rank 0 worker", TOO_MUCH)
    assert failure.free_bytes == pytest.approx(killed.asked().args["free_bytes"], abs=GRANULE_BYTES)
    assert failure.moment is not None
    assert failure.moment.bytes["rollout.kv_cache"] == KV_CACHE_BYTES
    assert failure.moment.bytes["unattributed"] == pytest.approx(ACTORS_BYTES, abs=GRANULE_BYTES)


def test_last_half_minute_has_every_boundary(killed: Run) -> None:
    """The last half minute before the kill has every phase boundary."""
    (failure,) = killed.summary.out_of_memory
    assert failure.before[-1].at_seconds - failure.before[0].at_seconds <= 30
    held = np.array([moment.bytes["unattributed"] for moment in failure.before])
    of_updates = held[held >= 3 * GIB]
    assert len(of_updates) >= 2 * UPDATES + 1, "both edges of each update, and where the last one began"
    assert (np.diff(of_updates) >= 0).all()
    assert len(np.unique(of_updates)) >= UPDATES


def test_last_half_minute_has_samplers_view(killed: Run) -> None:
    """The last half minute before the kill has the sampler's view of the GPU."""
    seen = Observations(Recording.open(killed.folder))
    (failure,) = killed.summary.out_of_memory
    (sampler,) = [process for process in seen.processes if process.process.role == SAMPLER]
    used = sampler.sampled[subject("gpu.used_bytes", killed.asked().args["uuid"])]
    seconds = (np.array(used.times_ns) - seen.start_ns) / 1e9 - failure.at_seconds
    last = np.array(used.values)[(seconds >= -30) & (seconds <= 0)]
    assert len(last) >= 20, "ten a second, for at least as long as torch is imported"
    assert last.max() - last.min() >= KV_CACHE_BYTES


def test_summary_opens_with_the_failure(killed: Run) -> None:
    """The summary opens with the failure and with the rows of all processes."""
    said = rltrace_("summary", str(killed.folder), COLUMNS="120").stdout
    assert "Out of memory: rank 0 worker asked for" in "\n".join(said.splitlines()[:12])
    opening = said[said.index("Out of memory: ") : said.index("Memory of rank 0")]
    assert "rollout.kv_cache" in opening and "unattributed" in opening


def card_bytes() -> int:
    """The memory of the first GPU; torch would make a context on it to say so."""
    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)


def test_kv_cache_without_room_is_told(tmp_path: Path) -> None:
    """A KV cache that has no room beside the actor is told with everybody's bytes.

    The engine takes all but 14 GiB, beside two billion parameters; their optimizer comes after it has measured.
    """
    model = {"hidden_size": 2048, "num_hidden_layers": 32, "intermediate_size": 8192}
    rollout = {"gpu_memory_utilization": round(1 - 14 * GIB / card_bytes(), 2), "enforce_eager": True}
    done = reference_run(tmp_path, ranks=1, steps=2, model=model, rollout=rollout)
    assert done.returncode != 0
    print(done.stderr[-4000:])
    (failure, *_) = summarize(Recording.open(tmp_path / "run")).out_of_memory
    print(failure.reason, failure.asked_bytes, failure.free_bytes, failure.bound, failure.changes)
    assert failure.asked_bytes is not None and failure.free_bytes is not None
    assert failure.asked_bytes > failure.free_bytes
    assert failure.moment is not None
    assert failure.moment.bytes["actor.optimizer"] > 13 * GIB
    assert "KV cache" in failure.changes[0]
    assert any("offload the optimizer" in change for change in failure.changes)
    said = rltrace_("summary", str(tmp_path / "run")).stdout
    assert "Out of memory" in "\n".join(said.splitlines()[:12])
