"""A plan beside what a Recording of the same settings measured."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rltrace.analysis.memory import DeviceMemory
from rltrace.analysis.moments import Boundary
from rltrace.analysis.plan.phases import BUCKET, REMAINDERS, TRAINER, UPDATE
from rltrace.analysis.plan.plan import Plan

WITHIN_SHARE = 0.05
WITHIN_BYTES = 512 << 20
"""A figure of a plan is as promised if it is within 5 % or 512 MiB of the measured one."""


PEAK, USED, HANDED_OUT = "peak", "used", "handed out by torch"
"""Figures of no owner: of the card, of a phase, and of the trainer's torch in the update."""
OF_PHASE = ("", USED, HANDED_OUT)


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
    return compared(planned_figures(plan), measured_figures(device))


def compared(planned: dict[str, int], measured: dict[str, int]) -> Iterator[Beside]:
    """Yield the figures of the planned phases, as far as they were measured; who was not there held nothing."""
    phases = {_parts(what)[0] for what in planned}
    ended = {_parts(what)[0] for what in measured if _parts(what)[1] not in OF_PHASE}
    for what in planned | measured:
        phase, owner = _parts(what)
        is_measured = what in measured or (phase in ended and owner not in OF_PHASE)
        if is_measured and phase in phases and (planned.get(what) or measured.get(what)):
            yield Beside(what, planned.get(what, 0), measured.get(what, 0))


def planned_figures(plan: Plan) -> dict[str, int]:
    """Return the figures of a plan, by what they are of."""
    found = {PEAK: plan.peak_bytes}
    for phase in plan.phases:
        found[f"{phase.phase}: {USED}"] = phase.used_bytes
        found |= {f"{phase.phase}: {owner}": size for owner, size in phase.end_bytes.items()}
    update = next(one for one in plan.phases if one.phase == UPDATE)
    handed_out = sum(size for owner, size in update.bytes.items() if owner in (*TRAINER, BUCKET))
    return found | {f"{UPDATE}: {HANDED_OUT}": handed_out}


def measured_figures(device: DeviceMemory) -> dict[str, int]:
    """Return the same figures of a Recording, of all its phases."""
    found = {PEAK: device.peak_bytes}
    for one in device.phases:
        if one.step is not None and one.phase is not None:
            found[f"{one.phase}: {USED}"] = max(one.used_bytes, found.get(f"{one.phase}: {USED}", 0))
    for phase, end in _ends(device).items():
        found |= {f"{phase}: {owner}": size for owner, size in end.bytes.items() if owner not in REMAINDERS}
    counted = max((one.bytes for one in device.allocated_steps if "worker" in one.process), default=0)
    return found | ({f"{UPDATE}: {HANDED_OUT}": counted} if counted else {})


def _parts(what: str) -> tuple[str, str]:
    """Return the phase of a figure, and what of it."""
    phase, _, owner = what.partition(": ")
    return phase, owner


def _ends(device: DeviceMemory) -> dict[str, Boundary]:
    """Return how each phase ended last; of a sync in several parts, the one before the KV cache wakes."""
    edges = device.boundaries
    ends = edges.part(edges.numbers["is_end"] & ~edges.step.are_in([None]) & ~edges.phase.are_in([None]))
    found: dict[str, int] = {}
    woken: set[int] = set()
    for place, (step, phase) in enumerate(zip(ends.column("step"), ends.column("phase"), strict=True)):
        if phase == "rollout.wake_kv_cache":
            woken.add(step)
        if phase != "weight_sync" or step not in woken:
            found[phase] = place
    return {phase: ends[place] for phase, place in found.items()}
