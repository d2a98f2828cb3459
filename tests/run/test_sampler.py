"""A process of its own samples the host while a run goes on, says what it cannot see, and ends with the run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pynvml
import pytest
from recordings import Written, sample

from rltrace.analysis import summarize
from rltrace.events import COLLECTION, SAMPLED, SAMPLER, subjects
from rltrace.host import nvml
from rltrace.host.machine import machine
from rltrace.read.recording import Process, Recording
from rltrace.record import manifest
from rltrace.run.host_usage import waited_for_processor_s

CLI = "import sys; from rltrace.cli import main; main(sys.argv[1:])"
HELD_BYTES = 200 << 20

# Holds memory until it was sampled twice, then says what the kernel says of it.
PROGRAM = f"""
import pathlib, sys, time
import rltrace, numpy
held = numpy.ones({HELD_BYTES} // 8)
folder = pathlib.Path(sys.argv[1])
with rltrace.span("work"):
    def samples():
        seen = [p.read_bytes() for p in folder.glob("processes/*/*.seg")]
        return sum(data.count(b"process.uss_bytes/") for data in seen)
    first = None
    while first is None or samples() < first + 8:
        time.sleep(0.05)
        first = samples() if first is None else first
rollup = pathlib.Path("/proc/self/smaps_rollup").read_text().split()
print(int(rollup[rollup.index("Private_Dirty:") + 1]) * 1024)
print(len(list(pathlib.Path("/proc/self/task").iterdir())))
print(any(name in sys.modules for name in ("psutil", "pynvml")))
"""


def trace(folder: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a program as a user does."""
    script = folder.with_suffix(".py")
    script.write_text(program)
    words = ["exec", "--out", str(folder), *options, "--", sys.executable, str(script), str(folder)]
    command = [sys.executable, "-c", CLI, *words]
    alone = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # numpy would start threads of its own
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=240, env=alone)


def sampler_of(folder: Path) -> Process:
    (found,) = (process for process in Recording.open(folder).processes if process.role == SAMPLER)
    return found


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("sampler") / "run"
    done = trace(folder, PROGRAM, "--sample", "0.05")
    assert done.returncode == 0, done.stderr
    return folder, done.stdout.split()


def test_samples_host_and_processes(sampled: tuple[Path, list[str]]) -> None:
    """A process of its own samples the host and every process of the run."""
    folder, (private_bytes, threads, imported) = sampled
    (host,) = summarize(Recording.open(folder)).samples
    held = host.processes["process"]
    assert held["process.uss_bytes"].most == pytest.approx(int(private_bytes), rel=0.1)
    assert int(private_bytes) > HELD_BYTES
    assert held["process.pss_bytes"].most >= held["process.uss_bytes"].most
    assert held["process.resident_bytes"].most >= held["process.pss_bytes"].most
    memory = psutil.virtual_memory()
    assert 0 < host.counters["host.available_bytes"].least <= memory.total
    assert 0 <= host.counters["host.cpu_percent"].mean <= 100
    assert host.sampler_cpu_share is not None and host.sampler_cpu_share > 0
    assert (threads, imported) == ("1", "False"), "nothing of the sampler is in the traced process"


def test_samples_are_the_samplers_only(sampled: tuple[Path, list[str]]) -> None:
    """The traced process holds no sample, and the sampler holds nothing else."""
    folder, _ = sampled
    (traced,) = (process for process in Recording.open(folder).processes if process.role != SAMPLER)
    assert {event.name for event in traced.events()} - {COLLECTION} == {"work"}
    assert {subjects(event.name)[0] for event in sampler_of(folder).events()} <= set(SAMPLED)


def test_sampler_ends_with_the_run(sampled: tuple[Path, list[str]]) -> None:
    """The sampler ends with the run and leaves a whole Recording."""
    folder, _ = sampled
    assert sampler_of(folder).end_ns is not None
    assert not psutil.pid_exists(sampler_of(folder).pid)
    assert summarize(Recording.open(folder)).complete


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="NVML is there")
def test_no_nvml_gives_a_reason(sampled: tuple[Path, list[str]]) -> None:
    """Without NVML the reason is given, and no GPU is shown as zero."""
    folder, _ = sampled
    (host,) = summarize(Recording.open(folder)).samples
    assert host.gpus == {}
    assert host.unavailable == {"gpu": "NVML: NVML Shared Library Not Found"}
    command = [sys.executable, "-c", CLI, "summary", "--all", str(folder)]
    shown = subprocess.run(command, check=False, capture_output=True, text=True)
    assert "gpu: unknown: NVML: NVML Shared Library Not Found" in shown.stdout


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    done = trace(tmp_path / "run", "import rltrace, msgspec\nwith rltrace.span('work'): pass", "--sample", "0")
    assert done.returncode == 0, done.stderr
    assert [process.role for process in Recording.open(tmp_path / "run").processes] == ["process"]


def test_samples_on_after_a_kill(tmp_path: Path) -> None:
    """The sampler continues while a process of the run is killed."""
    program = """
import os, signal, subprocess, sys, time
import rltrace, msgspec
child = subprocess.Popen([sys.executable, "-c", "import msgspec, time; time.sleep(600)"])
def samples(word):
    found = subprocess.run(["grep", "-o", "-a", "-r", word, sys.argv[1] + "/processes"], capture_output=True, text=True)
    return len(found.stdout.split())
while not samples(f"uss_bytes/[^/]*-{child.pid}-"):
    time.sleep(0.05)
print(child.pid)
child.kill()
child.wait()
before = samples("host.available_bytes")
while samples("host.available_bytes") < before + 3:
    time.sleep(0.05)
with rltrace.span("after"):
    pass
"""
    done = trace(tmp_path / "run", program, "--sample", "0.05")
    assert done.returncode == 0, done.stderr
    (killed,) = (process for process in Recording.open(tmp_path / "run").processes if process.pid == int(done.stdout))
    sampler = sampler_of(tmp_path / "run")
    times: dict[str, list[int]] = {}
    for event in sampler.events():
        times.setdefault(event.name, []).append(event.ts_ns)
    last_ns = max(times[f"process.uss_bytes/{killed.key}"])
    assert max(times["host.available_bytes"]) > last_ns
    assert sampler.end_ns is not None


def test_ends_with_its_starter(tmp_path: Path) -> None:
    """The sampler ends when the process that started it is killed."""
    folder = tmp_path / "run"
    manifest.create(folder, owner=None, command=[], config=None)
    parent = subprocess.Popen(
        [sys.executable, "-c", "import sys, pathlib, time; from rltrace.run import sampler;"
         "kept = sampler.start(pathlib.Path(sys.argv[1]), 0.05); time.sleep(600)", str(folder)]
    )  # fmt: skip
    wait_for(lambda: [p for p in Recording.open(folder).processes if [*p.events()]])
    pid = sampler_of(folder).pid
    parent.kill()
    parent.wait()
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert sampler_of(folder).end_ns is not None


# ---- NVML's numbers, where they could be wrong -------------------------------------------------------------------


def test_gpu_bytes_by_process() -> None:
    """Bytes of a GPU go to the processes of the run, and the rest to others."""
    said = {11: 600, 12: 400, 99: 50}
    found = nvml.process_bytes(said, {11: "worker", 12: "engine", 13: "driver"}, is_certain=lambda _pid: True)
    assert found == {
        "gpu.process_bytes/worker": 600, "gpu.process_bytes/engine": 400, "gpu.other_processes_bytes": 50
    }  # fmt: skip


def test_foreign_pids_give_a_reason() -> None:
    """Pids of another namespace give a reason and no bytes."""
    with pytest.raises(nvml.UnavailableError, match=r"such as 4711.*namespace"):
        nvml.process_bytes({4711: 600}, {4711: "worker"}, is_certain=lambda _pid: False)


def test_unknown_bytes_are_not_zero() -> None:
    """Bytes that NVML does not know are not zero."""
    with pytest.raises(nvml.UnavailableError, match="does not report the memory of single processes"):
        nvml.process_bytes({11: None}, {11: "worker"}, is_certain=lambda _pid: True)


@pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace needs root")
def test_pid_certain_only_with_open_gpu() -> None:
    """In its own pid namespace a pid is certain only if its process has a GPU open."""
    asked = "from rltrace.host.nvml import pid_is_certain; print(pid_is_certain(1))"
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare failed" in done.stderr or "cannot" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout.strip() == "False", done.stderr
    if os.readlink("/proc/self/ns/pid") == nvml.MACHINE_PID_NAMESPACE:
        assert nvml.pid_is_certain(1)


def test_total_becomes_a_rate() -> None:
    """A total becomes a rate, and one that wrapped becomes nothing."""
    rate = nvml.Rate()
    assert rate.of(1000, 0) is None
    assert rate.of(3000, 2_000_000_000) == 1000
    assert rate.of(10, 3_000_000_000) is None
    assert rate.of(20, 4_000_000_000) == 10


def test_samples_by_gpu_and_process(tmp_path: Path) -> None:
    """Samples of GPUs and processes are told apart by whose they are."""
    written = Written(tmp_path / "run")
    written.process("engine-0", role="engine", rank=0, ended_s=9)
    written.process(
        "sampler",
        sample("gpu.used_bytes/GPU-a", 1, 100), sample("gpu.used_bytes/GPU-b", 1, 7),
        sample("gpu.process_bytes/GPU-a/engine-0", 1, 60), sample("process.pss_bytes/engine-0", 1, 5),
        sample("gpu.used_bytes/GPU-a", 2, 300),
        sample("sampler.cpu_seconds", 1, 0.5), sample("sampler.cpu_seconds", 3, 0.6),
        role=SAMPLER, ended_s=9,
    )  # fmt: skip
    (host,) = summarize(written.read()).samples
    assert host.gpus["GPU-a"]["gpu.used_bytes"].most == 300
    assert host.gpus["GPU-b"]["gpu.used_bytes"].mean == 7
    assert host.gpus["GPU-a"]["gpu.process_bytes rank 0 engine"].mean == 60
    assert host.processes["rank 0 engine"]["process.pss_bytes"].mean == 5
    assert host.sampler_cpu_share == pytest.approx(0.05)


def test_sampler_names_its_machine(sampled: tuple[Path, list[str]]) -> None:
    """The sampler says on which machine it runs."""
    (machine,) = summarize(Recording.open(sampled[0])).run.machines
    assert machine.host == os.uname().nodename
    assert machine.cpus == len(os.sched_getaffinity(0))
    assert machine.cpu and machine.cpu in Path("/proc/cpuinfo").read_text()


def test_gpu_model_of_either_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs are named by their model, whichever type NVML returns it in."""
    uuids = [b"GPU-a", "GPU-b"]
    said = SimpleNamespace(
        NVMLError=BusyError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda at: at,
        nvmlDeviceGetUUID=lambda at: uuids[at],
        nvmlDeviceGetName=lambda at: (b"NVIDIA H200", "NVIDIA H100 80GB HBM3")[at],
        nvmlSystemGetDriverVersion=lambda: "580.95.05",
    )
    monkeypatch.setitem(sys.modules, "pynvml", said)
    found = machine()
    assert found["gpus"] == [
        {"uuid": "GPU-a", "name": "NVIDIA H200"},
        {"uuid": "GPU-b", "name": "NVIDIA H100 80GB HBM3"},
    ]
    assert found["driver"] == "580.95.05"
    said.nvmlDeviceGetName = Mock(side_effect=BusyError("busy"))
    assert (machine()["gpus"], machine()["driver"]) == ([], None)


class BusyError(Exception):
    """NVML's, of a kind that passes."""

    value = 999


def test_busy_driver_is_asked_again() -> None:
    """What a busy driver did not answer is asked again."""
    memory = Mock(side_effect=[BusyError("busy"), SimpleNamespace(used=3, reserved=2, free=1)])
    said = {"NVMLError": BusyError, "nvmlDeviceGetUUID": lambda _: "GPU-1", "nvmlDeviceGetMemoryInfo": memory}
    numbers = dict.fromkeys(("nvmlMemory_v2", "NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_NO_PERMISSION"), 0)
    gpu = nvml.Gpu(SimpleNamespace(**said, **numbers), object())
    assert gpu._ask("gpu.used_bytes", gpu._memory) == []
    assert gpu.unavailable == {}
    assert dict(gpu._ask("gpu.used_bytes", gpu._memory))["gpu.used_bytes/GPU-1"] == 3


@pytest.mark.parametrize(
    ("reasons", "by_power", "by_heat"),
    [
        (pynvml.nvmlClocksThrottleReasonNone, 0, 0),
        (pynvml.nvmlClocksThrottleReasonGpuIdle | pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting, 0, 0),
        (pynvml.nvmlClocksThrottleReasonSwPowerCap, 1, 0),
        (pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown | pynvml.nvmlClocksThrottleReasonHwSlowdown, 1, 0),
        (pynvml.nvmlClocksThrottleReasonSwThermalSlowdown, 0, 1),
        (pynvml.nvmlClocksThrottleReasonHwThermalSlowdown | pynvml.nvmlClocksThrottleReasonSwPowerCap, 1, 1),
    ],
)
def test_what_holds_a_clock_back(reasons: int, by_power: int, by_heat: int) -> None:
    """NVML's reasons are told as power and as heat; an idle GPU and a chosen clock are neither."""
    numbers = dict.fromkeys(("NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_NO_PERMISSION", "NVML_CLOCK_SM"), 0)
    said = SimpleNamespace(
        **numbers,
        NVMLError=BusyError,
        nvmlDeviceGetUUID=lambda _: "GPU-1",
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: reasons,
        nvmlDeviceGetClockInfo=lambda _handle, _kind: 1980,
    )
    gpu = nvml.Gpu(said, object())
    assert gpu._clock() == {"gpu.sm_clock_megahertz": 1980}
    assert gpu._limits() == {"gpu.power_limited": by_power, "gpu.heat_limited": by_heat}


SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
while True:
    pass
"""


def test_wait_for_a_processor_is_counted() -> None:
    """Of three processes on one processor each waits for it longer than it computes; one alone does not."""
    processor = str(min(os.sched_getaffinity(0)))
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN, processor]) for _ in range(3)]
    time.sleep(1.2)
    waited = [waited_for_processor_s(process.pid) for process in spinning]
    for process in spinning:
        process.kill()
        process.wait()
    assert all(seconds is not None and seconds > 0.3 for seconds in waited), waited
    assert waited_for_processor_s(2**22 + 1) is None
