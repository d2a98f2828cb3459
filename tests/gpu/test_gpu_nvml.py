"""The sampler beside a real GPU: what NVML says agrees with what the program did; without NVML it is unknown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_runs import MIB, exec_, rltrace_

from rltrace.analysis import Summary, summarize
from rltrace.analysis.memory import NOT_SAMPLED
from rltrace.read.recording import Recording

HELD_BYTES = 2 << 30

PROGRAM = f"""
import time, torch, rltrace
with rltrace.span("work"):
    held = torch.ones({HELD_BYTES}, dtype=torch.uint8, device="cuda")
    end = time.monotonic() + 5
    while time.monotonic() < end:
        held.add_(1)
    torch.cuda.synchronize()
"""


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "program.py").write_text(PROGRAM)
    cli = "import sys; from rltrace.cli import main; main(sys.argv[1:])"
    words = ["exec", "--out", str(folder / "run"), "--sample", "0.2", "--", sys.executable, str(folder / "program.py")]
    done = subprocess.run([sys.executable, "-c", cli, *words], check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return Recording.open(folder / "run")


def test_busy_gpu_is_sampled(recording: Recording) -> None:
    """The bytes, the utilisation, the power and the clock of a busy GPU are sampled."""
    (host,) = summarize(recording).samples
    busy = max(host.gpus.values(), key=lambda counters: counters["gpu.utilisation_percent"].most)
    used = busy["gpu.used_bytes"]
    assert used.most - used.least >= HELD_BYTES
    assert busy["gpu.utilisation_percent"].most > 50
    assert busy["gpu.power_watts"].most > busy["gpu.power_watts"].least > 0
    assert busy["gpu.sm_clock_megahertz"].most > 500
    assert {busy[name].least for name in ("gpu.power_limited", "gpu.heat_limited")} == {0}


def test_process_has_bytes_or_a_reason(recording: Recording) -> None:
    """A process has its bytes, or the reason why they are unknown."""
    (host,) = summarize(recording).samples
    named = [
        figures for gpu in host.gpus.values() for name, figures in gpu.items() if name == "gpu.process_bytes process"
    ]
    reasons = [reason for what, reason in host.unavailable.items() if what.startswith("gpu.process_bytes/")]
    assert reasons or any(figures.most >= HELD_BYTES for figures in named)


def test_unsupported_counter_has_a_reason(recording: Recording) -> None:
    """A counter that the device does not support has a reason and no samples."""
    (host,) = summarize(recording).samples
    for uuid, counters in host.gpus.items():
        for link in ("nvlink", "pcie"):
            has_reason = f"gpu.{link}_bytes_per_second/{uuid}" in host.unavailable
            has_counter = f"gpu.{link}_sent_bytes_per_second" in counters
            assert has_reason != has_counter, (uuid, link, host.unavailable)


# ---- without NVML -----------------------------------------------------------------------------------------------


ACTOR = f"""
import torch
from rltrace.record import lifecycle
from rltrace.instrument.memory.cuda_memory import LEDGER
from rltrace.instrument.memory.growth import Growth
from rltrace_reference.device_memory import DeviceMemory
from rltrace_reference.worker import Worker

class Actor:
    def update(self, batch, step):
        self.held = torch.ones({HELD_BYTES}, dtype=torch.uint8, device="cuda")
        growth = Growth(LEDGER, "nccl")  # as where a communicator is made: nobody can tell what it takes
        before_bytes = growth.begin()
        torch.cuda.Stream()
        growth.end(before_bytes)
        torch.empty({512 * MIB}, dtype=torch.uint8, device="cuda")  # freed at once, and kept by the allocator

    def onload(self, optimizer):
        pass

    def offload(self, changed):
        pass

lifecycle.identify(role="worker", rank=0)
torch.ones(1, device="cuda")
worker = Worker.__new__(Worker)  # of which an update alone is needed: the phase `actor.update`
worker.actor, worker.memory = Actor(), DeviceMemory(None)
worker.update([], 0)
"""

NO_LIBRARY = "NVML: NVML Shared Library Not Found"
OF_DRIVER = {"cuda.context", "nccl", "rollout.graphs", "driver.reserved", "unaccounted", "free"}
"""Rows that nobody but the driver can tell."""


@pytest.fixture(scope="module")
def without_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose processes find a file of the library's name that is none, as a broken installation leaves it."""
    folder = tmp_path_factory.mktemp("without_nvml")
    (folder / "library").mkdir()
    (folder / "library" / "libnvidia-ml.so.1").touch()
    path = ":".join(filter(None, [str(folder / "library"), os.environ.get("LD_LIBRARY_PATH")]))
    done = exec_(folder, {"actor": ACTOR}, sample_s=0.2, LD_LIBRARY_PATH=path)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "run"


def test_without_nvml_driver_rows_are_unknown(without_nvml: Path) -> None:
    """Without NVML, the driver's rows are unknown with the reason, and never zero."""
    (device,) = summarize(Recording.open(without_nvml)).memory
    assert device.device is not None and device.device.startswith("GPU-")
    assert device.residual is None, "without a total nothing is said to add up"
    no_forward = {"actor.activations": NOT_SAMPLED}
    assert device.unknown == dict.fromkeys(OF_DRIVER, NO_LIBRARY) | no_forward
    said = [
        device.at_peak_bytes,
        device.owner_peaks,
        *(moment.bytes for moment in (*device.phases, *device.boundaries)),
    ]
    assert not any(OF_DRIVER & set(rows) for rows in said)


def test_without_nvml_torchs_rows_are_there(without_nvml: Path) -> None:
    """Without NVML, the rows that torch's allocator knows are there all the same."""
    (device,) = summarize(Recording.open(without_nvml)).memory
    assert device.at_peak_bytes["unattributed"] == pytest.approx(HELD_BYTES, abs=2 * MIB)
    assert device.at_peak_bytes["allocator.cached"] == pytest.approx(512 * MIB, abs=4 * MIB)


def test_without_nvml_only_the_host_is_sampled(without_nvml: Path) -> None:
    """Without NVML, the sampler says so and samples only the host."""
    summary: Summary = summarize(Recording.open(without_nvml))
    (host,) = summary.samples
    assert host.unavailable["gpu"] == NO_LIBRARY
    assert host.gpus == {}


def test_without_nvml_summary_says_why(without_nvml: Path) -> None:
    """Without NVML, the summary says what is unknown, and why."""
    said = rltrace_("summary", str(without_nvml), COLUMNS="200").stdout
    assert f"unknown, {NO_LIBRARY}: " in said
    for owner in ("cuda.context", "free", "unaccounted"):
        cells = {" ".join(line.split()[1:]) for line in said.splitlines() if line.split()[:1] == [owner]}
        assert cells == {"unknown"}, said
