"""Times on a real GPU: they agree with torch.profiler's kernels, and measuring them changes nothing."""

from __future__ import annotations

import time

import pytest
import torch

from rltrace import clock
from rltrace.device_time import DeviceSpan, DeviceTimes
from rltrace.instrument.cuda_time import CudaDevice

SHARE, ABSOLUTE_NS = 0.05, 20_000
"""A pair and the profiler's kernels differ by at most the larger of these."""


@pytest.fixture
def measured() -> tuple[DeviceTimes, list[DeviceSpan]]:
    torch.cuda.init()
    written: list[DeviceSpan] = []
    return DeviceTimes(CudaDevice(torch), written.append), written


def matrices(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("size", [1024, 4096, 8192])
def test_a_pair_is_as_long_as_the_kernels_inside_it(size: int, measured: tuple[DeviceTimes, list[DeviceSpan]]) -> None:
    times, written = measured
    one, other = matrices(size)
    one @ other  # cuBLAS chooses its kernel
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        with times.pair("matmul"):
            for _ in range(20):
                one @ other
        torch.cuda.synchronize()
    assert times.poll() == 1
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    begin_us = min(event.time_range.start for event in kernels)
    end_us = max(event.time_range.end for event in kernels)
    (span,) = written
    expected_ns = 1000 * (end_us - begin_us)
    assert abs((span.end_ns - span.start_ns) - expected_ns) <= max(SHARE * expected_ns, ABSOLUTE_NS)


def test_a_pair_lies_where_the_host_saw_the_work(measured: tuple[DeviceTimes, list[DeviceSpan]]) -> None:
    times, written = measured
    one, other = matrices(2048)
    one @ other
    truth = []
    for _ in range(20):
        torch.cuda.synchronize()
        before_ns = clock.now_ns()
        with times.pair("matmul"):
            one @ other
        torch.cuda.synchronize()
        truth.append((before_ns, clock.now_ns()))
        time.sleep(0.1)
    times.poll()
    assert len(written) == 20
    for (before_ns, after_ns), span in zip(truth, sorted(written, key=lambda span: span.start_ns), strict=True):
        assert before_ns - span.error_ns <= span.start_ns <= span.end_ns <= after_ns + span.error_ns
        assert span.error_ns < 100_000


def test_the_host_does_not_wait_for_the_device(measured: tuple[DeviceTimes, list[DeviceSpan]]) -> None:
    times, written = measured
    one, other = matrices(8192)
    one @ other
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # a synchronising call of torch's raises
    try:
        start_ns = clock.now_ns()
        with times.pair("long"):
            for _ in range(500):
                one @ other
        times.poll()
        submitted_ns = clock.now_ns() - start_ns
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert written == []
    torch.cuda.synchronize()
    times.poll()
    (span,) = written
    assert submitted_ns < (span.end_ns - span.start_ns) / 2


def test_a_graph_can_be_captured_through_a_pair_and_one_pair_spans_a_replay(
    measured: tuple[DeviceTimes, list[DeviceSpan]],
) -> None:
    times, written = measured
    one, other = matrices(2048)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        one @ other
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), times.pair("captured"):
        one @ other
    assert times.missed.capturing == 1
    for _ in range(3):
        with times.pair("replay"):
            graph.replay()
    torch.cuda.synchronize()
    times.poll()
    assert [span.name for span in written] == ["replay"] * 3
