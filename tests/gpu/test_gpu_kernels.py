"""Kernels of a chosen part of a program, by torch.profiler, on the Recording's own clock within the stated error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rltrace.events import KERNEL, Span
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
