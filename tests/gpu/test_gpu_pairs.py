"""What needs two GPUs and NCCL between them: replicas of a shard, and weights for an engine with a GPU of its own."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from gpu_runs import exec_, rltrace_

from rltrace.events import Span
from rltrace.read.recording import Recording

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"{torch.cuda.device_count()} GPUs, two are needed"),
    pytest.mark.timeout(300),
]
LOOP = Path(__file__).parent / "fsdp2_loop.py"
STEPS = 3


def spans_of(run: Path, *names: str) -> list[Span]:
    """The spans of these names of all processes."""
    events = (event for process in Recording.open(run).processes for event in process.events())
    return [event for event in events if isinstance(event, Span) and event.name in names]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_replicas_are_reduced_over(tmp_path: Path) -> None:
    """Two replicas of one shard (HSDP): every module's gradients go through an all-reduce of both."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    loop = [str(LOOP), str(tmp_path / "loop.log"), "--shape", "tiny", "--steps", str(STEPS), "--micro-batches", "1"]
    done = rltrace_("exec", "--out", str(tmp_path / "run"), "--", *torchrun, *loop, "--replicas", "2")
    assert done.returncode == 0, done.stderr[-4000:]
    reduced = spans_of(tmp_path / "run", "fsdp.all_reduce")
    modules = Counter(span.args["module"] for span in reduced)
    assert set(modules) == {"model", *(f"model.layers.{layer}" for layer in range(4))}  # the root's own are below it
    assert set(modules.values()) == {2 * STEPS}  # of two ranks
    assert {span.args["ranks"] for span in reduced} == {2}
    assert not spans_of(tmp_path / "run", "fsdp.all_gather", "fsdp.reduce_scatter")  # one shard: nothing to gather


CHECKPOINT_ENGINE = """
import asyncio
import ray
import torch

TENSORS, BUCKET_BYTES = 32, 64 << 20

@ray.remote(num_gpus=1)
class End:
    def __init__(self, is_master):
        from verl.checkpoint_engine.nccl_checkpoint_engine import NCCLCheckpointEngine
        self.engine = NCCLCheckpointEngine(BUCKET_BYTES, group_name="weights", is_master=is_master)

    def prepare(self):
        return self.engine.prepare()

    def join(self, **told):
        self.engine.init_process_group(**told)

    def send(self):
        made = (
            (f"layer.{i}", torch.full((1024, 4096), float(i), dtype=torch.bfloat16, device="cuda"))
            for i in range(TENSORS)
        )
        asyncio.run(self.engine.send_weights(made))

    def receive(self):
        from verl.checkpoint_engine.base import CheckpointEngineWorker
        worker, kept = object.__new__(CheckpointEngineWorker), Kept()
        worker.checkpoint_engine, worker.server_adapter = self.engine, kept
        asyncio.run(worker.update_weights(global_steps=1))
        return kept.values

class Kept:
    "What an engine's adapter does with weights: it takes one after the other."
    def __init__(self):
        self.values = {}

    async def update_weights(self, weights, **_):
        async for name, tensor in weights:
            self.values[name] = (tensor.float().min().item(), tensor.float().max().item())

ray.init(num_gpus=2)
from verl.checkpoint_engine.nccl_checkpoint_engine import NCCLCheckpointEngine
trainer, rollout = End.remote(True), End.remote(False)
told = ray.get([trainer.prepare.remote(), rollout.prepare.remote()])
of_trainer, of_rollout = NCCLCheckpointEngine.build_topology(1, 1, told)
first = [{key: values[0] for key, values in one.items()} for one in (of_trainer, of_rollout)]
ray.get([trainer.join.remote(**first[0]), rollout.join.remote(**first[1])])
for _ in range(2):
    sent = trainer.send.remote()
    values = ray.get(rollout.receive.remote())
    ray.get(sent)
    assert values == {f"layer.{i}": (float(i), float(i)) for i in range(TENSORS)}, values
"""


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="cupy is not installed")
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
def test_checkpoint_engine_sends_to_the_other_gpu(tmp_path: Path) -> None:
    """verl's NCCLCheckpointEngine brings weights to another GPU; both ends are spans, of the same time."""
    done = exec_(tmp_path, {"program": CHECKPOINT_ENGINE})
    assert done.returncode == 0, done.stderr[-4000:]
    sent, received = (spans_of(tmp_path / "run", f"weight_sync.{end}") for end in ("send", "receive"))
    assert [span.args["by"] for span in sent] == ["nccl"] * 2
    assert [span.args["by"] for span in received] == ["checkpoint engine"] * 2
    print([f"{span.seconds:.3f} s" for span in [*sent, *received]])
    for one, other in zip(sent, received, strict=True):
        assert one.start_ns < other.end_ns and other.start_ns < one.end_ns


WEIGHT_TRANSFER = """
import os
import subprocess
import sys

ROLE = sys.argv[1]
os.environ["CUDA_VISIBLE_DEVICES"] = {"trainer": "0", "engine": "1"}[ROLE]
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

ADDRESS = {"master_address": "127.0.0.1", "master_port": 29611, "world_size": 2}
UPDATES = 2

def trainer(folder):
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
    engine = subprocess.Popen([sys.executable, sys.argv[0], "engine", folder])
    group = NCCLWeightTransferEngine.trainer_init(ADDRESS)
    for _ in range(UPDATES):
        NCCLWeightTransferEngine.trainer_send_weights(weights(folder, "cuda"), {"group": group})
        torch.cuda.synchronize()
    assert engine.wait() == 0

def weights(folder, device):
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen3Config.from_pretrained(folder), dtype=torch.bfloat16)
    return iter([(name, weight.detach()) for name, weight in model.named_parameters()])

def engine(folder):
    from vllm import LLM
    from vllm.config import WeightTransferConfig
    llm = LLM(
        model=folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64,
        gpu_memory_utilization=0.2, weight_transfer_config=WeightTransferConfig(backend="nccl"),
    )
    llm.init_weight_transfer_engine({"init_info": ADDRESS | {"rank_offset": 1}})
    told = list(weights(folder, "meta"))
    info = {
        "names": [name for name, _ in told],
        "dtype_names": ["bfloat16"] * len(told),
        "shapes": [list(weight.shape) for _, weight in told],
    }
    for _ in range(UPDATES):
        llm.start_weight_update()
        llm.update_weights({"update_info": info})
        llm.finish_weight_update()
    torch.cuda.synchronize()

def main():
    if ROLE == "engine":
        engine(sys.argv[2])
        return
    folder = sys.argv[2]
    Qwen3Config(
        vocab_size=4096, hidden_size=1024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        head_dim=128, intermediate_size=3072, tie_word_embeddings=False, max_position_embeddings=256,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)
    trainer(folder)

main()
"""


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_engine_takes_weights_by_nccl(tmp_path: Path) -> None:
    """vLLM's own weight transfer between two GPUs: the trainer's call and the engine's are spans with way and bytes."""
    done = exec_(tmp_path, {"program": WEIGHT_TRANSFER}, "trainer", str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr[-4000:]
    sent, loaded = (spans_of(tmp_path / "run", f"weight_sync.{end}") for end in ("send", "load"))
    assert [span.args["by"] for span in sent] == ["nccl"] * 2
    assert [span.args["by"] for span in loaded] == ["nccl"] * 2
    sizes = {span.args["bytes"] for span in loaded}
    print(sizes, [f"{span.seconds:.3f} s" for span in [*sent, *loaded]])
    assert len(sizes) == 1 and sizes.pop() > 8 * 3 * 1024 * 3072 * 2  # at least the layers' feed-forwards, in bf16
