"""Distillation on two ranks of torchrun: FSDP2, a teacher, micro-batches, an all-reduce of the loss by hand."""

import time

import torch
import torch.distributed as dist
from own_timers import DEVICE, timed, write
from sharded_layers import Layers, batch
from torch.distributed.fsdp import fully_shard

STEPS = 5


def main():
    torch.set_default_device(DEVICE)
    dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl")
    dist.barrier()  # NCCL connects at the first collective
    torch.manual_seed(dist.get_rank())
    teacher, model = Layers().requires_grad_(False), Layers()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _step in range(STEPS):
        with timed("step"):
            with timed("idle"):
                time.sleep(0.03)  # the next batch comes over the network
            tokens = batch()
            with timed("ref.log_prob"), torch.no_grad():
                wanted = teacher(tokens).log_softmax(-1)
            with timed("actor.update"):
                for rows in torch.arange(len(tokens)).chunk(2):
                    got = model(tokens[rows]).log_softmax(-1)
                    loss = torch.nn.functional.kl_div(got, wanted[rows], log_target=True)
                    loss.backward()
                optimizer.step()
                loss.item()  # as one logs it
            optimizer.zero_grad()
            dist.all_reduce(loss.detach())
    write()
    dist.barrier()
    dist.destroy_process_group()


main()
