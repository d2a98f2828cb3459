"""The ledger of real GPUs adds up to NVML's figure, and it can fail: each source hidden in turn shows as its bytes.

Beside a whole run an independent process, which has nothing to do with rltrace, reads NVML every millisecond.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from gpu_runs import GIB, GRANULE_BYTES, MIB, exec_, reference_run
from numpy.typing import NDArray

from rltrace.analysis import summarize
from rltrace.analysis.ledger import Ledger, ledgers
from rltrace.analysis.observations import Observations
from rltrace.events import Span
from rltrace.read.recording import Recording

GPUS = [count for count in (1, 2, 4) if count <= torch.cuda.device_count()]

WORKER = """
import pickle, subprocess, sys
from unittest.mock import patch
import pynvml
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import reduce_tensor
import rltrace
from rltrace.events import Turn
from rltrace.hooks import boundaries
from rltrace.host import nvml
from rltrace.instrument.memory.cuda_memory import LEDGER
from rltrace.instrument.reference.memory import CudaBuckets
from rltrace_reference.cuda_ipc import CudaIpc
from rltrace_reference.weight_sync import Sender

MIB, GIB = 1 << 20, 1 << 30
pynvml.nvmlInit()
uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
(handle,) = [handle for handle in handles if pynvml.nvmlDeviceGetUUID(handle) == uuid]

def edge(name, look=LEDGER.sample):
    torch.cuda.synchronize()
    # Asked by itself, beside the ledger.
    said = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    with rltrace.span("edge", moment=name, used_bytes=said.used + said.reserved):
        look()

def edge_without(owner, hiding):
    with hiding:
        edge(f"without {owner}")

def model_of(layers):
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(layers))).cuda()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

torch.ones(1, device="cuda")
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
edge("context")
dist.all_reduce(torch.ones(1, device="cuda"))
edge("nccl")
mesh = init_device_mesh("cuda", (1,))
model = model_of(8)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
edge("model")
model(torch.ones(512, 4096, device="cuda")).square().mean().backward()
edge("grads")
optimizer.step()
edge("optimizer")
planted = torch.ones(3 * GIB, dtype=torch.uint8, device="cuda")
edge("3 GiB for nobody")

# What an actor has besides, so that each source is there to be hidden.
((key, models),) = LEDGER.tensors.items()
ref = model_of(4).requires_grad_(False)
sender = Sender(None, 256 * MIB, "test", CudaIpc())
sender.buffers = [sender.transport.create(sender.bucket_bytes) for _ in range(sender.count)]
LEDGER.tensors["Sender"] = CudaBuckets(sender)
batch = torch.ones(2048, 4096, device="cuda")
model(batch)  # what the libraries keep for its size
torch.cuda.empty_cache()
torch.empty(GIB, dtype=torch.uint8, device="cuda")  # freed at once, and kept by the allocator
boundaries.reached(boundaries.Boundary())  # the forwards so far have left nothing
edge("a worker")

for hidden in list(LEDGER._outside):
    edge_without(hidden, patch.dict(LEDGER._outside, {hidden: 0}))
for hidden in ("actor.params", "actor.grads", "actor.optimizer", "ref.params"):
    less = lambda: models() | {f"{hidden}_bytes": 0}
    edge_without(hidden, patch.dict(LEDGER.tensors, {key: less}))
edge_without("weight_sync.bucket", patch.dict(LEDGER.tensors, {"Sender": lambda: {"weight_sync.bucket_bytes": 0}}))

device = LEDGER.device()
torchs = device.torch

def nothing_cached():
    said = torchs()
    return said._replace(reserved_bytes=said.allocated_bytes)

def as_version_1():
    # Which counts what the driver reserves as used by processes.
    said = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return nvml.Memory(said.used, 0, said.free)

edge_without("allocator.cached", patch.object(device, "torch", nothing_cached))
edge_without("driver.reserved", patch.object(device, "card", as_version_1))

loss = model(batch).square().mean()
edge("a forward", lambda: LEDGER.look(Turn.BEAT, activations="actor.activations"))  # inside of a pass
del loss
boundaries.reached(boundaries.Boundary())
with patch.object(LEDGER, "look", lambda *_, **__: None):
    loss = model(batch).square().mean()  # the same once more, and nobody measures what it leaves
edge("without actor.activations")
del loss

engine = subprocess.Popen([sys.executable, sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

def ask(*words):
    engine.stdin.write(pickle.dumps(words))
    engine.stdin.flush()
    return pickle.load(engine.stdout)

ask("start")
edge("engine")
ask("allocate", "weights", GIB)
edge("1 GiB of weights")
ask("allocate", "kv_cache", 2 * GIB)
edge("2 GiB of KV cache")
ask("capture", 256 * MIB)
edge("a graph of 256 MiB")
ask("hold", 512 * MIB)
edge("512 MiB besides")
ask("open", reduce_tensor(planted))
edge("mapped twice")
ask("sleep")
edge("asleep")
ask("wake")
edge("awake")
for hidden in ("rollout.weights", "rollout.kv_cache", "rollout.graphs", "rollout.activations"):
    ask("look")  # on both sides of an edge: the sample behind it is taken where that is newer
    ask("hide", hidden)
    edge(f"without {hidden}")
    ask("look")
    ask("show")
ask("let go")
engine.stdin.close()
engine.wait()
"""

ENGINE = """
import os, pickle, sys
from contextlib import ExitStack
from unittest.mock import patch

answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # whatever else is printed
import torch
from rltrace.record import lifecycle
from rltrace.instrument.memory.cuda_ledger import Reserved
from rltrace.instrument.memory.cuda_memory import LEDGER
from rltrace.instrument.memory.growth import Growth
from rltrace.instrument.memory.pools import Pools
from rltrace.instrument.vllm.engine import addresses, bytes_by_tag
from vllm.device_allocator.cumem import CuMemAllocator

def hidings(owner):
    device, by_owner = LEDGER.device(), pools.bytes_by_owner
    if owner == "rollout.graphs":
        # Torch's allocator counts their pools among all it has: not to have them either, it takes them for an engine's.
        reserved, allocated, *_ = zip(*device.pools(addresses()))
        both = Reserved(sum(reserved), sum(allocated))
        yield patch.object(device, "pools", lambda _addresses: (both, Reserved(0, 0)))
        yield patch.dict(LEDGER._outside, {owner: 0})
    elif owner == "rollout.activations":
        # By construction the rest of what an engine's allocator has handed out: nobody says that it is an engine's.
        yield patch.object(LEDGER, "trains", lambda: True)
    else:
        yield patch.object(pools, "bytes_by_owner", lambda: by_owner() | {f"{owner}_bytes": 0})

lifecycle.identify(role="engine")
LEDGER.engine = pools = Pools(bytes_by_tag, addresses)
kept, hidden = [], ExitStack()
while True:
    try:
        what, *args = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    if what == "start":
        torch.ones(1, device="cuda")
        allocator = CuMemAllocator.get_instance()
    elif what == "allocate":
        with allocator.use_memory_pool(args[0]):
            kept.append(torch.ones(args[1], dtype=torch.uint8, device="cuda"))
    elif what == "capture":
        growth = Growth(LEDGER, "rollout.graphs")  # as around vLLM's `capture_model`
        before_bytes = growth.begin()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept.append(torch.ones(args[0], dtype=torch.uint8, device="cuda"))
        growth.end(before_bytes)
    elif what == "hold":
        kept.append(torch.ones(args[0], dtype=torch.uint8, device="cuda"))
    elif what == "open":
        function, arguments = args[0]
        second = function(*arguments)
        second[0].item()
    elif what == "sleep":
        token = pools.begin_unmap()
        allocator.sleep(())
        pools.end_unmap(token, None, None)
    elif what == "wake":
        token = pools.begin_map()
        allocator.wake_up(["weights", "kv_cache"])
        pools.end_map(token, None, None)
    elif what == "hide":
        for one in hidings(args[0]):
            hidden.enter_context(one)
    elif what == "show":
        hidden.close()
    elif what == "let go":
        del second
    torch.cuda.synchronize()
    LEDGER._pooled = None  # what lies in pools is looked up again
    LEDGER.sample()
    pickle.dump(None, answers)
    answers.flush()
"""


class Moments:
    """The ledger at each edge that the worker named, and what NVML told the worker then without us."""

    def __init__(self, recording: Recording) -> None:
        (ledger,) = ledgers(Observations(recording)).values()
        self.rows: dict[str, dict[str, int]] = {}
        self.witness: dict[str, tuple[int, int]] = {}
        for span in (event for process in recording.processes for event in process.events()):
            if isinstance(span, Span) and span.name == "edge":
                (at,) = np.flatnonzero((span.start_ns <= ledger.times_ns) & (ledger.times_ns <= (span.end_ns or 0)))
                self.rows[span.args["moment"]] = ledger.at(int(at))
                self.witness[span.args["moment"]] = int(ledger.used[at]), span.args["used_bytes"]

    def moved(self, earlier: str, later: str) -> dict[str, int]:
        """By how many bytes each row changed, those that moved by no more than a granule apart."""
        before, after = self.rows[earlier], self.rows[later]
        changes = {owner: size - before.get(owner, 0) for owner, size in after.items() if owner != "free"}
        return {owner: change for owner, change in changes.items() if abs(change) > GRANULE_BYTES}


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> Moments:
    folder = tmp_path_factory.mktemp("planted")
    done = exec_(folder, {"worker": WORKER, "engine": ENGINE}, str(folder / "engine.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    found = Moments(Recording.open(folder / "run"))
    for name, rows in found.rows.items():
        print(name, {owner: round(size / MIB, 1) for owner, size in rows.items() if size})
    return found


def test_total_matches_independent_nvml(moments: Moments) -> None:
    """The ledger's total is what NVML says to another process."""
    assert len(moments.witness) == 30
    for name, (used_bytes, witness_bytes) in moments.witness.items():
        assert used_bytes == pytest.approx(witness_bytes, abs=GRANULE_BYTES), name


def test_training_rows_match_their_tensors(moments: Moments) -> None:
    """The rows of models, gradients and optimizer states are the bytes of their tensors."""
    size_bytes = 8 * 4096 * 4096 * 4
    rows = moments.rows["optimizer"]
    assert rows["actor.params"] == rows["actor.grads"] == size_bytes
    assert rows["actor.optimizer"] == pytest.approx(2 * size_bytes, abs=4096)
    assert moments.rows["a worker"]["ref.params"] == size_bytes // 2
    assert moments.rows["a worker"]["weight_sync.bucket"] == 512 * MIB


@pytest.mark.parametrize(
    ("earlier", "later", "moved"),
    [
        ("optimizer", "3 GiB for nobody", {"unattributed": 3 * GIB}),
        ("engine", "1 GiB of weights", {"rollout.weights": GIB}),
        ("1 GiB of weights", "2 GiB of KV cache", {"rollout.kv_cache": 2 * GIB}),
        ("a graph of 256 MiB", "512 MiB besides", {"rollout.activations": 512 * MIB}),
    ],
)
def test_planted_bytes_move_their_row(earlier: str, later: str, moved: dict[str, int], moments: Moments) -> None:
    """Planted bytes move their row by exactly their size."""
    assert moments.moved(earlier, later) == moved


def test_graph_includes_its_capture(moments: Moments) -> None:
    """A graph's row has its memory and what the driver takes to capture it."""
    moved = moments.moved("2 GiB of KV cache", "a graph of 256 MiB")
    assert list(moved) == ["rollout.graphs"]
    # The driver's part: 64 MiB on one machine, 70 on another.
    assert 256 * MIB < moved["rollout.graphs"] <= 384 * MIB


def test_second_mapping_moves_nothing(moments: Moments) -> None:
    """Mapping the same memory a second time moves no row."""
    assert moments.moved("512 MiB besides", "mapped twice") == {}


def test_sleeping_pool_leaves_and_comes_back(moments: Moments) -> None:
    """A pool that sleeps leaves the GPU, and comes back when it wakes up."""
    gone = {"rollout.weights": -GIB, "rollout.kv_cache": -2 * GIB}
    assert moments.moved("mapped twice", "asleep") == gone
    assert moments.moved("mapped twice", "awake") == {}


@pytest.mark.parametrize(
    ("owner", "before", "row"),
    [
        ("cuda.context", "a worker", "unaccounted"),
        ("nccl", "a worker", "unaccounted"),
        ("allocator.cached", "a worker", "unaccounted"),
        ("driver.reserved", "a worker", "unaccounted"),
        ("actor.params", "a worker", "unattributed"),
        ("actor.grads", "a worker", "unattributed"),
        ("actor.optimizer", "a worker", "unattributed"),
        ("ref.params", "a worker", "unattributed"),
        ("weight_sync.bucket", "a worker", "unattributed"),
        ("actor.activations", "a forward", "unattributed"),
        ("rollout.weights", "awake", "unaccounted"),
        ("rollout.kv_cache", "awake", "unaccounted"),
        ("rollout.graphs", "awake", "unaccounted"),
        ("rollout.activations", "awake", "unattributed"),
    ],
)
def test_hidden_source_shows_as_its_bytes(owner: str, before: str, row: str, moments: Moments) -> None:
    """A hidden source shows as exactly its bytes without an owner.

    What torch's allocator handed out becomes unattributed, everything else unaccounted, and no other row moves.
    """
    size_bytes = moments.rows[before][owner]
    assert size_bytes > 100 * MIB, "nothing to hide"
    assert moments.moved(before, f"without {owner}") == {
        owner: -size_bytes,
        row: pytest.approx(size_bytes, abs=GRANULE_BYTES),
    }


# ---- a whole run ------------------------------------------------------------------------------------------------


WITNESS = """
import select, sys, time
import pynvml

pynvml.nvmlInit()
handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
with open(sys.argv[1], "w") as readings:
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:  # until nobody needs it any more
        for handle in handles:
            asked_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            said = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            told_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            print(asked_ns, told_ns, said.used + said.reserved, pynvml.nvmlDeviceGetUUID(handle), file=readings)
"""


class Readings(NamedTuple):
    """What the witness read of one GPU."""

    asked_ns: NDArray[np.int64]
    told_ns: NDArray[np.int64]
    used_bytes: NDArray[np.int64]

    def around(self, start_ns: int, end_ns: int) -> int | None:
        """The bytes before and behind an interval, where both are the same; else None."""
        before = int(np.searchsorted(self.told_ns, start_ns, side="right")) - 1
        behind = int(np.searchsorted(self.asked_ns, end_ns, side="left"))
        if before < 0 or behind == len(self.asked_ns) or self.used_bytes[before] != self.used_bytes[behind]:
            return None
        return int(self.used_bytes[before])


def readings_of(file: Path, uuid: str) -> Readings:
    """Those of a GPU, in time."""
    rows = [line.split() for line in file.read_text().splitlines()]
    numbers = np.array([row[:3] for row in rows if row[3] == uuid], np.int64)
    return Readings(*numbers.T)


@contextmanager
def witnessed(file: Path) -> Iterator[None]:
    """Has another process read NVML all the while."""
    program = [sys.executable, "-c", WITNESS, str(file)]
    witness = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert witness.stdin is not None and witness.stdout is not None
    try:
        assert witness.stdout.readline() == "ready\n"
        yield
    finally:
        witness.stdin.close()
        assert witness.wait(timeout=10) == 0


class Watched(NamedTuple):
    """A run of one rank, and what an independent process read beside it."""

    recording: Recording
    readings: Path


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("watched")
    with witnessed(folder / "readings"):
        done = reference_run(folder, ranks=1, steps=3)
    assert done.returncode == 0, done.stderr[-3000:]
    return Watched(Recording.open(folder / "run"), folder / "readings")


@pytest.mark.parametrize("ranks", GPUS)
def test_every_edge_of_a_run_adds_up(ranks: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if ranks == 1:
        recording = request.getfixturevalue("watched").recording
    else:
        done = reference_run(tmp_path, ranks=ranks, steps=3)
        assert done.returncode == 0, done.stderr[-3000:]
        recording = Recording.open(tmp_path / "run")
    devices = summarize(recording).memory
    assert len(devices) == ranks
    for device in devices:
        residual = device.residual
        print(device.lane, residual, device.unknown)
        assert residual is not None
        assert residual.boundaries_over_limit == 0
        assert residual.inconsistent_boundaries <= 0.05 * residual.boundaries
        assert not device.unknown
        assert {"actor.optimizer", "rollout.weights", "rollout.kv_cache", "rollout.graphs"} <= set(device.at_peak_bytes)


LEAST_COMPARED = 20
"""Of some 60 edges: where memory has just moved, or is about to, two readings a millisecond apart do not agree."""


def test_independent_sampler_reads_the_totals(watched: Watched) -> None:
    """An independent sampler reads the ledger's total at every consistent phase boundary."""
    (found,) = ledgers(Observations(watched.recording)).items()
    ledger: Ledger = found[1]
    readings = readings_of(watched.readings, found[0].device or "")
    compared = []
    for moment in map(int, np.flatnonzero(ledger.is_consistent)):
        end_ns = int(ledger.times_ns[moment])
        read_bytes = readings.around(end_ns - int(ledger.cost_ns[moment]), end_ns)
        if read_bytes is not None:
            compared.append((int(ledger.used[moment]), read_bytes))
    print(f"{len(compared)} of {ledger.is_consistent.sum()} settled edges, {len(readings.told_ns)} readings")
    assert len(compared) >= LEAST_COMPARED
    used_bytes, read_bytes_ = zip(*compared, strict=True)
    assert max(used_bytes) - min(used_bytes) > 4 * GIB, "the engine asleep and awake are both among them"
    assert used_bytes == pytest.approx(read_bytes_, abs=GRANULE_BYTES)
