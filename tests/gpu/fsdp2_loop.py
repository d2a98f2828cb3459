"""A plain FSDP2 loop as people write it, which knows nothing of rltrace and measures itself: one process a GPU.

Usage: torchrun --nproc-per-node N fsdp2_loop.py LOG [--shape tiny|1.7b] [--steps N] [--micro-batches N] [--replicas N]

LOG gets one line of JSON a step and rank: `step`, `start_ns` and `end_ns` (monotonic), torch's own
`max_memory_allocated` of the step and of each micro-batch, and milliseconds between CUDA events around every
`model(...)` and every `optimizer.step()`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config

SHAPES = {
    "tiny": {"vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1536},
    "1.7b": {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144},
}


def mesh_of(replicas: int) -> DeviceMesh:
    """Return all GPUs as one mesh, or as copies of one."""
    ranks = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh("cuda", (ranks,))
    return init_device_mesh("cuda", (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))


def sharded(shape: str, mesh: DeviceMesh) -> Any:
    """Return a causal language model whose layers are sharded one by one."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(tie_word_embeddings=True, **SHAPES[shape]))
    model.gradient_checkpointing_enable()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


class Timed:
    """Milliseconds between CUDA events around calls."""

    def __init__(self) -> None:
        self.pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        self.pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        self.pairs[-1][0].record()

    def __exit__(self, *_: object) -> None:
        self.pairs[-1][1].record()

    def milliseconds(self) -> list[float]:
        """Return them, once the GPU is through."""
        return [begin.elapsed_time(end) for begin, end in self.pairs]


def step(model: Any, optimizer: Any, token_ids: torch.Tensor, micro_batches: int) -> dict[str, Any]:
    """Accumulate gradients over micro-batches, and step."""
    forward, stepped = Timed(), Timed()
    peaks = []
    torch.cuda.reset_peak_memory_stats()
    start_ns = time.monotonic_ns()
    for _ in range(micro_batches):
        with forward:
            loss = model(input_ids=token_ids, labels=token_ids).loss
        loss.backward()
        peaks.append(torch.cuda.max_memory_allocated())
    with stepped:
        optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    return {
        "start_ns": start_ns,
        "end_ns": time.monotonic_ns(),
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
        "micro_batch_peaks": peaks,
        "forward_ms": forward.milliseconds(),
        "optimizer_ms": stepped.milliseconds(),
    }


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("log", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1.7b")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs=2, default=(4, 1024))
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = sharded(options.shape, mesh_of(options.replicas))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    token_ids = torch.randint(SHAPES[options.shape]["vocab_size"], tuple(options.tokens), device="cuda")
    with options.log.with_suffix(f".{dist.get_rank()}.jsonl").open("w", buffering=1) as lines:
        for number in range(options.steps):
            figures = step(model, optimizer, token_ids, options.micro_batches)
            lines.write(json.dumps({"step": number} | figures) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
