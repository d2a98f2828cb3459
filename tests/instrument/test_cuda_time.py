"""The pairs are where the work is: real FSDP2 on gloo, on a device whose events fire as they are recorded.

On a CPU what is submitted is done on the spot, so the host's clock is the device's: every hook, pair and span is the
one of a GPU, and only `CudaEvents` is replaced.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rltrace_reference import grpo, weight_sync
from sharded_runs import TRAIN, train
from test_summary_screen import screen
from traced_runs import TracedRun, run_traced
from warm_python import run_source

from rltrace.analysis import summarize
from rltrace.events import Span
from rltrace.hooks.boundaries import Boundary
from rltrace.hooks.hook import NOBODY, Nobody
from rltrace.hooks.patching import PatchSet
from rltrace.instrument.torch import cuda_time
from rltrace.read.recording import Process

ON_THE_HOST = """
import time
import rltrace
from rltrace.record import spans
from rltrace.instrument.torch.device_time import DeviceTimes
from rltrace.instrument.torch import cuda_time
from rltrace.hooks.patching import PatchSet

class HostDevice:
    def __init__(self):
        self.epoch_ns = time.monotonic_ns()
    def new_event(self):
        return [0]
    def is_capturing(self):
        return False
    def record(self, event):
        event[0] = time.monotonic_ns()
        return 1
    record_idle = record
    def has_fired(self, event):
        return True
    def elapsed_ms(self, earlier, later):
        return (later[0] - earlier[0]) / 1e6

class HostPairs(cuda_time.CudaPairs):
    def _open(self):
        if self._times is None:
            self.measure(HostDevice())
        return self._times

pairs = HostPairs()
patches = PatchSet("on_the_host", spans.current(), cuda_time.CudaTime.supports)
cuda_time.name_hooks(patches, pairs, of_layers=True)
"""


def train_on_the_host(folder: Path, ranks: int, before: str = ON_THE_HOST) -> TracedRun:
    ending = "dist.destroy_process_group()"
    source = before + TRAIN.replace(ending, f"{ending}\n    pairs.close()")
    return train(folder, "fsdp2", ranks=ranks, source=source)


@pytest.fixture(scope="module", params=[1, 2])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, TracedRun]:
    return request.param, train_on_the_host(tmp_path_factory.mktemp("ranks"), request.param)


def by_start(process: Process, name: str) -> list[Span]:
    spans = [event for event in process.events() if event.name == name]
    return sorted(spans, key=lambda span: span.start_ns)


@pytest.mark.parametrize("name", ["fsdp.forward", "fsdp.backward", "autograd.backward", "optimizer.step"])
def test_host_and_device_work_agree(trained: tuple[int, TracedRun], name: str) -> None:
    """What the host does and what the device does for it are the same work."""
    ranks, run = trained
    matched = 0
    for process in run.recording.processes:
        # What a backward repeats is a part of it.
        host = [span for span in by_start(process, name) if "recompute" not in span.args]
        device = by_start(process, f"gpu.{name}")
        assert [span.args.get("module") for span in device] == [span.args.get("module") for span in host]
        for around, pair in zip(host, device, strict=True):
            assert pair.start_ns < around.end_ns and pair.end_ns > around.start_ns
            matched += 1
    assert matched >= 2 * ranks


@pytest.mark.parametrize("name", ["fsdp.all_gather", "fsdp.reduce_scatter"])
def test_collective_pair_is_inside_its_launch(trained: tuple[int, TracedRun], name: str) -> None:
    """The pair of events of a collective is inside of what launches it."""
    ranks, run = trained
    for process in run.recording.processes:
        host, device = by_start(process, name), by_start(process, f"gpu.{name}")
        assert len(device) == len(host)
        for around, pair in zip(host, device, strict=True):
            error_ns = pair.args["error_ns"]
            assert around.start_ns - error_ns <= pair.start_ns <= pair.end_ns <= around.end_ns + error_ns
            assert pair.args["module"] == around.args["module"]
    assert bool(run.spans(f"gpu.{name}")) == (ranks > 1)


def test_pair_has_stream_and_error(trained: tuple[int, TracedRun]) -> None:
    """A pair of events says its stream, and how far off it may be."""
    _, run = trained
    pairs = [span for span in run.spans() if span.name.startswith("gpu.")]
    assert pairs
    assert all(span.args["stream"] == 1 and 0 < span.args["error_ns"] < 10**9 for span in pairs)


def test_collective_has_its_bytes(trained: tuple[int, TracedRun]) -> None:
    """A collective says its bytes; at one rank there is none."""
    ranks, run = trained
    gathers = run.spans("gpu.fsdp.all_gather")
    if ranks == 1:
        assert gathers == run.spans("gpu.fsdp.reduce_scatter") == []
        return
    sizes = sorted(span.args["bytes"] for span in run.spans("fsdp.all_gather"))
    assert sizes and sorted(span.args["bytes"] for span in gathers) == sizes


class Pairs:
    """What would be measured."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, dict[str, object], int]] = []

    open_forward = open_backward = span = reached = None

    def begin(self, name: str, args: dict[str, object], queue: int = 0) -> None:
        self.opened.append((name, args, queue))


class Register:
    """Of hooks, whose reports nobody asks for here."""

    def hook(self, *_: object) -> Nobody:
        return NOBODY


class Group:
    def __init__(self, ranks: int) -> None:
        self.size = lambda: ranks


def test_collectives_of_a_group_are_a_queue() -> None:
    """Collectives of one group are one queue, and an asynchronous one is left out.

    An asynchronous one ends on NCCL's stream, which an event on this one does not wait for.
    """
    pairs, groups = Pairs(), [Group(2), Group(4), Group(1)]
    small, large = torch.zeros(3), torch.zeros(12)
    for group in groups:
        for whole, other in (("output_tensor", "input_tensor"), ("input_tensor", "output_tensor")):
            for is_async in (False, True):
                kwargs = {whole: large, other: small, "group": group, "async_op": is_async}
                cuda_time.begin_collective(cast(Any, pairs), f"of the {whole}", whole, (), kwargs)
    assert pairs.opened == [
        (f"of the {whole}", {"bytes": 48, "ranks": group.size()}, id(group))
        for group in groups[:2]
        for whole in ("output_tensor", "input_tensor")
    ]


def test_bucket_copies_are_gpu_spans() -> None:
    """Copies of a bucket are GPU spans that name it, whether they succeed or not."""
    pairs, bucket = Pairs(), SimpleNamespace(key="3.0.7")
    patches = PatchSet("test", Register())
    cuda_time.name_hooks(patches, cast(Any, pairs), of_layers=False)
    packing = SimpleNamespace(places=[torch.zeros(2)], pieces=[torch.ones(2)], summands=SimpleNamespace(add_to=max))
    try:
        weight_sync.Sender.pack(cast(Any, SimpleNamespace(sums=[1])), cast(Any, bucket), cast(Any, packing))
        with pytest.raises(AttributeError):
            weight_sync.Receiver.load(cast(Any, SimpleNamespace()), cast(Any, bucket))
    finally:
        assert patches.undo() == []
    args = {"bucket": "3.0.7"}
    assert pairs.opened == [("gpu.weight_sync.pack", args, 0), ("gpu.weight_sync.load", args, 0)]
    emitted = {name for hook in patches.hooks for name in hook.emits}
    assert {name for name, _, _ in pairs.opened} <= emitted
    assert packing.places[0].tolist() == [1, 1]


OF_ANOTHER = """
import sys
from types import ModuleType
import torch.cuda
from rltrace.instrument.verl.worker import timed_span

def prepare(number):
    return 1 / number

sys.modules["outputs"] = outputs = ModuleType("outputs")
outputs.prepare = prepare
others = PatchSet("verl", spans.current(), ())
timed_span("micro_batch.log_probs")(others, "outputs:prepare")
assert outputs.prepare is not prepare and outputs.prepare(2) == 0.5
try:
    outputs.prepare(0)
except ZeroDivisionError as error:
    print(error)
assert patches.undo() == []  # nobody is there to time it
outputs.prepare(1)
pairs.close()
"""


def test_own_frameworks_launches_are_timed(tmp_path: Path) -> None:
    """What a framework of the user's launches is timed beside its span, while anybody times."""
    run = run_traced(tmp_path, ON_THE_HOST + OF_ANOTHER, imported="torch")
    assert (run.returncode, run.out) == (0, "division by zero\n"), run.err
    on_host, on_gpu = run.spans("micro_batch.log_probs"), run.spans("gpu.micro_batch.log_probs")
    assert [span.args.get("error") for span in on_host] == [None, "ZeroDivisionError", None]
    assert len(on_gpu) == 1  # what ended by an error may have launched anything
    assert on_gpu[0].start_ns <= on_host[0].end_ns and on_gpu[0].end_ns >= on_host[0].start_ns


NESTED = """
import torch
from torch.utils.checkpoint import checkpoint
layer, hidden = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
for _ in range(3):
    hidden = checkpoint(layer, hidden, use_reentrant=True)  # computed again within the backward, by a backward
hidden.sum().backward()
pairs.close()
"""


def test_inner_backward_has_no_pair(tmp_path: Path) -> None:
    """A backward inside of another one has no pair of events of its own."""
    run = run_traced(tmp_path, ON_THE_HOST + NESTED, imported="torch")
    assert run.returncode == 0, run.err
    assert len(run.spans("gpu.autograd.backward")) == len(run.spans("autograd.backward")) == 1


def test_log_probs_are_a_gpu_span() -> None:
    """The log-probs of the reference run are a GPU span."""
    pairs, logits, tokens = Pairs(), torch.zeros(1, 3, 4), torch.zeros(1, 3, dtype=torch.int64)
    patches = PatchSet("test", Register())
    cuda_time.name_hooks(patches, cast(Any, pairs), of_layers=False)
    try:
        assert grpo.token_log_probs(logits, tokens, 1.0).shape == (1, 3)
    finally:
        assert patches.undo() == []
    assert pairs.opened == [("gpu.micro_batch.log_probs", {}, 0)]


def test_device_is_asked_at_ends() -> None:
    """The device is asked where work has ended, and not where it begins."""
    asked: list[str] = []
    pairs = cuda_time.CudaPairs()
    pairs._times = cast(Any, SimpleNamespace(poll_if_due=lambda: asked.append("poll")))
    for is_end in (False, True):
        pairs.reached(Boundary(("actor.update",), is_end=is_end))
    assert asked == ["poll"]


def test_cost_of_a_pair_is_measured(tmp_path: Path) -> None:
    """The measured cost of a pair includes the hook and the resolution."""
    program = f"""{ON_THE_HOST}
from rltrace.hooks import cost
written = []
record = cuda_time.one_pair(DeviceTimes(HostDevice(), written.append))
for _ in range(cost.EVENTS):
    assert written == []
    record()
assert [span.name for span in written] == ["gpu.cost"] * cost.EVENTS
pairs._open()
costs = rltrace.measure_cost()
assert costs["device_span"] > costs["span"] > 0
"""
    run = run_traced(tmp_path, program, imported="torch")
    assert run.returncode == 0, run.err
    assert run.spans("gpu.cost") == []
    (process,) = (process for process in run.recording.processes if process.costs)
    assert process.costs["device_span"] > 0


FORKED = """
import os
with pairs.span("in the parent"):
    pass
child = os.fork()
if child == 0:
    os._exit(pairs._times is not None)
_, status = os.waitpid(child, 0)
print(status)
"""


def test_forked_child_has_no_device(tmp_path: Path) -> None:
    """A forked child does not touch its parent's device."""
    run = run_traced(tmp_path, ON_THE_HOST + FORKED, imported="torch")
    assert (run.returncode, run.out, run.err) == (0, "0\n", "")
    assert len(run.spans("gpu.in the parent")) == 1


def test_unmeasured_work_has_a_reason(tmp_path: Path) -> None:
    """Work that was not measured has a reason."""
    lost = """
with pairs.span("not over"):
    pass
HostDevice.has_fired = lambda self, event: False
import contextlib
for _ in range(2):
    with contextlib.suppress(ValueError), pairs.span("ended by an error"):
        raise ValueError
"""
    run = run_traced(tmp_path, ON_THE_HOST + lost, imported="torch")
    (process,) = run.recording.processes
    reason = "2 ended by an error or on another stream; 1 not over when the process ended"
    assert summarize(run.recording).gpu_work_missed == {process.name: reason}
    assert f"GPU work of {process.name} that was not timed: {reason}" in screen(run.recording, 140, whole=True)


def test_lost_device_breaks_nothing(tmp_path: Path) -> None:
    """A device that is lost breaks nothing, and is named at the end."""
    lost = """
def refuse(*_):
    raise RuntimeError("the device is lost")
for _ in range(3):
    with pairs.span("work"):
        pass
HostDevice.has_fired = refuse
"""
    run = run_traced(tmp_path, ON_THE_HOST + lost, imported="torch")
    assert (run.returncode, run.err) == (0, "")
    (process,) = run.recording.processes
    assert process.unavailable == {"GPU time": "3 refused by CUDA"}


def test_the_numbers_learned_are_the_same(trained: tuple[int, TracedRun], tmp_path: Path) -> None:
    ranks, run = trained
    bare = train(tmp_path, "fsdp2", ranks=ranks, RLTRACE_DISABLE="fsdp2,torch_optim")
    assert run.out == bare.out != ""


@pytest.mark.skipif(cuda_time.DRIVER.exists(), reason="there is a driver")
def test_without_a_driver_there_is_no_hook(tmp_path: Path) -> None:
    program = "import torch.distributed.fsdp; import rltrace"
    run = run_traced(tmp_path, program, imported="torch")
    hooks = [
        hook for process in run.recording.processes for hook in process.hooks if hook["instrumentation"] == "cuda_time"
    ]
    assert hooks == []


def test_layers_have_pairs_if_asked(tmp_path: Path) -> None:
    """A model's forward has a pair of events, and a whole backward; those of layers have them if asked for."""
    run = train_on_the_host(tmp_path, 1, ON_THE_HOST.replace("of_layers=True", "of_layers=False"))
    whole = [span for span in run.spans("fsdp.forward") if span.args["module"] == "" and "recompute" not in span.args]
    assert len(run.spans("gpu.fsdp.forward")) == len(whole) > 0
    assert len(run.spans("gpu.autograd.backward")) == len(run.spans("autograd.backward")) > 0
    assert run.spans("fsdp.backward") and not run.spans("gpu.fsdp.backward")


@pytest.mark.parametrize(("of_layers", "fewer"), [(True, 0), (False, 1)])
def test_layer_without_a_pair_has_no_hook(tmp_path: Path, of_layers: bool, fewer: int) -> None:
    """A layer without a pair of events has no hook for one."""
    counted = "print('hooks', [len(m._forward_hooks) for m in (model, model.layers[0])], flush=True)\n    learned = b"
    source = ON_THE_HOST.replace("of_layers=True", f"{of_layers=}") + TRAIN.replace("learned = b", counted)
    run = train(tmp_path, "fsdp2", ranks=1, source=source)
    root, layer = json.loads(run.out.splitlines()[0].removeprefix("hooks"))
    assert root - layer == fewer


def test_no_event_makes_a_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where CUDA is initialized and nothing was allocated, no event of ours makes a context."""
    stats = {"num_device_alloc": 0, "reserved_bytes": {"all": {"current": 0}}}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: stats)
    made = []
    monkeypatch.setattr(cuda_time, "CudaEvents", made.append)
    pairs = cuda_time.CudaPairs()
    with pairs.span("x"):
        assert made == []
    stats["num_device_alloc"] = 1
    monkeypatch.setattr(pairs, "measure", lambda _device: None)
    with pairs.span("x"):
        assert made == [torch]


def test_process_without_cuda_stays_so(tmp_path: Path) -> None:
    """A process that does not use CUDA is not made to."""
    code = (
        "import torch; from rltrace.instrument.torch.cuda_time import CudaPairs\n"
        "with CudaPairs().span('x'): pass\n"
        "print(torch.cuda.is_initialized())"
    )
    done = run_source("torch", code, tmp_path)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
