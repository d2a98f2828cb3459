"""Sleeps and wake-ups of a real vLLM: good ones, and each way in which one goes wrong, provoked and named.

One engine, which the reference run's own worker side puts to sleep and wakes up; at last there is no room for its KV
cache, and the worker is killed where it learns of that.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from gpu_runs import EXAMPLE, GIB, GRANULE_BYTES, MIB, exec_

from rltrace.analysis import Summary, summarize
from rltrace.analysis.memory import OutOfMemory
from rltrace.analysis.transactions import SLACK_BYTES, Transaction
from rltrace.events import SLEEP, WAKE_UPS
from rltrace.read.recording import Recording

LEAKING_SLEEPS = 9

WORKER = """
import os, signal, sys, time
import torch
from msgspec.structs import replace
import rltrace
from rltrace.record import lifecycle
from rltrace.errors import RunError
from rltrace_reference import config as configuration, task
from rltrace_reference.rollout import Rollout
from rltrace_reference.sharding_manager import ShardingManager

config = replace(configuration.load(sys.argv[1], vocabulary=task.VOCABULARY), ranks=1)
lifecycle.identify(role="worker", rank=0)
held = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")

# As it is in a run, without what syncs weights: which bytes they hold is of no concern here.
manager = ShardingManager.__new__(ShardingManager)
manager.config = replace(config, rollout=replace(config.rollout, enforce_eager="eager" in sys.argv))
manager.rollout = Rollout(manager.config, 0)
manager.rollout.start()
manager.sleep()

def step(number, *planted):
    with rltrace.span("step", step=number):
        manager.wake_weights()
        manager.wake_kv_cache()
        for name in planted:
            manager.rollout.wake_up([name])
        time.sleep(0.01)  # less than any rollout takes; edges within 2 ms of each other are one
        manager.sleep()
"""

SLEEPS = """
step(0)
with rltrace.span("step", step=1):
    manager.wake_weights()
    manager.sleep()  # "Executor is already sleeping": it does nothing
with rltrace.span("step", step=2):
    manager.wake_kv_cache()
    manager.sleep()
step(3, "retain")
manager.rollout.wake_up(["release"])
for number in range(4, 13):
    step(number, "leak")
free_bytes, _ = torch.cuda.mem_get_info()
room_is_gone = torch.empty(free_bytes - (1 << 30), dtype=torch.uint8, device="cuda")
with rltrace.span("step", step=13):
    manager.wake_weights()
    try:
        manager.wake_kv_cache()
    except RunError:
        os.kill(os.getpid(), signal.SIGKILL)
"""

PLANTED_ENGINE = f"""
import ctypes
from wrapt import register_post_import_hook

def retained():
    # Whoever else holds a handle of a segment, as a process that was sent one does, keeps its memory where it is.
    from vllm.device_allocator.cumem import CuMemAllocator
    driver = ctypes.CDLL("libcuda.so.1")
    for address in CuMemAllocator.instance.pointer_to_data:
        handle = ctypes.c_ulonglong()
        code = driver.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(address))
        assert code == 0, f"CUresult {{code}}"
        yield lambda handle=handle: driver.cuMemRelease(handle)

def plant(module):
    wake_up = module.VllmEngine.wake_up

    def planted(engine, tags):
        if tags == ["leak"]:
            import torch
            leaked = torch.empty({64 * MIB}, dtype=torch.uint8, device="cuda")
            engine.__dict__.setdefault("leaked", []).append(leaked)
        elif tags == ["retain"]:
            engine.retained = list(retained())
        elif tags == ["release"]:
            codes = [release() for release in engine.retained]
            assert not any(codes), codes
        else:
            wake_up(engine, tags)

    module.VllmEngine.wake_up = planted

register_post_import_hook(plant, "rltrace_reference.engine.vllm_engine")
"""


class Run(NamedTuple):
    """What became of the worker, and what it left."""

    returncode: int
    stderr: str
    summary: Summary

    def move(self, step: int, name: str) -> Transaction:
        """The only one of this name in a step."""
        found = [move for move in self.summary.sleeps if (move.step, move.name) == (step, name)]
        assert len(found) == 1, (found, self.stderr)
        return found[0]


def run_engine(folder: Path, body: str, *words: str, **environment: str) -> Run:
    """A worker that does this with its engine, in which is planted what the worker asks for."""
    programs = {"worker": WORKER + body, "sitecustomize": PLANTED_ENGINE}
    # Which takes a worker that has met no actor for one on a CPU.
    environment["RLTRACE_DISABLE"] = "reference_memory"
    done = exec_(folder, programs, str(EXAMPLE), *words, **environment)
    return Run(done.returncode, done.stderr[-3000:], summarize(Recording.open(folder / "run")))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    found = run_engine(tmp_path_factory.mktemp("sleeps"), SLEEPS)
    for move in found.summary.sleeps:
        print(move.step, move.name, move.verdict, move.reason, move.changed_bytes)
    return found


def test_good_sleep_frees_its_tags(run: Run) -> None:
    """A good sleep frees what its tags held, and the driver agrees."""
    sleep = run.move(0, "rollout.sleep")
    assert (sleep.verdict, sleep.reason, sleep.level) == ("ok", "", 2)
    assert sleep.expected_bytes == sleep.moved_bytes
    assert sleep.expected_bytes["weights"] > 100 * MIB and sleep.expected_bytes["kv_cache"] > 2 * GIB
    assert sleep.changed_bytes == pytest.approx(sum(sleep.moved_bytes.values()), abs=SLACK_BYTES)
    assert not {"rollout.weights", "rollout.kv_cache"} & set(sleep.left_bytes)
    assert sleep.left_bytes["rollout.graphs"] > 0, "which vLLM's sleep leaves"
    assert sleep.gigabytes_per_second is not None


def test_waking_up_takes_what_sleeping_gave_back(run: Run) -> None:
    slept = run.move(0, "rollout.sleep").moved_bytes
    for name, tag in (("rollout.wake_weights", "weights"), ("rollout.wake_kv_cache", "kv_cache")):
        wake = run.move(0, name)
        assert (wake.verdict, wake.expected_bytes, wake.moved_bytes) == ("ok", {tag: slept[tag]}, {tag: slept[tag]})
        assert wake.changed_bytes == pytest.approx(slept[tag], abs=SLACK_BYTES)


def test_sleep_while_partly_awake_is_named(run: Run) -> None:
    """A sleep of a partly awake engine does nothing, and is named with what stayed."""
    sleep = run.move(1, "rollout.sleep")
    assert (sleep.verdict, sleep.moved_bytes) == ("partly awake", {})
    weights_bytes = run.move(0, "rollout.sleep").moved_bytes["weights"]
    assert sleep.left_bytes["rollout.weights"] == weights_bytes
    awake = f"{weights_bytes / MIB:,.1f} MiB are still awake"
    assert sleep.reason == f"kv_cache slept already, and the call did nothing: {awake}"
    assert run.move(2, "rollout.sleep").verdict == "ok", "once both are awake it sleeps"


def test_sleep_that_frees_nothing_is_named(run: Run) -> None:
    """A sleep that frees nothing is named, whatever the engine says.

    The engine unmapped all, and by its own account none is left; somebody else's handles keep the memory.
    """
    sleep = run.move(3, "rollout.sleep")
    assert sleep.verdict == "freed nothing"
    assert sleep.moved_bytes == sleep.expected_bytes == run.move(0, "rollout.sleep").moved_bytes
    # "were unmapped, the device's total fell by 0.0 MiB"; or, where the ledger goes by a total that is the same and by
    # what the engine said before, "of ... are still there": both are so.
    assert sleep.reason.startswith(f"{sum(sleep.moved_bytes.values()) / MIB:,.1f} MiB ")
    assert sleep.changed_bytes == pytest.approx(0, abs=SLACK_BYTES)


def test_leak_is_named(run: Run) -> None:
    """A leak that grows with each sleep is named, with its owner and its rate."""
    slept = [run.move(step, "rollout.sleep").verdict for step in range(4, 4 + LEAKING_SLEEPS)]
    assert slept == ["ok"] * LEAKING_SLEEPS, "no sleep of them is wrong by itself"
    (leak,) = run.summary.leaks
    assert leak.owner == "rollout.activations", "which torch's allocator has handed out in the engine"
    assert leak.bytes_per_sleep == pytest.approx(64 * MIB, abs=MIB)
    assert leak.last_bytes >= LEAKING_SLEEPS * 64 * MIB


# ---- no room ----------------------------------------------------------------------------------------------------


def failure_of(run: Run) -> OutOfMemory:
    """The only time that memory ran out."""
    assert len(run.summary.out_of_memory) == 1, run.stderr
    return run.summary.out_of_memory[0]


def test_wake_up_without_room_is_named(run: Run) -> None:
    """A wake-up that finds no room is named."""
    assert run.move(13, "rollout.wake_weights").verdict == "ok"
    wake = run.move(13, "rollout.wake_kv_cache")
    assert (wake.verdict, wake.moved_bytes) == ("no room", {})
    assert "kv_cache failed after" in wake.reason


def test_failed_wake_up_survives_the_kill(run: Run) -> None:
    """What vLLM's allocator asked for, and who held the GPU, survive the kill that follows."""
    failure = failure_of(run)
    assert run.returncode == 128 + signal.SIGKILL, run.stderr
    assert failure.process == "rank 0 engine"
    assert "out of memory" in failure.reason
    assert failure.asked_bytes == run.move(0, "rollout.sleep").moved_bytes["kv_cache"]
    assert failure.free_bytes is not None and 0 < failure.free_bytes < GIB
    assert failure.moment is not None
    held = failure.moment.bytes
    assert held["unattributed"] > 20 * GIB, "the worker's, of which the engine knows nothing"
    assert held["rollout.weights"] == run.move(0, "rollout.sleep").moved_bytes["weights"]
    assert held["rollout.activations"] >= LEAKING_SLEEPS * 64 * MIB
    assert "KV cache" in failure.changes[0]


def test_last_half_minute_is_there(run: Run) -> None:
    """The last half minute before the kill is there."""
    before = failure_of(run).before
    assert len(before) >= 2 * LEAKING_SLEEPS, "each of the last sleeps has two edges"
    assert before[-1].at_seconds - before[0].at_seconds <= 30
    kv_cache_bytes = run.move(0, "rollout.sleep").moved_bytes["kv_cache"]
    assert {moment.bytes["rollout.kv_cache"] for moment in before} >= {0, kv_cache_bytes}


# ---- expandable segments ----------------------------------------------------------------------------------------


def test_sleep_with_expandable_segments(
    tmp_path: Path,
) -> None:
    """With expandable segments, vLLM keeps its pools out of them, and its sleep frees what it says.

    0.24 and 0.26 switch them off around their pools; a sleep that freed nothing would be named as the one above.
    """
    segments = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    run = run_engine(tmp_path, "step(0)\nmanager.rollout.close()\n", "eager", **segments)
    assert run.returncode == 0, run.stderr
    sleep = run.move(0, "rollout.sleep")
    assert (sleep.verdict, sleep.reason) == ("ok", "")
    assert sleep.moved_bytes == sleep.expected_bytes and sleep.moved_bytes["kv_cache"] > 2 * GIB
    assert sleep.changed_bytes == pytest.approx(sum(sleep.moved_bytes.values()), abs=SLACK_BYTES)
    (device,) = run.summary.memory
    moves = [edge for edge in device.boundaries if edge.phase in (SLEEP, *WAKE_UPS)]
    assert len(moves) == 8
    for edge in moves:
        assert edge.bytes["unattributed"] == pytest.approx(GIB, abs=GRANULE_BYTES), "what the worker holds for nobody"
        assert abs(edge.bytes["unaccounted"]) < 256 * MIB
