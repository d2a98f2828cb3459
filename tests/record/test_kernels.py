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


def test_every_operator_lies_inside_the_span_that_called_it_within_the_stated_error(folder: Path) -> None:
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
    assert kernels._profiling is None
    rltrace.stop_kernels()


def test_a_profiler_of_the_programs_own_is_left_alone_and_the_reason_is_said(folder: Path) -> None:
    rltrace.start(folder)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        rltrace.start_kernels()
        torch.mm(torch.ones(4, 4), torch.ones(4, 4))
        rltrace.stop_kernels()
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    assert "a profiler of the program's own is active" in process.unavailable["kernels"]
    assert any(event.name == "aten::mm" for event in own.events())


def test_offset_and_drift_of_the_profilers_clock_are_taken_out() -> None:
    def profiler_ns(host_ns: int) -> int:
        return 1_700_000_000_000_000_000 + host_ns + host_ns // 10_000  # 100 µs a second

    windows = [(at, at + width) for at, width in ((1000, 900), (3000, 300), (10**9, 400), (10**9 + 2000, 800))]
    marks = [(profiler_ns(before + 100), profiler_ns(after - 100)) for before, after in windows]
    clocks = clock_map(marks, windows)
    assert clocks.error_ns <= 150
    for host_ns in (1000, 5 * 10**8, 10**9):
        assert abs(clocks.host_ns(profiler_ns(host_ns)) - host_ns) <= clocks.error_ns


def test_marks_that_the_profiler_has_not_seen_are_an_error_and_no_guess() -> None:
    with pytest.raises(ValueError, match="1 of 2 marks"):
        clock_map([(1, 2)], [(1, 2), (3, 4)])
