"""Collectives that a program calls itself, and the all-reduce of DDP's gradients.

DDP launches its buckets in C++, where Python has no hook, and a communication hook of ours would replace the program's.
But DDP measures itself. On a GPU it does so in the first ten steps, and then in every hundredth. On a CPU, where this
waits for no device, we have it measure every step.

Source read: torch 2.6 to 2.13, torch/distributed/distributed_c10d.py, torch/nn/parallel/distributed.py and
torch/csrc/distributed/c10d/logger.cpp.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from typing import Any

from rltrace.hooks.arguments import argument, attributes
from rltrace.hooks.patching import PatchSet, end_span
from rltrace.host.clock import now_ns
from rltrace.instrument.torch.fsdp2 import LAUNCHED
from rltrace.record import spans

C10D = "torch.distributed.distributed_c10d"
DDP = "torch.nn.parallel.distributed:DistributedDataParallel"
MEASURED = attributes(DDP, "device_type", "reducer", "logger")
ALL_REDUCE = "ddp.all_reduce"
ACROSS_REPLICAS = "fsdp.all_reduce"
"""FSDP2's own, of shards that several ranks hold."""

COLLECTIVES = {
    "all_reduce": ("tensor", 0, "group", 2),
    "broadcast": ("tensor", 0, "group", 2),
    "reduce": ("tensor", 0, "group", 3),
    "all_gather": ("tensor", 1, "group", 2),
    "all_gather_into_tensor": ("output_tensor", 0, "group", 2),
    "gather": ("tensor", 0, "group", 3),
    "scatter": ("tensor", 0, "group", 3),
    "reduce_scatter": ("output", 0, "group", 3),
    "reduce_scatter_tensor": ("input", 1, "group", 3),
    "all_to_all_single": ("input", 1, "group", 4),
    "all_to_all": ("output_tensor_list", 0, "group", 2),
    "send": ("tensor", 0, "group", 2),
    "recv": ("tensor", 0, "group", 2),
    "barrier": ("", 0, "group", 0),
    "all_gather_object": ("", 0, "group", 2),
    "broadcast_object_list": ("", 0, "group", 2),
}
"""For each collective, the name and place of the parameter whose bytes count, and of its group."""


class TorchCollectives:
    """Makes each call of a collective a span."""

    name = "torch_collectives"
    supports = ("torch >= 2.6",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        for function, (tensor, at, group, group_at) in COLLECTIVES.items():
            name = f"dist.{function}"
            begin = functools.partial(begin_collective, name, tensor, at, group, group_at)
            names = (name, ACROSS_REPLICAS) if function == "all_reduce" else (name,)
            patches.around(f"{C10D}:{function}", begin, functools.partial(end_collective, name), names)
        times = BucketTimes()
        patches.around(f"{DDP}.forward", times.begin, times.read, (ALL_REDUCE,), reads=MEASURED)


class UnderWay(threading.local):
    """The collectives that a thread is in. Below a mode, as of a default device, torch calls each a second time."""

    def __init__(self) -> None:
        self.names: set[str] = set()


UNDER_WAY = UnderWay()


def begin_collective(
    name: str, tensor: str, at: int, group: str, group_at: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Open the span, unless torch calls the collective once more itself. That of an asynchronous one is its launch."""
    if name in UNDER_WAY.names:
        return None
    moved = argument(tensor, at, args, kwargs, None) if tensor else None
    among = argument(group, group_at, args, kwargs, None)
    ranks, ranks_of = _group(among)
    said: dict[str, Any] = {"ranks": ranks, "group": ranks_of}
    told = name
    if among is not None and among is LAUNCHED.replicas:
        told = ACROSS_REPLICAS
        said["module"] = LAUNCHED.module
    if moved is not None:
        tensors = moved if isinstance(moved, (list, tuple)) else (moved,)
        said["bytes"] = sum(one.numel() * one.element_size() for one in tensors)
    if kwargs.get("async_op"):
        said["async_op"] = True
    opened = spans.automatic_span(told, **said).__enter__()
    UNDER_WAY.names.add(name)
    return opened


def end_collective(name: str, opened: Any, result: Any, error: BaseException | None) -> None:
    """Close the span, if this call has one."""
    if opened is not None:
        UNDER_WAY.names.discard(name)
        end_span(opened, result, error)


_GROUPS: dict[int, tuple[weakref.ref[Any], tuple[int, str]]] = {}


def _group(group: Any) -> tuple[int, str]:
    """Return how many ranks a group has, and what torch calls it; None stands for all ranks."""
    from torch import distributed

    found = distributed.group.WORLD if group is None else group
    if found is None or isinstance(found, int):  # this rank is not in it
        return 0, ""
    known = _GROUPS.get(id(found))
    if known is None or known[0]() is not found:
        known = _GROUPS[id(found)] = weakref.ref(found), (found.size(), _name(found))
    return known[1]


def _name(group: Any) -> str:
    described = getattr(group, "group_desc", None)
    return str(described if described and described != "undefined" else group.group_name)


class BucketTimes:
    """Reads what DDP measured of its buckets' all-reduce in a backward, when the next forward has begun."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[weakref.ref[Any], int]] = {}
        """By the id of a module: the module, and when the last all-reduce that was written began."""

    def begin(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        """Have DDP on a CPU measure every step."""
        module = args[0]
        if self._last_of(module) is None:
            self._last[id(module)] = weakref.ref(module), 0
            if module.device_type == "cpu":
                module.reducer._set_ddp_runtime_logging_sample_rate(1)
        return module

    def _last_of(self, module: Any) -> int | None:
        known = self._last.get(id(module))
        return known[1] if known is not None and known[0]() is module else None

    def read(self, module: Any, _result: Any, error: BaseException | None) -> None:
        """Write the span of the last backward's all-reduce, if DDP measured it."""
        if error is not None or module.logger is None:
            return
        found = module.logger._get_ddp_logging_data()
        start, end = (found.ints_map.get(f"backward_comm_time_{side}", 0) for side in ("start", "end"))
        if not 0 < start < end or start == self._last_of(module):
            return
        self._last[id(module)] = weakref.ref(module), start
        sizes = found.strs_map.get("rebuilt_bucket_sizes") or found.strs_map.get("bucket_sizes", "")
        buckets = [int(size) for size in sizes.split(",") if size.strip().isdigit()]
        behind_ns = now_ns() - time.time_ns()
        known = {"bytes": sum(buckets), "buckets": len(buckets), "ranks": found.ints_map.get("world_size", 0)}
        spans.automatic_span_at(ALL_REDUCE, start + behind_ns, end + behind_ns, **known)
