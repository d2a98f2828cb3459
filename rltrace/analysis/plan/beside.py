"""A plan beside what a Recording of the same settings measured."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rltrace.analysis.memory import Boundary, DeviceMemory
from rltrace.analysis.plan.phases import REMAINDERS, TRAINER
from rltrace.analysis.plan.plan import Plan

WITHIN_SHARE = 0.05
WITHIN_BYTES = 512 << 20
"""A figure of a plan is as promised if it is within 5 % or 512 MiB of the measured one."""


class Beside(msgspec.Struct, frozen=True):
    """One figure, planned and measured."""

    what: str
    planned_bytes: int
    measured_bytes: int

    @property
    def is_within(self) -> bool:
        """Return whether it is as promised."""
        off = abs(self.planned_bytes - self.measured_bytes)
        return off <= max(WITHIN_BYTES, WITHIN_SHARE * self.measured_bytes)


def beside(plan: Plan, device: DeviceMemory) -> Iterator[Beside]:
    """Yield the peak of the card, the most used in each phase, and each owner at the end of each phase."""
    yield Beside("peak", plan.peak_bytes, device.peak_bytes)
    ends = _ends(device)
    for phase in plan.phases:
        used = [one.used_bytes for one in device.phases if one.phase == phase.phase and one.step is not None]
        if known := [size for size in used if size is not None]:
            yield Beside(f"{phase.phase}: used", phase.used_bytes, max(known))
        if phase.phase not in ends:
            continue
        measured = {owner: size for owner, size in ends[phase.phase].bytes.items() if owner not in REMAINDERS}
        for owner in phase.end_bytes | measured:
            planned, found = phase.end_bytes.get(owner, 0), measured.get(owner, 0)
            if planned or found:
                yield Beside(f"{phase.phase}: {owner}", planned, found)
    yield from _handed_out(plan, device)


def _ends(device: DeviceMemory) -> dict[str, Boundary]:
    """Return how each phase ended last; of a sync in several parts, the one before the KV cache wakes."""
    found: dict[str, Boundary] = {}
    woken: set[int] = set()
    for one in device.boundaries:
        if one.step is None or one.phase is None or one.side != "end":
            continue
        if one.phase == "rollout.wake_kv_cache":
            woken.add(one.step)
        if one.phase != "weight_sync" or one.step not in woken:
            found[one.phase] = one
    return found


def _handed_out(plan: Plan, device: DeviceMemory) -> Iterator[Beside]:
    """Yield the most that torch handed out to the trainer, if it counted that."""
    update = next(one for one in plan.phases if one.phase == "actor.update")
    counted_bytes = max((one.bytes for one in device.allocated_steps if "worker" in one.process), default=0)
    if counted_bytes:
        planned = sum(size for owner, size in update.bytes.items() if owner in TRAINER)
        yield Beside("actor.update: handed out by torch", planned, counted_bytes)
