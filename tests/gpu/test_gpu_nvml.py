"""The sampler beside a real GPU: what NVML says agrees with what the program did."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rltrace.analysis import summarize
from rltrace.recording import Recording

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


def test_the_bytes_the_work_and_the_power_of_a_busy_gpu_are_sampled(recording: Recording) -> None:
    (host,) = summarize(recording).samples
    busy = max(host.gpus.values(), key=lambda counters: counters["gpu.utilisation_percent"].most)
    used = busy["gpu.used_bytes"]
    assert used.most - used.least >= HELD_BYTES
    assert busy["gpu.utilisation_percent"].most > 50
    assert busy["gpu.power_watts"].most > busy["gpu.power_watts"].least > 0


def test_a_process_has_its_bytes_or_the_reason_why_they_are_unknown(recording: Recording) -> None:
    (host,) = summarize(recording).samples
    named = [
        figures for gpu in host.gpus.values() for name, figures in gpu.items() if name == "gpu.process_bytes process"
    ]
    reasons = [reason for what, reason in host.unavailable.items() if what.startswith("gpu.process_bytes/")]
    assert reasons or any(figures.most >= HELD_BYTES for figures in named)


def test_what_the_device_does_not_support_has_a_reason_and_no_counter(recording: Recording) -> None:
    (host,) = summarize(recording).samples
    for uuid, counters in host.gpus.items():
        for link in ("nvlink", "pcie"):
            has_reason = f"gpu.{link}_bytes_per_second/{uuid}" in host.unavailable
            has_counter = f"gpu.{link}_sent_bytes_per_second" in counters
            assert has_reason != has_counter, (uuid, link, host.unavailable)
