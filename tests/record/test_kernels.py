"""Operators of a chosen part of a program, by torch.profiler, on the Recording's own clock within the stated error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rltrace
from rltrace.events import Span
from rltrace.read.recording import Recording
from rltrace.record.torch import kernels
from rltrace.record.torch.kernels import clock_map


def spans_of(folder: Path) -> list[Span]:
    (process,) = Recording.open(folder).processes
    return sorted((e for e in process.events() if isinstance(e, Span)), key=lambda span: span.start_ns)


def multiply(count: int) -> None:
    matrix = torch.randn(300, 300)
    for _ in range(count):
        with rltrace.span("host"):
            matrix = torch.mm(matrix, matrix) / 300


def test_operators_inside_their_span(folder: Path) -> None:
    """Every operator lies inside the span that called it, within the stated error."""
    rltrace.start(folder)
    multiply(3)  # not asked for
    rltrace.start_kernels()
    multiply(40)
    rltrace.stop_kernels()
    multiply(3)
    rltrace.stop()
    spans = spans_of(folder)
    host = [span for span in spans if span.name == "host"][3:43]
    operators = [span for span in spans if span.name == "op.aten::mm"]
    assert len(operators) == 40
    assert len([span for span in spans if span.name == "host"]) == 46
    for around, inside in zip(host, operators, strict=True):
        error_ns = inside.args["error_ns"]
        assert around.start_ns - error_ns <= inside.start_ns < inside.end_ns <= around.end_ns + error_ns
    assert {span.args["error_ns"] for span in operators} == {operators[0].args["error_ns"]}


def test_without_a_recording_nothing_is_profiled() -> None:
    rltrace.start_kernels()
    assert kernels._state.profiling is None
    rltrace.stop_kernels()


def test_own_profiler_is_left_alone(folder: Path) -> None:
    """The program's own profiler is left alone, and the reason is recorded."""
    rltrace.start(folder)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        rltrace.start_kernels()
        torch.mm(torch.ones(4, 4), torch.ones(4, 4))
        rltrace.stop_kernels()
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    assert "the program's own profiler is active" in process.unavailable["kernels"]
    assert any(event.name == "aten::mm" for event in own.events())


def test_offset_and_drift_are_removed() -> None:
    """Offset and drift of the profiler's clock are taken out."""

    def profiler_ns(host_ns: int) -> int:
        return 1_700_000_000_000_000_000 + host_ns + host_ns // 10_000  # 100 µs a second

    windows = [(at, at + width) for at, width in ((1000, 900), (3000, 300), (10**9, 400), (10**9 + 2000, 800))]
    marks = [(profiler_ns(before + 100), profiler_ns(after - 100)) for before, after in windows]
    clocks = clock_map(marks, windows)
    assert clocks.error_ns <= 150
    for host_ns in (1000, 5 * 10**8, 10**9):
        assert abs(clocks.host_ns(profiler_ns(host_ns)) - host_ns) <= clocks.error_ns


def test_unseen_marks_are_an_error() -> None:
    """Marks that the profiler has not seen are an error and no guess."""
    with pytest.raises(ValueError, match="1 of 2 clock marks"):
        clock_map([(1, 2)], [(1, 2), (3, 4)])
