"""Times on a real GPU: they agree with torch.profiler's kernels, and measuring them changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rltrace.host import clock
from rltrace.instrument.torch.cuda_time import CudaEvents
from rltrace.instrument.torch.device_time import DeviceSpan, DeviceTimes

pytestmark = pytest.mark.in_this_process

SHARE, ABSOLUTE_NS = 0.05, 20_000
"""A pair and the profiler's kernels differ by at most the larger of these."""


@pytest.fixture
def measured() -> tuple[DeviceTimes, list[DeviceSpan]]:
    torch.cuda.init()
    written: list[DeviceSpan] = []
    return DeviceTimes(CudaEvents(torch), written.append), written


def matrices(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))  # type: ignore[return-value]


def test_a_pair_costs_the_host_microseconds(
    measured: tuple[DeviceTimes, list[DeviceSpan]], capsys: pytest.CaptureFixture[str]
) -> None:
    """On an idle device, events from the pool; the best of five rounds, for a busy host slows all calls."""
    times, written = measured
    count, rounds = 200, 5
    submits_ns, resolves_ns = [], []
    for _ in range(rounds):
        written.clear()
        start_ns = clock.now_ns()
        for _ in range(count):
            with times.pair("nothing"):
                pass
        submits_ns.append((clock.now_ns() - start_ns) / count)
        torch.cuda.synchronize()
        begin_ns = clock.now_ns()
        assert times.poll() == len(written) > 0
        resolves_ns.append((clock.now_ns() - begin_ns) / len(written))
    submit_us, resolve_us = min(submits_ns) / 1e3, min(resolves_ns) / 1e3
    with capsys.disabled():
        print(f"\na pair: {submit_us:.2f} µs to submit, {resolve_us:.2f} µs to resolve, without writing it")
    assert submit_us < 30 and resolve_us < 30


@pytest.mark.parametrize("size", [1024, 4096, 8192])
def test_pair_is_as_long_as_its_kernels(size: int, measured: tuple[DeviceTimes, list[DeviceSpan]]) -> None:
    """A pair of events is as long as the kernels inside it."""
    times, written = measured
    one, other = matrices(size)
    one @ other  # cuBLAS chooses its kernel
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        with times.pair("first"):  # with an anchor, while the device is idle
            pass
        torch.cuda._sleep(100_000_000)  # until all is submitted: what it then does has no gaps that the host made
        with times.pair("matmul"):
            for _ in range(20):
                one @ other
        torch.cuda.synchronize()
    assert times.poll() == 2
    kernels = [
        event
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "spin_kernel" not in event.name
    ]
    begin_us = min(event.time_range.start for event in kernels)
    end_us = max(event.time_range.end for event in kernels)
    span = written[-1]
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


def test_pairs_work_with_cuda_graphs(
    measured: tuple[DeviceTimes, list[DeviceSpan]],
) -> None:
    """A CUDA graph can be captured through a pair of events, and one pair spans a replay."""
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


# ---- a step of a sharded model ------------------------------------------------------------------------------------

SPANS = {
    "gpu.fsdp.forward": (4, 4),
    "gpu.fsdp.backward": (4, 4),
    "gpu.autograd.backward": (1, 1),
    "gpu.optimizer.step": (1, 1),
    "gpu.weight_sync.pack": (1, 1),
    "gpu.weight_sync.load": (1, 1),
    "gpu.fsdp.all_gather": (0, 5),
    "gpu.fsdp.reduce_scatter": (0, 4),
}
"""How many there are at one rank, and at two: three layers and the root; the first gathers are before the step."""


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def profiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    """A step, timed by both; see `profiled_step.py`."""
    ranks: int = request.param
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{torch.cuda.device_count()} GPU; {ranks} ranks need {ranks}")
    out = tmp_path_factory.mktemp("step") / "rows.json"
    program = Path(__file__).with_name("profiled_step.py")
    done = subprocess.run(
        [sys.executable, str(program), str(ranks), str(out)], check=False, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return ranks, json.loads(out.read_text())


@pytest.mark.parametrize("name", SPANS)
def test_gpu_spans_match_their_kernels(
    name: str, profiled: tuple[int, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every span of a step is as long as the kernels that were launched inside it."""
    ranks, said = profiled
    if SPANS[name][ranks - 1] == 0:
        pytest.skip("a single rank exchanges no shards")
    rows = [row for row in said["rows"] if row["name"] == name]
    with capsys.disabled():
        for row in rows:
            print(
                f"\n{name:24} {row['module']:9} {row['span_ns'] / 1e3:9.1f} µs, its {row['kernels']:3} kernels "
                f"{row['kernels_ns'] / 1e3:9.1f} µs ({row['busy_ns'] / 1e3:9.1f} busy), "
                f"room for them after {row['room_ns'] / 1e3:.1f}",
                end="",
            )
    assert len(rows) == SPANS[name][ranks - 1]
    assert all(row["kernels"] > 0 for row in rows)
    # A collective that may begin while the GPU is full of others' work begins, for the profiler, when it finds room.
    wrong = [
        row
        for row in rows
        if not any(
            abs(row["span_ns"] - waited_ns - row["kernels_ns"]) <= max(SHARE * row["kernels_ns"], ABSOLUTE_NS)
            for waited_ns in (0, row["room_ns"])
        )
    ]
    assert wrong == []


def test_no_pair_of_the_step_was_missed(profiled: tuple[int, dict[str, Any]]) -> None:
    _, said = profiled
    assert set(said["missed"].values()) == {0}, said["missed"]
