"""Whose each allocation of an SGLang engine is, and its pools' sleeps, on the steps on which all are kept.

Source read: SGLang 0.4.6 to 0.5.23, torch_memory_saver 0.0.10. Its pools are torch's own, so torch's history has what
is in them, asleep or awake: whole pools count instead, while they have memory behind them.
"""

from __future__ import annotations

from typing import Any

from rltrace.hooks.patching import PatchSet
from rltrace.host.clock import now_ns
from rltrace.host.nvml import DRIVER
from rltrace.instrument.memory.engine_allocations import keep_pools, name_executions, owner_of
from rltrace.instrument.sglang.scheduler import SCHEDULER
from rltrace.instrument.torch_memory_saver import POOLS, SAVER, segments, tags_of
from rltrace.record.torch import allocations
from rltrace.record.torch.allocation_replay import Change


class SglangAllocations:
    """A model's batches, and the pools that sleep."""

    name = "sglang_allocations"
    supports = ("sglang >= 0.4.6", "torch_memory_saver >= 0.0.10")

    def install(self, patches: PatchSet) -> None:
        """Name the hooks; there are none without a driver."""
        if DRIVER.exists():
            name_hooks(patches)


def name_hooks(patches: PatchSet) -> None:
    """Name every place where memory comes and goes."""
    pools = SaverPools()
    keep_pools(pools)
    name_executions(patches, f"{SCHEDULER}:Scheduler.run_batch")
    patches.around(f"{SAVER}.pause", pools.named_tags, pools.paused, reads=POOLS)
    patches.around(f"{SAVER}.resume", pools.named_tags, pools.resumed, reads=POOLS)


class SaverPools:
    """torch_memory_saver's pools: what a pause unmaps and a resumption maps while a history is kept."""

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._asleep: set[str] = set()
        """The tags of paused pools, whether a history is kept or not."""
        self._is_kept = False

    def begin(self) -> None:
        """Forget what was before."""
        self._changes, self._is_kept = [], True

    def end(self) -> allocations.PoolHistory:
        """Return what has happened."""
        self._is_kept = False
        known = segments()
        alive = {address: size for address, (size, tag) in known.items() if tag not in self._asleep}
        ranges = [(address, address + size) for address, (size, _) in known.items()]
        changes, self._changes = self._changes, []
        return allocations.PoolHistory(changes, alive, ranges)

    def has_segments(self) -> bool:
        """Tell whether there are any segments, asleep or awake."""
        return bool(segments())

    def owners(self) -> dict[int, str]:
        """Return the owner of every segment, asleep or awake, by address."""
        return {address: owner_of(tag) for address, (_, tag) in segments().items()}

    def named_tags(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
        """Return the tags that a call is about."""
        named = tags_of(args, kwargs)
        return {tag for _, tag in segments().values()} if named is None else named

    def paused(self, tags: set[str], _result: Any, error: BaseException | None) -> None:
        """Note that these pools have no memory any more."""
        if error is None:
            self._change(tags - self._asleep, is_mapped=False)
            self._asleep |= tags

    def resumed(self, tags: set[str], _result: Any, error: BaseException | None) -> None:
        """Note that these pools have memory again."""
        if error is None:
            self._change(tags & self._asleep, is_mapped=True)
            self._asleep -= tags

    def _change(self, tags: set[str], *, is_mapped: bool) -> None:
        if not self._is_kept:
            return
        at_ns = now_ns()
        self._changes += [
            Change(at_ns, address, size_bytes, owner_of(tag) if is_mapped else None)
            for address, (size_bytes, tag) in segments().items()
            if tag in tags
        ]
