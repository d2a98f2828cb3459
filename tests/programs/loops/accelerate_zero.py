"""Supervised training with accelerate, which accumulates gradients; by `ZERO_STAGE` with DeepSpeed below it."""

import os
import time

import torch
from accelerate import Accelerator
from own_timers import DEVICE, timed, write
from sharded_layers import Layers, batch, loss_of

STEPS, ACCUMULATED = 5, 2


def accelerator():
    if "ZERO_STAGE" not in os.environ:
        return Accelerator(cpu=DEVICE == "cpu", gradient_accumulation_steps=ACCUMULATED)
    from accelerate import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(zero_stage=int(os.environ["ZERO_STAGE"]), gradient_accumulation_steps=ACCUMULATED)
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 16
    plugin.deepspeed_config["zero_allow_untested_optimizer"] = True
    found = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=ACCUMULATED)
    assert found.distributed_type == "DEEPSPEED", found.distributed_type
    return found


def main():
    torch.set_default_device(DEVICE)
    found = accelerator()
    torch.manual_seed(0)
    model = Layers()
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    model, optimizer = found.prepare(model, optimizer)
    for _step in range(STEPS):
        with timed("step"):
            with timed("idle"):
                time.sleep(0.03)  # the next batch comes over the network
            with timed("actor.update"):
                for _micro_batch in range(ACCUMULATED):
                    with found.accumulate(model):
                        loss = loss_of(model, batch())
                        found.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
                loss.item()  # as one logs it
    write()
    found.end_training()


main()
