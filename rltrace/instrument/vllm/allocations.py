"""Whose each allocation of a vLLM engine is, and every mapping of its pools, on the steps on which all are kept.

Source read: vLLM 0.12 to 0.26 (device_allocator/cumem.py, v1/worker/gpu_worker.py). Sleep and wake-up call a
function for each segment; a segment that is new, or that torch gives back, comes by a callback.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from rltrace.hooks.patching import PatchSet
from rltrace.host.clock import now_ns
from rltrace.host.nvml import DRIVER
from rltrace.instrument.memory.allocation_owners import enter, leave
from rltrace.instrument.memory.engine_allocations import ACTIVATIONS, keep_pools, name_executions, owner_of
from rltrace.instrument.vllm.engine import NEVER_MAPPED, POOLS, segments
from rltrace.record.torch import allocations
from rltrace.record.torch.allocation_replay import Change

CUMEM = "vllm.device_allocator.cumem"
WORKER = "vllm.v1.worker.gpu_worker:Worker"


class VllmAllocations:
    """A model's execution, and vLLM's allocator."""

    name = "vllm_allocations"
    supports = ("vllm >= 0.12",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks; there are none without a driver."""
        if DRIVER.exists():
            name_hooks(patches)


def name_hooks(patches: PatchSet) -> None:
    """Name every place where memory comes and goes."""
    pools = CumemPools()
    allocator = f"{CUMEM}:CuMemAllocator"
    keep_pools(pools)
    name_executions(patches, f"{WORKER}.execute_model")
    with patches.dormant() as switch:
        patches.around(f"{WORKER}.sample_tokens", functools.partial(enter, ACTIVATIONS), leave)
        patches.around(f"{CUMEM}:create_and_map", pools.handle, pools.mapped, reads=POOLS)
        patches.around(f"{CUMEM}:unmap_and_release", pools.handle, pools.unmapped, reads=POOLS)
        # The extension borrows these (csrc/cumem_allocator.cpp says so), and frees pools until the interpreter is gone.
        borrowed = functools.partial(patches.around, is_borrowed=True, reads=POOLS)
        borrowed(f"{allocator}._python_malloc_callback", pools.new_handle, pools.mapped)
        borrowed(f"{allocator}._python_free_callback", pools.freed_handle, pools.unmapped)
    allocations.when_kept(switch)


Handle = tuple[int, int, int, int]
"""A segment's device, bytes, address, and the driver's own handle."""


class CumemPools:
    """vLLM's CuMemAllocator: what it maps and unmaps while a history is kept."""

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._is_mapped: dict[int, bool] = {}
        """Whether a segment is mapped, by address, for those that were mapped or unmapped since the history began."""

    def begin(self) -> None:
        """Forget what was before."""
        self._changes, self._is_mapped = [], {}

    def end(self) -> allocations.PoolHistory:
        """Return what has happened; a pool to which nothing happened is awake unless the allocator says otherwise."""
        known = _pool_data()
        changes = [change for change in self._changes if change.address in known or change.address not in NEVER_MAPPED]
        self._changes = []
        alive, ranges = {}, []
        for address, data in known.items():
            size_bytes = data.handle[1]
            ranges.append((address, address + size_bytes))
            if self._is_mapped.get(address, not getattr(data, "is_asleep", False)):
                alive[address] = size_bytes
        return allocations.PoolHistory(changes, alive, ranges)

    def has_segments(self) -> bool:
        """Tell whether the allocator has any segments, asleep or awake."""
        return bool(_pool_data())

    def owners(self) -> dict[int, str]:
        """Return the owner of every segment, asleep or awake, by address."""
        return {address: owner_of(data.tag) for address, data in _pool_data().items()}

    def handle(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Handle:
        """Return the segment that a call is about."""
        handle: Handle = args[0]
        return handle

    def new_handle(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Handle:
        """Return the segment that the allocator was asked for."""
        handle: Handle = args[1]
        return handle

    def freed_handle(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Handle | None:
        """Return the segment that torch gives back; one that is asleep has nothing to give."""
        data = _pool_data().get(args[1])
        return None if data is None or getattr(data, "is_asleep", False) else data.handle

    def mapped(self, handle: Handle | None, _result: Any, error: BaseException | None) -> None:
        """Note that a segment has memory behind it now."""
        self._change(handle, error, is_mapped=True)

    def unmapped(self, handle: Handle | None, _result: Any, error: BaseException | None) -> None:
        """Note that a segment has no memory behind it any more."""
        self._change(handle, error, is_mapped=False)

    def _change(self, handle: Handle | None, error: BaseException | None, *, is_mapped: bool) -> None:
        if handle is None or error is not None:
            return
        _, size_bytes, address, _ = handle
        if self._is_mapped.get(address) is is_mapped:  # freed by torch, then unmapped by vLLM
            return
        self._is_mapped[address] = is_mapped
        owner = owner_of(getattr(_pool_data().get(address), "tag", "")) if is_mapped else None
        self._changes.append(Change(now_ns(), address, size_bytes, owner))


def _pool_data() -> dict[int, Any]:
    """Return the segments by address; none before the program has made the allocator."""
    allocator = getattr(sys.modules.get(CUMEM), "CuMemAllocator", None)
    instance = getattr(allocator, "instance", None)
    return {} if instance is None else segments(instance)
