"""vLLM's own way to give weights to an engine on other GPUs: one call sends them, and one of each worker receives them.

The releases from 0.17 on have it; what sends is a static method of the receiving class in the first ones, and a class
of its own in 0.29.

Source read: vLLM 0.23 and 0.29, distributed/weight_transfer.
"""

from __future__ import annotations

from typing import Any

from rltrace.hooks.patching import PatchSet
from rltrace.instrument.torch.tensor_sizes import announced_sizes

FOLDER = "vllm.distributed.weight_transfer"
BACKENDS = {"nccl": "NCCL", "ipc": "IPC"}
"""Each engine's module begins with the one, its classes with the other."""


def name_hooks(patches: PatchSet) -> None:
    """Name the hooks on both ends, once an engine's module is imported."""
    for by in BACKENDS:
        patches.when_imported(f"{FOLDER}.{by}_engine", lambda _, by=by: name_hooks_of(patches, by))  # type: ignore[misc]


def name_hooks_of(patches: PatchSet, by: str) -> None:
    """Name the hooks on one engine."""
    import importlib

    module = f"{FOLDER}.{by}_engine"
    engine, sender = f"{BACKENDS[by]}WeightTransferEngine", f"{BACKENDS[by]}TrainerWeightTransferEngine"

    def received_args(_engine: Any, update_info: Any, *_: Any, **__: Any) -> dict[str, Any]:
        return {"by": by, **told_args(update_info)}

    patches.span(f"{module}:{engine}.receive_weights", "weight_sync.load", received_args)
    is_split = hasattr(importlib.import_module(module), sender)
    target = f"{sender}.send_weights" if is_split else f"{engine}.trainer_send_weights"
    patches.span(f"{module}:{target}", "weight_sync.send", lambda *_, **__: {"by": by})


def told_args(update_info: Any) -> dict[str, Any]:
    """Return the size of an update, of which names, types and shapes are told."""
    dtypes, shapes = getattr(update_info, "dtype_names", None), getattr(update_info, "shapes", None)
    if dtypes is None or shapes is None:
        return {}
    return announced_sizes(dtypes, shapes)
