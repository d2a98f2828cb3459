"""Kernels of a chosen part of a program, by torch.profiler, on the Recording's own clock within the stated error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rltrace.events import KERNEL, KERNELS_KEPT, SAMPLER, Span
from rltrace.read.recording import Recording

TIMES = 10

PROGRAM = f"""
import sys
import torch
import rltrace

rltrace.start(sys.argv[1])
matrix = torch.randn(8192, 8192, device="cuda")

def multiply():
    with rltrace.span("host"):
        torch.mm(matrix, matrix)
        torch.cuda.synchronize()

multiply()  # not asked for
rltrace.start_kernels()
for _ in range({TIMES}):
    multiply()
rltrace.stop_kernels()
multiply()
rltrace.stop()
"""


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> list[Span]:
    folder = tmp_path_factory.mktemp("kernels")
    command = [sys.executable, "-c", PROGRAM, str(folder / "run")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return read_spans(folder / "run")


CHOSEN = """
import torch

model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(4))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(6):
    model(torch.ones(512, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
"""
"""A loop that marks nothing."""
TIMED = {"gpu.autograd.backward", "gpu.optimizer.step"}


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> list[Span]:
    """The loop under `rltrace exec --kernels 3`."""
    folder = tmp_path_factory.mktemp("chosen")
    cli = "from rltrace.cli import main; main()"
    options = ["--out", str(folder / "run"), "--sample", "0", "--kernels", "3"]
    words = ["exec", *options, "--", sys.executable, "-c", CHOSEN]
    done = subprocess.run([sys.executable, "-c", cli, *words], check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (process,) = [one for one in Recording.open(folder / "run").processes if one.role != SAMPLER]
    assert not [what for what in process.unavailable if "kernels" in what], process.unavailable
    return [event for event in process.events() if isinstance(event, Span)]


def test_option_records_kernels_of_the_step(chosen: list[Span]) -> None:
    """`--kernels 3` has the kernels of the inferred step 3, and of no other; each names its launch, which is before it.

    The loop waits for the GPU at the end of each step, so that no kernel of one runs in the next.
    """
    (step,) = [one for one in chosen if one.name == "step" and one.args["step"] == 3]
    kernels = [one for one in chosen if one.name.startswith(KERNEL)]
    (whole,) = [one for one in chosen if one.name == KERNELS_KEPT]
    assert whole.args["step"] == 3 and whole.args["kernels"] == len(kernels) >= 15  # 4 of forwards, 11 of backwards
    error_ns = whole.args["error_ns"]
    assert error_ns < 100_000
    assert step.start_ns - error_ns <= min(one.start_ns for one in kernels)
    launched = [one for one in kernels if "behind_host_ns" in one.args]
    assert len(launched) == len(kernels) and all(one.args["behind_host_ns"] >= 0 for one in launched)
    named = {one.args.get("operator") for one in kernels}
    assert "aten::addmm" in named or "aten::linear" in named, named


def test_gpu_time_and_kernels_agree(chosen: list[Span]) -> None:
    """The backward and the optimizer by CUDA events, and their kernels by the profiler, are at the same time, within
    what both state."""
    starts_ns = {one.args["step"]: one.start_ns for one in chosen if one.name == "step"}
    kernels = [one for one in chosen if one.name.startswith(KERNEL)]
    timed = [one for one in chosen if one.name in TIMED and starts_ns[3] <= one.start_ns < starts_ns[4]]
    assert {one.name for one in timed} == TIMED
    for one in timed:
        assert one.end_ns is not None
        error_ns = one.args["error_ns"] + kernels[0].args["error_ns"]
        assert [k for k in kernels if one.start_ns - error_ns <= k.start_ns <= one.end_ns + error_ns], one.name


def read_spans(folder: Path) -> list[Span]:
    """Of the one process."""
    (process,) = Recording.open(folder).processes
    assert process.unavailable == {}
    return sorted((event for event in process.events() if isinstance(event, Span)), key=lambda span: span.start_ns)


def test_kernels_lie_inside_their_spans(spans: list[Span]) -> None:
    """Every kernel lies inside the span that waited for it."""
    hosts = [span for span in spans if span.name == "host"]
    kernels = [span for span in spans if span.name.startswith(KERNEL)]
    assert len(hosts) == TIMES + 2 and kernels
    for kernel in kernels:
        error_ns = kernel.args["error_ns"]
        around = [s for s in hosts if s.start_ns - error_ns <= kernel.start_ns and kernel.end_ns <= s.end_ns + error_ns]
        assert len(around) == 1 and around[0] in hosts[1:-1]


def test_multiplication_fills_its_span(spans: list[Span]) -> None:
    """A multiplication takes nearly all of the span around it."""
    hosts = [span for span in spans if span.name == "host"][1:-1]
    kernels = [span for span in spans if span.name.startswith(KERNEL)]
    for host in hosts:
        inside = [kernel.seconds for kernel in kernels if host.start_ns <= kernel.start_ns < host.end_ns]
        assert max(inside) > 0.8 * host.seconds  # 20 ms of 20: the launch takes 20 µs
