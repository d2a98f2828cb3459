"""What verl's ranks exchange around a phase: all-to-alls of Ulysses, batches of a TP group, adapters, first weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rltrace.hooks.arguments import argument
from rltrace.hooks.patching import PatchSet, end_span
from rltrace.instrument.torch.tensor_sizes import sizes_of, tensor_bytes
from rltrace.record import spans

# ---- batches ----------------------------------------------------------------------------------------------------


def resharded(name: str) -> Callable[[PatchSet, str], None]:
    """Return a hook on what gathers a batch within a TP or a sequence-parallel group, or divides it again."""
    return lambda patches, target: patches.span(target, name, resharded_args)


def resharded_args(manager: Any, data: Any = None, *_: Any, **__: Any) -> dict[str, Any] | None:
    """Return the sequences that go in and the ranks of the group; None where the group is this rank alone."""
    ranks = ranks_of(manager)
    return None if ranks == 1 else {"sequences": len(data), "ranks": ranks, "by": type(manager).__name__}


def ranks_of(manager: Any) -> int:
    """Return the size of a manager's group: of tensor parallelism, or of Ulysses' sequence parallelism."""
    if hasattr(manager, "tp_size"):
        return int(manager.tp_size)
    mesh = getattr(manager, "device_mesh", None)
    return 1 if mesh is None else int(mesh["sp"].size() if "sp" in (mesh.mesh_dim_names or ()) else mesh.size())


# ---- Ulysses ----------------------------------------------------------------------------------------------------


def all_to_all(patches: PatchSet, target: str) -> None:
    """Hook the exchange of heads for a sequence's parts, and back, in forwards and in backwards."""
    patches.around(target, begin_all_to_all, end_span, ("ulysses.all_to_all",))


def begin_all_to_all(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Open the span with the bytes that this rank gives; an asynchronous one is its launch."""
    import torch
    import torch.distributed
    from verl.utils import ulysses

    given = argument("local_input", 0, args, kwargs)
    if not torch.is_tensor(given):
        return None
    group = argument("group", 3, args, kwargs, None) or ulysses.get_ulysses_sequence_parallel_group()
    said = {"bytes": tensor_bytes(given), "ranks": torch.distributed.get_world_size(group)}
    return spans.automatic_span("ulysses.all_to_all", **said).__enter__()


# ---- weights ----------------------------------------------------------------------------------------------------


def broadcast(patches: PatchSet, target: str) -> None:
    """Hook what gives each rank its shards of the weights that only rank 0 has loaded."""
    patches.span(target, "fsdp.broadcast", broadcast_args)


def broadcast_args(model: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return the whole model's bytes and tensors, its parameters' shards put together."""
    parameters = list(model.parameters()) if hasattr(model, "parameters") else []
    return sizes_of(parameters)


def adapter(patches: PatchSet, target: str) -> None:
    """Hook what collects all of an adapter from the ranks, and says whether it does so layer by layer."""
    patches.span(target, "actor.adapter_state_dict", adapter_args, collected_args)


def adapter_args(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return whether it is gathered layer by layer."""
    return {"adapter": True, "layered": bool(argument("layered_summon", 1, args, kwargs))}


def adapter_by_layer(patches: PatchSet, target: str) -> None:
    """Hook what gathers an adapter layer by layer."""
    patches.span(target, "weight_sync.gather", lambda *_, **__: {"adapter": True}, collected_args)


def collected_args(collected: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return the bytes and the tensors of what was gathered: of the base model too, where the engine has none yet."""
    return sizes_of(collected.values())


def checkpoint_engine(name: str, by: str) -> Callable[[PatchSet, str], None]:
    """Return a hook on a sync that goes to engines of other GPUs by a library's own way, on either end."""
    return lambda patches, target: patches.span(target, name, lambda *_, **__: {"by": by})
