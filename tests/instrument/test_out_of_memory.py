"""A real worker runs out of memory under a limit of the kernel's; what everybody held is known after `kill -9`."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import msgspec
import pytest
from rich.console import Console
from test_memory_ledger import COMMON, MIB
from traced_runs import TracedRun, run_traced

from rltrace.analysis import summarize
from rltrace.analysis.encoded import as_json
from rltrace.cli.tables import show
from rltrace.host import memory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    """The actor's first optimizer step finds no room for its state beside an engine that is awake."""
    body = """
    import resource, signal
    from rltrace.host import memory
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
    run = run_traced(tmp_path_factory.mktemp("memory"), COMMON + body, timeout_s=240, imported="torch")
    assert run.returncode == -9, run.err
    return run


def test_out_of_memory_survives_kill_9(run: TracedRun) -> None:
    """Who held what, and what was asked for, survive `kill -9`."""
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


def test_advice_names_the_owner(run: TracedRun) -> None:
    """What would have made room is named with its owner."""
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
def test_torchs_error_says_what_was_asked(said: str, asked_bytes: int | None) -> None:
    """An out-of-memory error of torch says what was asked for."""
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
def test_other_errors_by_their_kind(error: Exception, is_about_memory: bool) -> None:
    """Other errors are about memory by their kind."""
    assert memory.is_out_of_memory(error) is is_about_memory


def test_the_figures_can_be_said_as_json(run: TracedRun) -> None:
    value = msgspec.json.decode(as_json(summarize(run.recording)))
    assert value["out_of_memory"][0]["moment"]["bytes"]["rollout.kv_cache"] == 128 * MIB


# ---- control groups ---------------------------------------------------------------------------------------------


def group(folder: Path, **files: object) -> None:
    """A control group with files, whose names have `_` for the first dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


def room_in(tmp_path: Path, said: str) -> memory.Room:
    """The room of a process of which the kernel says so, in the groups of a folder."""
    (tmp_path / "of_process").write_text(said)
    return memory.room(tmp_path, tmp_path / "of_process")


def test_room_in_a_container(tmp_path: Path) -> None:
    """The room in a container is what its control group leaves."""
    group(tmp_path, memory_max=80 * MIB, memory_current=70 * MIB)
    assert room_in(tmp_path, "0::/\n") == (10 * MIB, "memory.max of 80 MiB of the control group /")


def test_tightest_group_is_the_room(tmp_path: Path) -> None:
    """The tightest of the groups around a process is its room."""
    group(tmp_path / "job" / "task", memory_max="max", memory_current=60 * MIB)
    group(tmp_path / "job", memory_max=80 * MIB, memory_current=75 * MIB)
    found = room_in(tmp_path, "0::/job/task\n")
    assert found == (5 * MIB, "memory.max of 80 MiB of the control group /job")
    group(tmp_path / "job" / "task", memory_max=61 * MIB, memory_current=60 * MIB)
    assert room_in(tmp_path, "0::/job/task\n").bound == "memory.max of 61 MiB of the control group /job/task"


def test_cached_files_are_free(tmp_path: Path) -> None:
    """What the kernel takes back from cached files is free."""
    group(
        tmp_path,
        memory_max=80 * MIB,
        memory_current=79 * MIB,
        memory_stat=f"anon {39 * MIB}\nfile {40 * MIB}\ninactive_file {30 * MIB}",
    )
    assert room_in(tmp_path, "0::/\n").free_bytes == 31 * MIB


def test_groups_of_version_1(tmp_path: Path) -> None:
    """Groups of version 1 have limits too, and a container may be told its path on the host."""
    limit = {"memory_limit_in_bytes": 80 * MIB, "memory_usage_in_bytes": 90 * MIB}
    group(tmp_path / "memory", **limit)
    group(tmp_path / "memory" / "task", **limit | {"memory_limit_in_bytes": (1 << 63) - 4096})
    said = "9:cpu,cpuacct:/docker/1f\n8:memory:/docker/1f/task\n0::/docker/1f/task\n"
    assert room_in(tmp_path, said) == (0, "memory.limit_in_bytes of 80 MiB of the control group /")


@pytest.mark.parametrize("said", ["", "0::/\n", "8:memory:/../..\n", "0::/gone\n"])
def test_room_without_a_limit(tmp_path: Path, said: str) -> None:
    """Without a limit the room is the machine's."""
    group(tmp_path, memory_stat="anon 0")
    assert room_in(tmp_path, said).bound == "the machine's memory"


def test_real_control_group(memory_group: Path) -> None:
    """The control group that the kernel made is the room of a process in it."""
    program = f"""
    open({str(memory_group.parent / "cgroup.procs")!r}, "w").write("0")
    from rltrace.host import memory
    print(*memory.room(), sep=",")
    """
    memory_group.write_text(str(512 * MIB))
    said = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True, check=True).stdout
    free_bytes, _, bound = said.partition(",")
    assert 400 * MIB < int(free_bytes) < 512 * MIB
    assert bound.startswith(f"{memory_group.name} of 512 MiB of the control group /")
