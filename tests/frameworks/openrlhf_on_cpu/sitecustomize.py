"""Lets OpenRLHF take the CPU for its device, in each of its processes: all that is made up, and none of it is its work.

It names CUDA as its device in a dozen places, and asks it to wait and to empty caches.
"""

from __future__ import annotations

from typing import Any

from wrapt import register_post_import_hook


class Cpu(str):
    """Where tensors go to; in a name, the number of a GPU."""

    def __format__(self, _spec: str) -> str:
        return "0"


def use_cpu(torch: Any) -> None:
    """Take the CPU where CUDA is asked for."""
    torch.cuda.current_device = lambda: Cpu("cpu")
    torch.cuda.set_device = lambda _device: None
    torch.cuda.synchronize = lambda _device=None: None
    torch.cuda.current_stream = lambda _device=None: None


def use_cpu_mesh(strategy: Any) -> None:
    """Make the mesh of DeepSpeed's ranks one of processors."""
    make = strategy.init_device_mesh
    strategy.init_device_mesh = lambda _device, *rest, **said: make("cpu", *rest, **said)


def receive_on_cpu(_worker: Any) -> None:
    """Receive weights in the host's memory."""
    import torch

    empty = torch.empty
    torch.empty = lambda *size, device=None, **said: empty(*size, device="cpu" if device == "cuda" else device, **said)


class HostCommunicator:
    """NCCL's communicator of a trainer and its engines, over the store of the real process group that it is given."""

    def __init__(self, group: Any, device: Any) -> None:
        self._group = group

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        """Send a tensor to all, or receive one."""
        sent = self._group.broadcast(tensor.detach(), src)
        if self._group.rank != src:
            tensor.copy_(sent)


def communicate_on_host(pynccl: Any) -> None:
    """Do without NCCL, which comes with GPUs only."""
    pynccl.PyNcclCommunicator = HostCommunicator


def let_sleep(cpu: Any) -> None:
    """Let an engine be asked to sleep: vLLM's worker of a CPU ignores it."""
    cpu.CpuPlatform.is_sleep_mode_available = lambda _self: True


def keep_weights(layers: Any) -> None:
    """Keep weights as they are loaded: packed for a CPU's kernels, as vLLM packs them, they cannot be loaded again."""
    import torch

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = dispatch


register_post_import_hook(keep_weights, "vllm.model_executor.layers.utils")
register_post_import_hook(use_cpu, "torch")
register_post_import_hook(use_cpu_mesh, "openrlhf.utils.deepspeed.deepspeed")
register_post_import_hook(receive_on_cpu, "openrlhf.trainer.ray.vllm_worker_wrap")
register_post_import_hook(communicate_on_host, "vllm.distributed.device_communicators.pynccl")
register_post_import_hook(let_sleep, "vllm.platforms.cpu")
