"""An actor and a critic on two ranks of torchrun: DDP, two optimizers in each step, a third model that scores."""

import os
import time

import torch
import torch.distributed as dist
from own_timers import timed, write
from sharded_layers import Layers, batch, loss_of
from torch.nn.parallel import DistributedDataParallel

STEPS = 5


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    actor = DistributedDataParallel(Layers(), bucket_cap_mb=1)
    critic = DistributedDataParallel(Layers(layers=2), bucket_cap_mb=1)
    of_actor = torch.optim.AdamW(actor.parameters(), lr=1e-3)
    of_critic = torch.optim.AdamW(critic.parameters(), lr=1e-3)
    for _step in range(STEPS):
        with timed("step"):
            with timed("idle"):
                time.sleep(0.03)  # an environment answers
            tokens = batch()
            with timed("actor.old_log_prob"), torch.no_grad():
                actor(tokens).log_softmax(-1)
            with timed("actor.update"):
                loss_of(critic, tokens).backward()
                of_critic.step()
                for rows in tokens.split(8):
                    loss_of(actor, rows).backward()
                of_actor.step()
            of_critic.zero_grad()
            of_actor.zero_grad()
    write()
    dist.barrier()
    os._exit(0)  # gloo's destructors may wait for each other here, traced or not


main()
