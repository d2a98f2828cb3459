"""A real worker runs out of memory under a limit of the kernel's; what everybody held is known after `kill -9`."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console
from test_memory_ledger import COMMON, MIB
from traced_runs import TracedRun, run_traced

from rltrace import memory
from rltrace.analysis import summarize
from rltrace.cli.tables import show


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    """The actor's first optimizer step finds no room for its state beside an engine that is awake."""
    body = """
    import resource, signal
    from rltrace import memory
    rollout = Rollout(CONFIG, 0)
    actor = Actor(CONFIG, 0)
    rollout.start()
    for parameter in actor.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    data_bytes = int(open("/proc/self/status").read().split("VmData:")[1].split()[0]) * 1024
    libc_trim = __import__("ctypes").CDLL(None).malloc_trim(0)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + 16 * MIB,) * 2)
    try:
        actor._optimizer_step()
    except RuntimeError as error:
        os.kill(rollout.process.pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    run = run_traced(tmp_path_factory.mktemp("memory"), COMMON + body, timeout_s=240)
    assert run.returncode == -9, run.err
    return run


def test_who_held_what_and_what_was_asked_for_survive_kill_9(run: TracedRun) -> None:
    (failure,) = summarize(run.recording).out_of_memory
    assert failure.process == "rank 0 worker"
    assert "DefaultCPUAllocator" in failure.reason
    assert failure.asked_bytes is not None and failure.free_bytes is not None
    assert failure.asked_bytes > failure.free_bytes >= 0
    assert failure.bound is not None and failure.bound.startswith("RLIMIT_DATA of ")
    assert failure.moment is not None
    held = failure.moment.bytes
    assert held["rollout.kv_cache"] == 128 * MIB, "the engine's, by its own process"
    assert held["actor.params"] > 40 * MIB
    assert held["actor.grads"] == held["actor.params"]
    assert failure.moment.used_bytes > sum((held["rollout.kv_cache"], held["actor.params"], held["actor.grads"]))


def test_the_last_half_minute_is_there(run: TracedRun) -> None:
    (failure,) = summarize(run.recording).out_of_memory
    assert len(failure.before) >= 4
    assert failure.before[-1].at_seconds - failure.before[0].at_seconds <= 30
    assert {moment.bytes["actor.grads"] > 0 for moment in failure.before} == {True, False}, "before and after the grads"


def test_changes_that_would_have_made_room_name_their_owner(run: TracedRun) -> None:
    (failure,) = summarize(run.recording).out_of_memory
    assert any("rollout.kv_cache holds 134,217,728 bytes" in change for change in failure.changes)
    assert not any("weight_sync.bucket" in change for change in failure.changes), "it holds nothing"


def test_the_summary_opens_with_it(run: TracedRun) -> None:
    out = io.StringIO()
    show(summarize(run.recording), Console(width=100, file=out))
    text = out.getvalue()
    assert text.index("Out of memory: rank 0 worker asked for") < text.index("rollout.kv_cache") < text.index("room: ")
    assert text.index("room: ") < text.index("Memory of rank 0")


@pytest.mark.parametrize(
    ("said", "asked_bytes"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.81 GiB", 2560 * MIB),
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has", 20 * MIB),
        ("CUDA out of memory. Tried to allocate 512.00 KiB. GPU 0 has", 512 << 10),
        ("CUDA out of memory. Tried to allocate 512 bytes. GPU 0 has", 512),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12", 4096),
        ("mat1 and mat2 shapes cannot be multiplied", None),
    ],
)
def test_an_out_of_memory_error_of_torch_says_what_was_asked_for(said: str, asked_bytes: int | None) -> None:
    assert memory.asked_bytes(RuntimeError(said)) == asked_bytes
    assert memory.is_out_of_memory(RuntimeError(said)) == (asked_bytes is not None)


@pytest.mark.parametrize(
    ("error", "is_about_memory"),
    [
        (OSError(12, "Cannot allocate memory"), True),
        (OSError(2, "No such file"), False),
        (MemoryError(), True),
        (RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:62"), True),
        (ValueError("out of memory"), False),
    ],
)
def test_other_errors_are_about_memory_by_their_kind(error: Exception, is_about_memory: bool) -> None:
    assert memory.is_out_of_memory(error) is is_about_memory


def test_the_figures_can_be_said_as_json(run: TracedRun) -> None:
    value = msgspec.json.decode(msgspec.json.encode(summarize(run.recording)))
    assert value["out_of_memory"][0]["moment"]["bytes"]["rollout.kv_cache"] == 128 * MIB
