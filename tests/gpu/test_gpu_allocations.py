"""Every allocation of a step on a real GPU: what was kept agrees with the allocator's own counts, to the byte.

`-s` shows what keeping costs.
"""

from __future__ import annotations

import gc
import json
import sys
import textwrap
import time
from collections import Counter as Tally
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from gpu_runs import EXAMPLE, MIB, rltrace_
from numpy.typing import NDArray

import rltrace
from rltrace.analysis import summarize
from rltrace.analysis.allocations import NOT_ALLOCATED, allocation_timelines
from rltrace.analysis.ledger import ledgers
from rltrace.analysis.observations import Observations
from rltrace.analysis.steps import StepWindows
from rltrace.events import (
    ALLOCATIONS,
    ALLOCATIONS_KEPT,
    ALLOCATIONS_RESERVED,
    ALLOCATIONS_WRITTEN,
    NO_GPU,
    Counter,
    Span,
    allocations_of,
)
from rltrace.host import clock
from rltrace.read.recording import Process, Recording
from rltrace.record.torch import allocations


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Path]:
    """A Recording of this process, which uses the GPU and has nothing to free."""
    torch.ones(1, device="cuda")
    gc.collect()
    torch.cuda.synchronize()
    rltrace.start(tmp_path / "run")
    yield tmp_path / "run"
    rltrace.stop()


def kept(process: Process) -> tuple[Span, list[Counter]]:
    """The span over the allocations of a process that kept them once, and its owners' samples."""
    events = list(process.events())
    (span,) = [event for event in events if isinstance(event, Span) and event.name == ALLOCATIONS_KEPT]
    samples = [event for event in events if isinstance(event, Counter) and event.name.startswith(ALLOCATIONS)]
    return span, [sample for sample in samples if sample.name != ALLOCATIONS_RESERVED]


def reserved(process: Process) -> list[int]:
    """What its allocator had from the driver, at first and whenever that changed."""
    events = (event for event in process.events() if isinstance(event, Counter))
    return [int(event.value) for event in events if event.name == ALLOCATIONS_RESERVED]


def requested(which: str) -> int:
    """Bytes asked for, by the allocator's own count."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


# ---- the allocator's own counts -----------------------------------------------------------------------------------


UNROUNDED = f"""
    import json, random, torch, rltrace
    choose = random.Random(0)
    torch.cuda.init()
    held = [torch.empty({4 * MIB}, dtype=torch.uint8, device="cuda")]
    torch.cuda.reset_peak_memory_stats()
    rltrace.start_allocations()
    for _ in range(3000):
        size = choose.choice((512 * choose.randint(1, 2048), {2 * MIB} * choose.randint(1, 40)))
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        if len(held) > 60:
            del held[choose.randrange(60)]
    del held[:20]
    torch.cuda.empty_cache()
    said = {{
        "end": torch.cuda.memory_allocated(), "peak": torch.cuda.max_memory_allocated(),
        "reserved_end": torch.cuda.memory_reserved(), "reserved_peak": torch.cuda.max_memory_reserved(),
    }}
    rltrace.stop_allocations()
    print(json.dumps(said))
"""
"""Sizes that an allocator which had nothing before gives out as they are: half KiBs when small, else pairs of MiB."""


def execute(folder: Path, source: str, *options: str) -> tuple[Any, Recording]:
    """A program under `rltrace exec` with these options: what it printed last, and its Recording."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(source))
    done = rltrace_("exec", "--out", str(folder / "run"), *options, "--", sys.executable, str(program))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), Recording.open(folder / "run")


def only_process(recording: Recording) -> Process:
    """The program's own, where it has no others."""
    (process,) = [process for process in recording.processes if process.role != "sampler"]
    return process


def run_program(folder: Path, source: str) -> tuple[dict[str, int], Process]:
    """A program that keeps its allocations: what it printed last, and its process."""
    said, recording = execute(folder, source, "--sample", "0")
    process = only_process(recording)
    assert "allocations" not in process.unavailable, process.unavailable
    return said, process


def test_unrounded_blocks_match_torchs_count(tmp_path: Path) -> None:
    """Blocks that are not rounded add up to what torch says is allocated."""
    said, process = run_program(tmp_path, UNROUNDED)
    span, _ = kept(process)
    assert (span.args["end_bytes"], span.args["peak_bytes"]) == (said["end"], said["peak"])
    assert (span.args["lost"], span.args["unaccounted_bytes"], span.args["mismatches"]) == (0, 0, 0)
    first, *levels, nothing = reserved(process)
    assert (levels[-1], max(levels), nothing) == (said["reserved_end"], said["reserved_peak"], 0)
    assert first < levels[-1] < max(levels), "a third of it was freed at last, and its cache given back"


def read_after_stop(folder: Path) -> tuple[Span, list[Counter]]:
    """End the Recording of this process and read it."""
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    assert "allocations" not in process.unavailable, process.unavailable
    return kept(process)


@pytest.mark.in_this_process
def test_waiting_block_counts_until_reusable(recorded: Path) -> None:
    """A tensor that waits for another stream counts until its block can be used again."""
    other = torch.cuda.Stream()
    rltrace.start_allocations()
    tensor = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(other):
        torch.cuda._sleep(50_000_000)
        tensor.add_(1)
    tensor.record_stream(other)
    before_bytes = requested("current")
    del tensor
    waiting_bytes = requested("current")
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # the allocator looks at its events
    assert requested("current") < waiting_bytes == before_bytes
    end_bytes = requested("current")
    rltrace.stop_allocations()
    span, _ = read_after_stop(recorded)
    assert span.args["end_bytes"] == end_bytes
    assert span.args["mismatches"] == 0


@pytest.mark.in_this_process
def test_keeping_allocations_is_cheap(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every allocation is there, and keeping it is cheap."""
    count = 20_000

    def allocate() -> float:
        start = time.perf_counter()
        for _ in range(count):
            torch.empty(MIB, dtype=torch.uint8, device="cuda")
        return (time.perf_counter() - start) / count * 1e6

    allocate()
    off_us = allocate()
    rltrace.start_allocations()
    on_us = allocate()
    start = time.perf_counter()
    for _ in range(count):
        allocations.leave(allocations.enter("actor.grads"))
    scope_us = (time.perf_counter() - start) / count * 1e6
    start = time.perf_counter()
    torch.cuda.memory._snapshot()
    snapshot_ms = (time.perf_counter() - start) * 1e3
    start = time.perf_counter()
    rltrace.stop_allocations()
    stop_ms = (time.perf_counter() - start) * 1e3
    with capsys.disabled():
        print(
            f"\nalloc + free {off_us:.2f} µs, kept {on_us:.2f} µs; a scope {scope_us:.2f} µs; "
            f"snapshot of {3 * count} entries {snapshot_ms:.0f} ms; stop, replay and write {stop_ms:.0f} ms"
        )
    span, samples = read_after_stop(recorded)
    assert span.args["allocations"] == count
    assert span.args["lost"] == 0
    # Each allocation, each free, and an owner's beginning and end.
    assert len(samples) == 2 * count + 2


@pytest.mark.in_this_process
def test_half_a_million_allocations_are_written(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step of half a million allocations is whole, and written within seconds.

    A step in which log-probs are computed row by row has as many: 1.5 million entries.
    """
    count = 500_000
    before_mib = resident_mib()
    rltrace.start_allocations()
    for _ in range(count):
        torch.empty(MIB, dtype=torch.uint8, device="cuda")
    kept_mib = resident_mib()
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to what there is now
    rltrace.stop_allocations()
    most_mib = resident_mib("VmHWM")
    span, samples = read_after_stop(recorded)
    (process,) = Recording.open(recorded).processes
    (written,) = [event for event in process.events() if isinstance(event, Span) and event.name == ALLOCATIONS_WRITTEN]
    with capsys.disabled():
        print(
            f"\n{count:,} allocations: {kept_mib - before_mib:.0f} MiB of the host's memory, "
            f"{most_mib - before_mib:.0f} MiB at most while they are written, {written.seconds:.2f} s"
        )
    assert (span.args["allocations"], span.args["lost"]) == (count, 0)
    assert len(samples) == 2 * count + 2
    assert written.seconds < 30


def resident_mib(what: str = "VmRSS") -> float:
    """This process's memory now, or its most so far (`VmHWM`)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{what}:")]
    return int(line.split()[1]) / 1024


@pytest.mark.in_this_process
def test_dropped_entries_are_counted(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that the ring dropped are counted, and what is left is exact."""
    monkeypatch.setattr(allocations, "MOST_ENTRIES", 1000)
    rltrace.start_allocations()
    held = [torch.empty(1000 + n, dtype=torch.uint8, device="cuda") for n in range(2000)]
    torch.cuda.reset_peak_memory_stats()
    for n in range(300):
        held[n] = torch.empty(5000, dtype=torch.uint8, device="cuda")
    end_bytes, peak_bytes = requested("current"), requested("peak")
    rltrace.stop_allocations()
    span, samples = read_after_stop(recorded)
    assert span.args["lost"] > 1000
    assert (span.args["end_bytes"], span.args["peak_bytes"]) == (end_bytes, peak_bytes)
    # The first marks of the clock are gone too: the last ones bound it, more widely the further back.
    assert 0 < span.args["error_ns"] < 1_000_000
    assert samples


IDLE = """
    import json, os, torch, rltrace
    from rltrace.host import nvml

    def holds():
        return any(os.getpid() in gpu.bytes_by_pid() for gpu in nvml.gpus())

    torch.cuda.init()
    print(torch.cuda.get_device_properties(0))
    weights = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
    rltrace.start_allocations()
    for step in range(2):
        with rltrace.span("step", step=step), rltrace.phase("reward"):
            weights(torch.ones(1, 8)).sum().backward()
            optimizer.step()
    rltrace.stop_allocations()
    before = holds()
    torch.ones(1, device="cuda")
    print(json.dumps([before, holds()]))
"""
"""As a trainer on whose worker's GPUs others compute: it knows of them, and has none of their memory."""


def test_listing_gpus_takes_no_gpu_memory(tmp_path: Path) -> None:
    """A process that only asks which GPUs there are gets no GPU memory because of rltrace."""
    said, recording = execute(tmp_path, IDLE, "--allocations", "1")
    assert said == [False, True]
    process = only_process(recording)
    assert NO_GPU in process.unavailable["allocations"]
    assert process.unavailable[allocations_of(1)] == NO_GPU


# ---- its clock ----------------------------------------------------------------------------------------------------


@pytest.mark.in_this_process
def test_allocation_times_are_within_bound(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An allocation lies between the clock readings before and after it, within the bound."""
    truth: list[tuple[int, int]] = []
    held = []
    rltrace.start_allocations()
    for _ in range(200):
        before_ns = clock.now_ns()
        held.append(torch.empty(MIB, dtype=torch.uint8, device="cuda"))
        truth.append((before_ns, clock.now_ns()))
        time.sleep(0.005)
    rltrace.stop_allocations()
    span, samples = read_after_stop(recorded)
    error_ns = span.args["error_ns"]
    with capsys.disabled():
        print(f"\nclock: within {error_ns} ns, drift {span.args['drift_ns']} ns in {span.seconds:.2f} s")
    assert error_ns < 50_000
    between = samples[1:-1]  # one owner: its beginning and its end
    assert [after.value - before.value for before, after in zip(samples, between, strict=False)] == [MIB] * 200
    for (before_ns, after_ns), sample in zip(truth, between, strict=True):
        assert before_ns - error_ns <= sample.ts_ns <= after_ns + error_ns


# ---- owners -------------------------------------------------------------------------------------------------------

MODEL = """
    import json, torch, rltrace
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.checkpoint import checkpoint

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(1000, 3001), torch.nn.Linear(3001, 1000)
        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(4))
            self.head = torch.nn.Linear(1000, 5003)
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(x)

    def sharded(model):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    def flat(model):
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        wrap = ModuleWrapPolicy({Layer})
        return FullyShardedDataParallel(model, auto_wrap_policy=wrap, mixed_precision=precision, device_id=0)
"""

TRAIN = f"""{MODEL}
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,))
    with torch.device("cuda"):
        actor, ref = MODELS
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-4, fused=True)
    tokens = torch.randn(512, 1000, device="cuda")

    def step():
        with torch.no_grad():
            wanted = ref(tokens).float().log_softmax(-1) if ref else 0
        (actor(tokens).float().log_softmax(-1) - wanted).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    rltrace.start_allocations()
    step()
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # what waited for another stream, as FSDP1's copies do, is free now
    stats = torch.cuda.memory_stats()
    rltrace.stop_allocations()
    step()
    print(json.dumps({{
        "current": stats["requested_bytes.all.current"],
        "peak": stats["requested_bytes.all.peak"],
        "allocated_peak": stats["allocated_bytes.all.peak"],
        "reserved_peak": stats["reserved_bytes.all.peak"],
        "parameter_bytes": sum(4 * p.numel() for p in actor.parameters()),
        "ref_bytes": sum(4 * p.numel() for p in ref.parameters()) if ref else 0,
        "state_bytes": sum(getattr(value, "_local_tensor", value).nbytes
                           for state in optimizer.state.values() for value in state.values()),
    }}))
    dist.destroy_process_group()
"""


SHARDED = {
    "fsdp2": "sharded(Model()), sharded(Model().requires_grad_(False))",
    "fsdp1": "flat(Model()), flat(Model().requires_grad_(False))",
}
WHOLE = {"ddp": "DistributedDataParallel(Model(), gradient_as_bucket_view=True), None", "plain": "Model(), None"}

Trained = tuple[dict[str, int], Span, list[Counter], Recording]


def train(folder: Path, models: str) -> Trained:
    """A program under `rltrace exec`: what torch said, and what was kept of its third step."""
    said, process = run_program(folder, TRAIN.replace("MODELS", models))
    return said, *kept(process), Recording.open(process.folder.parents[1])


@pytest.fixture(scope="module", params=SHARDED)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An actor and a ref that are sharded. At one rank FSDP1 gathers nothing, and has its copy in bf16 all the same."""
    return train(tmp_path_factory.mktemp("train"), SHARDED[request.param])


def first_and_most(samples: list[Counter]) -> tuple[Tally[str], Tally[str]]:
    """What each owner held at the beginning, and at most."""
    first: Tally[str] = Tally()
    most: Tally[str] = Tally()
    for sample in samples:
        owner = sample.name.removeprefix(ALLOCATIONS).removesuffix("_bytes")
        first.setdefault(owner, int(sample.value))
        most[owner] = max(most[owner], int(sample.value))
    return first, most


def test_step_matches_allocators_peak(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    """A training step adds up to the allocator's own peak."""
    said, span, _, recording = trained
    with capsys.disabled():
        print(f"\npeak {span.args['peak_bytes']:,} asked for, {said['allocated_peak']:,} with torch's rounding")
    assert span.args["peak_bytes"] == said["peak"]
    assert span.args["end_bytes"] == said["current"]
    assert (span.args["lost"], span.args["unaccounted_bytes"], span.args["mismatches"]) == (0, 0, 0)
    assert said["peak"] <= said["allocated_peak"] < 1.1 * said["peak"]
    (peak,) = summarize(recording).allocations
    assert peak.peak_bytes == said["peak"] == sum(peak.at_peak_bytes.values())
    assert peak.reserved_peak_bytes == said["reserved_peak"]


def test_each_owner_holds_what_is_its_own(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    said, _, samples, recording = trained
    first, most = first_and_most(samples)
    (peak,) = summarize(recording).allocations
    with capsys.disabled():
        print(f"\nat the beginning {dict(first)}\nat most {dict(most)}\nat the peak {peak.at_peak_bytes}")
    assert first["actor.optimizer"] == said["state_bytes"] > 2 * said["parameter_bytes"]
    assert first["actor.params"] >= said["parameter_bytes"]
    assert first["ref.params"] >= said["ref_bytes"]
    # While a layer is whole its bf16 copy is there besides.
    assert most["actor.params"] > first["actor.params"]
    assert most["ref.params"] > first["ref.params"]
    assert first["actor.grads"] == 0
    assert most["actor.grads"] >= said["parameter_bytes"]
    # The gradient of the logits, 512 x 5003 values in single precision, is the least of it.
    assert most["actor.activations"] > 512 * 5003 * 4
    assert peak.at_peak_bytes.get("unattributed", 0) < 0.25 * peak.peak_bytes


@pytest.mark.parametrize("kind", WHOLE)
def test_unsharded_owners_hold_their_own(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each owner of a model that is not sharded holds what is its own."""
    said, span, samples, recording = train(tmp_path, WHOLE[kind])
    first, most = first_and_most(samples)
    (peak,) = summarize(recording).allocations
    with capsys.disabled():
        print(f"\n{kind}: at the beginning {dict(first)}\nat most {dict(most)}\nat the peak {peak.at_peak_bytes}")
    assert (span.args["peak_bytes"], span.args["end_bytes"]) == (said["peak"], said["current"])
    assert (span.args["lost"], span.args["unaccounted_bytes"], span.args["mismatches"]) == (0, 0, 0)
    assert first["actor.params"] == most["actor.params"] == said["parameter_bytes"]
    assert first["actor.optimizer"] == said["state_bytes"] > 2 * said["parameter_bytes"]
    # Gradients in DDP's buckets were there before, and stay; others come with the backward and go behind the step.
    assert first["actor.grads"] == (said["parameter_bytes"] if kind == "ddp" else 0)
    assert said["parameter_bytes"] <= most["actor.grads"] < 1.1 * said["parameter_bytes"]
    assert most["actor.activations"] > 512 * 5003 * 4
    # Untraced too, torch keeps the buckets that DDP was made with, beside those of its second step (2.11, H200).
    kept_bytes = said["parameter_bytes"] if kind == "ddp" else 0
    assert peak.at_peak_bytes.get("unattributed", 0) < 0.25 * peak.peak_bytes + kept_bytes


def test_only_chosen_step_is_kept(trained: Trained) -> None:
    """Nothing is kept outside of the chosen step."""
    _, span, samples, recording = trained
    error_ns = span.args["error_ns"]
    assert all(span.start_ns - error_ns <= sample.ts_ns <= span.end_ns + error_ns for sample in samples)
    steps = [e for e in recording.processes[0].events() if isinstance(e, Span) and e.name == "optimizer.step"]
    assert len(steps) == 4
    assert [span.start_ns < step.start_ns < span.end_ns for step in steps] == [False, False, True, False]


@pytest.mark.in_this_process
def test_programs_own_history_is_left_alone(recorded: Path) -> None:
    """A memory history of the program's own is left alone, and the reason is recorded."""
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=1000)
    try:
        rltrace.start_allocations()
        assert allocations._keeping is None
        torch.empty(MIB, dtype=torch.uint8, device="cuda")
        rltrace.stop_allocations()
        assert any(torch.cuda.memory._snapshot()["device_traces"])
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    rltrace.stop()
    assert "a memory history of its own" in Recording.open(recorded).processes[0].unavailable["allocations"]


# ---- `rltrace exec --allocations` -----------------------------------------------------------------------------------

CHOSEN = f"""{MODEL}
    import multiprocessing

    def work(orders):
        global mesh
        torch.cuda.set_device(0)
        uuid = f"GPU-{{torch.cuda.get_device_properties(0).uuid}}"
        rltrace.identify(role="worker", rank=0, device={{"host": "here", "uuid": uuid}})
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cuda", (1,))
        with torch.device("cuda"):
            actor = sharded(Model())
        optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-4, fused=True)
        tokens = torch.randn(512, 1000, device="cuda")
        while orders.recv():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            with rltrace.phase("actor.update"):
                actor(tokens).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            stats = torch.cuda.memory_stats()
            orders.send([stats[f"requested_bytes.all.{{which}}"] for which in ("peak", "current")])
        dist.destroy_process_group()
        orders.send(None)

    if __name__ == "__main__":
        rltrace.identify(role="driver")
        context = multiprocessing.get_context("spawn")
        orders, theirs = context.Pipe()
        worker = context.Process(target=work, args=(theirs,))
        worker.start()
        said = []
        for step in range(5):
            with rltrace.span("step", step=step):
                orders.send(True)
                said.append(orders.recv())
        orders.send(False)
        orders.recv()
        worker.join()
        print(json.dumps(said))
"""


def test_worker_keeps_the_chosen_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The worker of a program that was not edited keeps the chosen steps.

    The driver has the steps, and the worker has the GPU; after the last step there is no phase.
    """
    said, recording = execute(tmp_path, CHOSEN, "--allocations", "2,4")
    driver, worker = (next(one for one in recording.processes if one.role == role) for role in ("driver", "worker"))
    steps = {e.args["step"]: e for e in driver.events() if isinstance(e, Span) and e.name == "step"}
    parts = [e for e in worker.events() if isinstance(e, Span) and e.name == ALLOCATIONS_KEPT]
    with capsys.disabled():
        print(*(f"\n{dict(part.args)}" for part in parts))
    assert [part.args["step"] for part in parts] == [2, 4]
    for part in parts:
        step = steps[part.args["step"]]
        # Others are told of a step a moment before its span begins.
        assert step.start_ns - 50_000_000 < part.start_ns < step.end_ns < part.end_ns
        assert part.args["peak_bytes"] == said[part.args["step"]][0]
        assert (part.args["lost"], part.args["unaccounted_bytes"], part.args["mismatches"]) == (0, 0, 0)
    assert parts[0].args["end_bytes"] == said[2][1]  # of the last one it is what is left when the process ends
    found = summarize(recording)
    assert [(peak.lane, peak.step, peak.lost) for peak in found.allocations] == [("rank 0", 2, 0), ("rank 0", 4, 0)]
    for peak in found.allocations:
        owners = {"actor.params", "actor.grads", "actor.optimizer", "actor.activations"}
        assert owners <= set(peak.at_peak_bytes)
        assert peak.at_peak_bytes.get("unattributed", 0) < 0.25 * peak.peak_bytes
        assert 0 < peak.late_seconds < 1
    assert [(one.step, one.processes, one.reason) for one in found.allocations_missed] == [
        (step, ["driver"], NO_GPU) for step in (2, 4)
    ]


# ---- the run ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Three steps of the example on one GPU; of the last every allocation is kept."""
    folder = tmp_path_factory.mktemp("run")
    config: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    config |= {"steps": 3, "allocations": {"steps": [2]}}
    config["rollout"] |= {"enforce_eager": True}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    done = rltrace_("run", str(folder / "config.yaml"), "--out", str(folder / "run"))
    assert done.returncode == 0, done.stderr
    return Recording.open(folder / "run")


@pytest.mark.parametrize(
    ("place", "owners"),
    [
        (
            "rank 0 worker",
            {"actor.params", "actor.grads", "actor.optimizer", "actor.activations", "ref.params", "weight_sync.bucket"},
        ),
        ("rank 0 engine", {"rollout.weights", "rollout.kv_cache", "rollout.activations"}),
    ],
)
def test_chosen_step_has_every_allocation(
    place: str, owners: set[str], run: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chosen step of a run has every allocation of worker and engine."""
    process = next(process for process in run.processes if process.place == place)
    assert "allocations" not in process.unavailable, process.unavailable
    span, samples = kept(process)
    _, most = first_and_most(samples)
    with capsys.disabled():
        print(f"\n{place}: {len(samples)} samples, {dict(span.args)}\nat most {dict(most)}")
    assert owners <= {owner for owner, size in most.items() if size > 0}
    assert (span.args["lost"], span.args["unaccounted_bytes"], span.args["mismatches"]) == (0, 0, 0)
    driver = next(process for process in run.processes if process.role == "driver")
    (step,) = [e for e in driver.events() if isinstance(e, Span) and e.name == "step" and e.args["step"] == 2]
    assert span.start_ns < step.start_ns < step.end_ns < span.end_ns


def test_pools_are_mapped_by_segment(run: Recording) -> None:
    """The engine's pools sleep at both ends of the step, and are mapped segment by segment within it."""
    process = next(process for process in run.processes if process.place == "rank 0 engine")
    _, samples = kept(process)
    maps = [e for e in process.events() if isinstance(e, Span) and e.name == "cumem.map"]
    for tag in ("weights", "kv_cache"):
        pool = [sample for sample in samples if sample.name == f"{ALLOCATIONS}rollout.{tag}_bytes"]
        assert pool[0].value == 0 == pool[-2].value  # the last of all ends the step's
        woken = max(pool, key=lambda sample: sample.value)
        (mapped,) = [m for m in maps if tag in m.args["tags"] and m.start_ns <= woken.ts_ns <= m.end_ns]
        assert mapped.args["tags"][tag] == woken.value


def test_summary_has_exact_peak(run: Recording) -> None:
    """The summary has the exact peak beside the sampled one."""
    (peak,) = summarize(run).allocations
    assert peak.step == 2
    assert peak.lost == 0
    assert peak.peak_bytes == sum(peak.at_peak_bytes.values()) > 0
    shown = rltrace_("summary", "--all", str(run.path))
    assert shown.returncode == 0, shown.stderr
    assert "Peaks of the steps with every allocation" in shown.stdout


def test_exact_total_matches_the_driver(run: Recording) -> None:
    """The exact total is what the driver says at every phase boundary of the step."""
    off_bytes = exact_less_drivers(run)
    print(off_bytes // MIB)
    assert len(off_bytes) >= 10
    assert abs(off_bytes).max() < 256 * MIB
    assert off_bytes.max() - off_bytes.min() <= 4 * MIB, "what nobody knows of does not move"


def exact_less_drivers(recording: Recording) -> NDArray[np.int64]:
    """At each edge of a kept step: what allocators have, and contexts and the like besides, less NVML's total."""
    seen = Observations(recording)
    windows = StepWindows(seen)
    (kept, *_) = allocation_timelines(seen, windows)
    ledger, of_lane = ledgers(seen)[kept.lane], windows.of(kept.lane)
    start_ns, end_ns = of_lane.windows[of_lane.numbers.index(kept.step)]
    edges = np.flatnonzero((start_ns <= ledger.times_ns) & (ledger.times_ns < end_ns))
    before = np.searchsorted(kept.times_ns, ledger.times_ns[edges], side="right") - 1
    apart = NOT_ALLOCATED - {"allocator.cached", "unaccounted", "free"}
    besides = sum(ledger.row(owner)[edges] for owner in ledger.owners if owner in apart)
    assert kept.reserved_bytes is not None
    return (kept.reserved_bytes[before] + besides - ledger.used[edges]).astype(np.int64)
