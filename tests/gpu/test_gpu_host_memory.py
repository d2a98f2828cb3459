"""What lies in the host's memory beside real GPUs, and what of it is pinned: owner by owner, by exactly its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu_runs import MIB, exec_

from rltrace.events import HOST_BYTES, PINNED_BYTES, Counter, Span
from rltrace.read.recording import Recording

WORKER = """
import gc, time
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
import rltrace
from rltrace.instrument.memory.cuda_memory import LEDGER
from rltrace.instrument.reference.memory import CudaBuckets
from rltrace_reference.host_staging import HostStaging

MIB = 1 << 20

def edge(name, **args):
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # tensors are asked again only where torch's allocator has moved any
    with rltrace.span("edge", moment=name, **args):
        LEDGER.sample()

def microseconds(ask):
    begin_ns = time.perf_counter_ns()
    for _ in range(1000):
        ask()
    return (time.perf_counter_ns() - begin_ns) / 1e6

def offloaded(pin_memory):
    # Shards of 4 MiB: torch's allocator rounds up to powers of two.
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    policy = CPUOffloadPolicy(pin_memory=pin_memory)
    for layer in model:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    return fully_shard(model, mesh=mesh, offload_policy=policy)

torch.ones(1, device="cuda")
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cuda", (1,))
edge("nothing")
actor = offloaded(pin_memory=False)
optimizer = torch.optim.SGD(actor.parameters())
edge("pageable")
ref = offloaded(pin_memory=True).requires_grad_(False)
edge("pinned")
shard = next(ref.parameters())._local_tensor
device = LEDGER.device()
edge("asked", is_pinned_us=microseconds(shard.is_pinned), torch_us=microseconds(device.pinned_bytes))
del ref, shard
gc.collect()
edge("kept by torch")
buffer = HostStaging().create(8 * MIB)

class Sender:
    buffers = [buffer]

sender = Sender()
LEDGER.tensors["Sender"] = CudaBuckets(sender)
edge("staged")
del LEDGER.tensors["Sender"]
buffer.close()
"""

ENGINE = """
import torch
import rltrace
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.utils.platform_utils import is_pin_memory_available

def edge(name):
    with rltrace.span("edge", moment=name, pins=is_pin_memory_available()):
        pass

torch.ones(1, device="cuda")
allocator = CuMemAllocator.get_instance()
with allocator.use_memory_pool("weights"):
    weights = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
with allocator.use_memory_pool("kv_cache"):
    kv_cache = torch.ones(32 << 20, dtype=torch.uint8, device="cuda")
allocator.sleep(("weights",))
edge("asleep")
allocator.wake_up()
edge("awake")
"""
"""Ends with pools that are freed while the interpreter is taken down, by a callback into Python."""


class Moments:
    """What a process had said of the host's memory at each edge that it named, and that edge's arguments."""

    def __init__(self, folder: Path, program: str) -> None:
        done = exec_(folder, {"program": program})
        assert done.returncode == 0, done.stderr[-3000:]
        events = [list(process.events()) for process in Recording.open(folder / "run").processes]
        (own,) = (seen for seen in events if any(isinstance(one, Span) and one.name == "edge" for one in seen))
        samples = sorted((one for one in own if isinstance(one, Counter)), key=lambda one: one.ts_ns)
        self.rows: dict[str, dict[str, float]] = {}
        self.args: dict[str, dict[str, Any]] = {}
        for span in own:
            if isinstance(span, Span) and span.name == "edge":
                assert span.end_ns is not None
                said = {one.name: one.value for one in samples if one.ts_ns <= span.end_ns}
                of_host = {name: size for name, size in said.items() if name.endswith((HOST_BYTES, PINNED_BYTES))}
                self.rows[span.args["moment"]], self.args[span.args["moment"]] = of_host, span.args
                print(span.args, of_host)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Moments:
    return Moments(tmp_path_factory.mktemp("worker"), WORKER)


def without_owner(worker: Moments, moment: str) -> float:
    """By how much more torch had pinned that no owner had than at the beginning."""
    name = f"unattributed{PINNED_BYTES}"
    return worker.rows[moment][name] - worker.rows["nothing"][name]


def test_offloaded_shards_are_pinned_if_asked(worker: Moments) -> None:
    """Offloaded shards are pinned if they were meant to be, by exactly their bytes."""
    size_bytes = 4 * 1024 * 1024 * 4
    pageable, pinned = worker.rows["pageable"], worker.rows["pinned"]
    assert (pageable["actor.params_host_bytes"], pageable["actor.params_pinned_bytes"]) == (size_bytes, 0)
    assert "ref.params_host_bytes" not in pageable
    assert (pinned["ref.params_host_bytes"], pinned["ref.params_pinned_bytes"]) == (size_bytes, size_bytes)
    assert pinned["actor.params_pinned_bytes"] == 0
    assert without_owner(worker, "pageable") == without_owner(worker, "pinned") == 0


def test_torchs_pinned_cache_is_seen(worker: Moments) -> None:
    """Pinned memory that torch keeps after it was given back is seen."""
    rows = worker.rows["kept by torch"]
    assert (rows["ref.params_host_bytes"], rows["ref.params_pinned_bytes"]) == (0, 0)
    assert without_owner(worker, "kept by torch") == 4 * 1024 * 1024 * 4


def test_staged_bucket_is_pinned_in_place(worker: Moments) -> None:
    """A staged bucket is pinned where it lies, and torch has none of it."""
    rows = worker.rows["staged"]
    assert rows["weight_sync.bucket_host_bytes"] == rows["weight_sync.bucket_pinned_bytes"] == 8 * MIB
    assert without_owner(worker, "staged") == without_owner(worker, "kept by torch")


def test_asking_what_is_pinned_is_cheap(worker: Moments) -> None:
    """Asking what is pinned takes a small part of a sample's 200 to 300 µs.

    torch is asked for its count at each sample, a tensor only where it has moved.
    """
    asked = worker.args["asked"]
    assert asked["is_pinned_us"] < 10, asked
    assert asked["torch_us"] < 50, asked


def test_level_1_copy_is_pinned_as_vllm_does(tmp_path: Path) -> None:
    """The host's copy of a level-1 sleep is pinned as vLLM made it, and gone after the wake-up."""
    engine = Moments(tmp_path, ENGINE)
    asleep, awake = engine.rows["asleep"], engine.rows["awake"]
    pinned_bytes = 64 * MIB if engine.args["asleep"]["pins"] else 0
    assert (asleep["rollout.weights_host_bytes"], asleep["rollout.weights_pinned_bytes"]) == (64 * MIB, pinned_bytes)
    assert (awake["rollout.weights_host_bytes"], awake["rollout.weights_pinned_bytes"]) == (0, 0)
    assert not any(name.startswith("rollout.kv_cache") for name in asleep)
