"""Lets SkyRL take the CPU for its device, in each of its processes: all that is made up, and none of it is its work.

It names CUDA and NCCL where it makes its process group and its mesh, and sends weights by vLLM's NCCL engine.
"""

from __future__ import annotations

import os
from typing import Any

from wrapt import register_post_import_hook


def use_cpu(torch: Any) -> None:
    """Take the CPU where CUDA is asked for."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.set_device = lambda _device: None
    torch.cuda.synchronize = lambda _device=None: None
    torch.Tensor.cuda = lambda tensor, *_: tensor


def use_gloo(worker: Any) -> None:
    """Make groups and meshes of processors."""
    from torch import distributed

    make_group, mesh = distributed.init_process_group, distributed.device_mesh
    make_mesh = mesh.init_device_mesh
    distributed.init_process_group = lambda backend=None, **said: make_group(backend="gloo", **said)
    mesh.init_device_mesh = lambda _device, *rest, **said: make_mesh("cpu", *rest, **said)


class HostTransfer:
    """vLLM's engine that sends weights by NCCL, by a file instead."""

    @staticmethod
    def trainer_init(_info: Any) -> None:
        """There is no communicator."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Write all weights; who reads them waits for the file."""
        import torch

        path = os.environ["TRANSFER"]
        torch.save([(name, tensor.clone()) for name, tensor in iterator], f"{path}.part")
        os.replace(f"{path}.part", path)


def send_by_file(nccl_engine: Any) -> None:
    """Do without NCCL, which comes with GPUs only."""
    nccl_engine.NCCLWeightTransferEngine = HostTransfer


register_post_import_hook(use_cpu, "torch")
register_post_import_hook(use_gloo, "skyrl.backends.skyrl_train.distributed")
register_post_import_hook(send_by_file, "vllm.distributed.weight_transfer.nccl_engine")
