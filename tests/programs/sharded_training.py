"""Trains a small model on gloo ranks, sharded in each way that KINDS names, and prints what was learned.

The ranks are forked: torch is imported once.
"""

import hashlib
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sharded_model import Layer, Model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import rltrace


def sharded(model, kind):
    if kind in ("fsdp2", "hsdp", "fsdp2_offloaded"):
        ranks = dist.get_world_size()
        if kind == "hsdp":
            mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh("cpu", (ranks,))
        said = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
        if kind == "fsdp2_offloaded":
            said["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for layer in model.layers:
            fully_shard(layer, **said)
        return fully_shard(model, **said)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        use_orig_params=kind == "fsdp1",
        device_id=torch.device("cpu"),
    )


def whole_parameters(model):
    if not isinstance(model, FullyShardedDataParallel):
        return [parameter.full_tensor() for parameter in model.state_dict().values()]
    # Its weights in full precision: one more all-gather of every module.
    with FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def train(kind):
    """Two steps, and a forward without gradients; what came of it."""
    torch.manual_seed(0)
    model = sharded(Model(), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(10).reshape(2, 5)
    for _step in range(2):
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = model(tokens).float().sum()
    learned = b"".join(parameter.numpy().tobytes() for parameter in whole_parameters(model))
    return f"{kind} {hashlib.sha256(learned).hexdigest()} {loss.item().hex()}"


def work(rank, ranks):
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=ranks)
    for kind in os.environ["KINDS"].split():
        with rltrace.span("training", kind=kind):
            learned = train(kind)
        if rank == 0:
            print(learned, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(os.environ["RANKS"])
    mp.start_processes(work, (ranks,), nprocs=ranks, start_method="fork")
