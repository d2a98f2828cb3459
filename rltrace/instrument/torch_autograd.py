"""`autograd.backward`: a whole backward, from the loss to the last gradient.

FSDP's hooks see a backward from the model's last layer on. What lies between it and the loss, as the softmax over the
vocabulary, is in this span alone. Source read: torch 2.6 to 2.13, torch/_tensor.py and torch/autograd/__init__.py.
"""

from __future__ import annotations

from typing import Any

from rltrace.patching import PatchSet

TARGET = "torch.autograd:backward"
"""What `Tensor.backward` calls."""
NAME = "autograd.backward"


class TorchAutograd:
    """Backwards."""

    name = "torch_autograd"
    supports = ("torch >= 2.6, < 2.14",)

    def install(self, patches: PatchSet) -> None:
        """Name the hook."""
        patches.span(TARGET, NAME, outermost_args)


def outermost_args(*_: Any, **__: Any) -> dict[str, Any] | None:
    """None within another backward, whose part it is: what is computed again there may call it once a layer."""
    return None if is_in_backward() else {}


def is_in_backward() -> bool:
    """Whether this thread works for a backward right now."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)
