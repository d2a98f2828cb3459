"""The ledger of real GPUs adds up to NVML's figure, it can fail, and it says who held what when there was no room."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from rltrace.analysis import summarize
from rltrace.analysis.ledger import ledgers
from rltrace.analysis.observations import Observations
from rltrace.events import Span
from rltrace.recording import Recording

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpu.yaml"
GPUS = [count for count in (1, 2, 4) if count <= torch.cuda.device_count()]
GIB = 1 << 30
GRANULE_BYTES = 2 << 20
"""Of the driver's memory."""

WORKER = """
import pickle, subprocess, sys, time
import pynvml
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import reduce_tensor
import rltrace
from rltrace.instrument.cuda_memory import LEDGER

GIB = 1 << 30
pynvml.nvmlInit()
uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
(handle,) = [handle for handle in handles if pynvml.nvmlDeviceGetUUID(handle) == uuid]

def edge(name):
    torch.cuda.synchronize()
    # Asked by itself, beside the ledger.
    used = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used
    with rltrace.span("edge", moment=name, used_bytes=used):
        LEDGER.sample()

torch.ones(1, device="cuda")
dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
edge("context")
dist.all_reduce(torch.ones(1, device="cuda"))
edge("nccl")
mesh = init_device_mesh("cuda", (1,))
model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(8))).cuda()
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
edge("model")
model(torch.ones(512, 4096, device="cuda")).square().mean().backward()
edge("grads")
optimizer.step()
edge("optimizer")
planted = torch.ones(3 * GIB, dtype=torch.uint8, device="cuda")
edge("3 GiB for nobody")
for hidden in list(LEDGER._outside):
    kept, LEDGER._outside[hidden] = LEDGER._outside[hidden], 0
    edge(f"without {hidden}")
    LEDGER._outside[hidden] = kept
((key, models),) = LEDGER.tensors.items()
for hidden in ("actor.params_bytes", "actor.grads_bytes", "actor.optimizer_bytes"):
    LEDGER.tensors[key] = lambda: models() | {hidden: 0}
    edge(f"without {hidden.removesuffix('_bytes')}")
LEDGER.tensors[key] = models

engine = subprocess.Popen([sys.executable, sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

def ask(*words):
    engine.stdin.write(pickle.dumps(words))
    engine.stdin.flush()
    return pickle.load(engine.stdout)

ask("start")
edge("engine")
ask("allocate", 2 * GIB)
edge("2 GiB of KV cache")
ask("open", reduce_tensor(planted))
edge("mapped twice")
ask("sleep")
edge("asleep")
ask("wake")
edge("awake")
time.sleep(0.1)  # what the engine says next is not true
ask("hide")
edge("without rollout.kv_cache")
ask("let go")
engine.stdin.close()
engine.wait()
"""

ENGINE = """
import os, pickle, sys

answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # whatever else is printed
import torch
from rltrace import recorder
from rltrace.instrument.cuda_memory import LEDGER
from rltrace.instrument.pools import Pools
from rltrace.instrument.vllm import addresses, bytes_by_tag
from vllm.device_allocator.cumem import CuMemAllocator

recorder.identify(role="engine")
LEDGER.engine = pools = Pools(bytes_by_tag, addresses)
while True:
    try:
        what, *args = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    if what == "start":
        torch.ones(1, device="cuda")
        allocator = CuMemAllocator.get_instance()
    elif what == "allocate":
        with allocator.use_memory_pool("kv_cache"):
            pool = torch.ones(args[0], dtype=torch.uint8, device="cuda")
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
        allocator.wake_up(["kv_cache"])
        pools.end_map(token, None, None)
    elif what == "hide":
        pools.bytes_by_owner = lambda: {"rollout.kv_cache_bytes": 0}
    elif what == "let go":
        del second
    torch.cuda.synchronize()
    LEDGER.sample()
    pickle.dump(None, answers)
    answers.flush()
"""


def rltrace_(*words: str, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    """The command line, of the package that is tested."""
    cli = "import sys; from rltrace.cli import main; main(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", cli, *words], check=False, capture_output=True, text=True, timeout=timeout_s
    )


class Moments:
    """The ledger at each edge that the worker named, and what NVML told the worker then without us."""

    def __init__(self, recording: Recording) -> None:
        (ledger,) = ledgers(Observations(recording)).values()
        self.rows: dict[str, dict[str, int]] = {}
        self.witness: dict[str, tuple[int, int]] = {}
        for span in (event for process in recording.processes for event in process.events()):
            if isinstance(span, Span) and span.name == "edge":
                (at,) = np.flatnonzero((span.start_ns <= ledger.times_ns) & (ledger.times_ns <= (span.end_ns or 0)))
                rows = self.rows[span.args["moment"]] = ledger.at(int(at))
                used_bytes = int(ledger.used[at]) - rows["driver.reserved"]
                self.witness[span.args["moment"]] = used_bytes, span.args["used_bytes"]

    def moved(self, earlier: str, later: str) -> dict[str, int]:
        """By how many bytes each row changed, those that moved by no more than a granule apart."""
        before, after = self.rows[earlier], self.rows[later]
        changes = {owner: size - before.get(owner, 0) for owner, size in after.items() if owner != "free"}
        return {owner: change for owner, change in changes.items() if abs(change) > GRANULE_BYTES}


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> Moments:
    folder = tmp_path_factory.mktemp("planted")
    (folder / "worker.py").write_text(WORKER)
    (folder / "engine.py").write_text(ENGINE)
    program = [sys.executable, str(folder / "worker.py"), str(folder / "engine.py")]
    done = rltrace_("exec", "--out", str(folder / "run"), "--", *program)
    assert done.returncode == 0, done.stderr[-3000:]
    found = Moments(Recording.open(folder / "run"))
    for name, rows in found.rows.items():
        print(name, {owner: round(size / (1 << 20), 1) for owner, size in rows.items() if size})
    return found


def test_the_ledgers_total_is_what_nvml_says_to_somebody_else(moments: Moments) -> None:
    assert len(moments.witness) == 17
    for name, (used_bytes, witness_bytes) in moments.witness.items():
        assert used_bytes == pytest.approx(witness_bytes, abs=GRANULE_BYTES), name


def test_models_gradients_and_optimizer_states_are_their_tensors(moments: Moments) -> None:
    size_bytes = 8 * 4096 * 4096 * 4
    rows = moments.rows["optimizer"]
    assert rows["actor.params"] == rows["actor.grads"] == size_bytes
    assert rows["actor.optimizer"] == pytest.approx(2 * size_bytes, abs=4096)


def test_what_is_planted_moves_its_row_by_exactly_that(moments: Moments) -> None:
    assert moments.moved("optimizer", "3 GiB for nobody") == {"unattributed": 3 * GIB}
    assert moments.moved("engine", "2 GiB of KV cache") == {"rollout.kv_cache": 2 * GIB}


def test_the_second_side_of_a_mapping_moves_nothing(moments: Moments) -> None:
    assert moments.moved("2 GiB of KV cache", "mapped twice") == {}


def test_a_pool_asleep_has_left_the_card_and_comes_back(moments: Moments) -> None:
    assert moments.moved("mapped twice", "asleep") == {"rollout.kv_cache": -2 * GIB}
    assert moments.moved("mapped twice", "awake") == {}


@pytest.mark.parametrize("owner", ["cuda.context", "nccl", "rollout.kv_cache"])
def test_a_hidden_source_is_unexplained_by_exactly_its_bytes(owner: str, moments: Moments) -> None:
    before = "awake" if owner == "rollout.kv_cache" else "3 GiB for nobody"
    size_bytes = moments.rows[before][owner]
    assert size_bytes > 100 << 20
    assert moments.moved(before, f"without {owner}") == {owner: -size_bytes, "unexplained": size_bytes}


@pytest.mark.parametrize("owner", ["actor.params", "actor.grads", "actor.optimizer"])
def test_hidden_tensors_are_allocated_for_nobody(owner: str, moments: Moments) -> None:
    before = "3 GiB for nobody"
    size_bytes = moments.rows[before][owner]
    assert moments.moved(before, f"without {owner}") == {owner: -size_bytes, "unattributed": size_bytes}


def reference_run(folder: Path, **changes: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """The example, changed in these keys of its parts, under `rltrace run`."""
    config = yaml.safe_load(EXAMPLE.read_text())
    for part, keys in changes.items():
        config[part] = config[part] | keys if isinstance(keys, dict) else keys
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return rltrace_("run", str(folder / "config.yaml"), "--out", str(folder / "run"))


@pytest.mark.parametrize("ranks", GPUS)
def test_every_edge_of_a_run_adds_up(ranks: int, tmp_path: Path) -> None:
    done = reference_run(tmp_path, ranks=ranks, steps=3)
    assert done.returncode == 0, done.stderr[-3000:]
    devices = summarize(Recording.open(tmp_path / "run")).memory
    assert len(devices) == ranks
    for device in devices:
        residual = device.residual
        print(device.lane, residual, device.unknown)
        assert residual is not None
        assert residual.edges_over_allowed == 0
        assert residual.unsettled_edges <= 0.05 * residual.edges
        assert not device.unknown
        assert {"actor.optimizer", "rollout.weights", "rollout.kv_cache", "rollout.graphs"} <= set(device.at_peak_bytes)


def test_a_kv_cache_that_has_no_room_beside_the_actor_is_told_with_everybodys_bytes(tmp_path: Path) -> None:
    """Of 139 GiB the engine takes 90 %; the optimizer of two billion parameters comes after it has measured."""
    model = {"hidden_size": 2048, "num_hidden_layers": 32, "intermediate_size": 8192}
    rollout = {"gpu_memory_utilization": 0.9, "enforce_eager": True}
    done = reference_run(tmp_path, ranks=1, steps=2, model=model, rollout=rollout)
    assert done.returncode != 0
    (failure, *_) = summarize(Recording.open(tmp_path / "run")).out_of_memory
    print(failure.reason, failure.asked_bytes, failure.free_bytes, failure.bound, failure.changes)
    assert failure.asked_bytes is not None and failure.free_bytes is not None
    assert failure.asked_bytes > failure.free_bytes
    assert failure.moment is not None
    assert failure.moment.bytes["actor.optimizer"] > 13 * GIB
    assert "KV cache" in failure.changes[0]
    assert any("offload the optimizer" in change for change in failure.changes)
    said = rltrace_("summary", str(tmp_path / "run")).stdout
    assert "Out of memory" in "\n".join(said.splitlines()[:12])
