"""FSDP2 on two gloo ranks: real training with checkpointing; a forward fails, and a step of the optimizer.

The ranks are forked: torch is imported once, and dynamo, which the first optimizer of each would import.
"""

import os
import sys

import torch
import torch._dynamo
import torch.distributed as dist
import torch.multiprocessing as mp
from sharded_model import Model
from shown_errors import show_error
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def show(*words):
    """One line of one rank, whole."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def work(rank, ranks, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(10).reshape(2, 5)
    for _step in range(3):
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            show(loss.item().hex())
    if rank == 0:
        fail_as_a_program_does(optimizer)
    dist.barrier()
    model(tokens, fail=True)


def fail_as_a_program_does(optimizer):
    def closure():
        raise FloatingPointError("a step that fails")

    try:
        optimizer.step(closure)
    except FloatingPointError as error:
        show_error(error)


if __name__ == "__main__":
    mp.start_processes(work, (2, os.environ["RENDEZVOUS"]), nprocs=2, start_method="fork")
