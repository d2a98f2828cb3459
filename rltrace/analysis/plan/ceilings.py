"""The largest value of each setting that fits, without a margin, and the value that is recommended, with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from rltrace.analysis.plan import engine, phases
from rltrace.analysis.plan.measured import Measured
from rltrace.analysis.plan.phases import Held, Run
from rltrace.analysis.plan.settings import Settings
from rltrace.analysis.plan.training import walk

START_UP = "the engine's start-up check"
NO_MORE = "the model itself"
WHOLE_BATCH = "the sequences of a minibatch"
STEP = 0.001
"""To what a share is rounded down."""
MEBIBYTE = 1 << 20
LEAST_MARGIN = 0.02
"""Share of the card that a recommended value leaves, at least: what one step needs more than another."""


class Ceiling(msgspec.Struct, frozen=True):
    """How far one setting can go, if the others stay."""

    setting: str
    """Its name in the framework."""
    now: float
    """Its value in these settings."""
    largest: float | None
    """The largest value that fits, without a margin; none if not even the smallest does."""
    recommended: float | None
    """The largest value that leaves the margin."""
    margin_bytes: int
    """What the recommended value leaves free."""
    limited_by: str
    """The phase that is full then, or what refuses a larger value."""
    unit: str = ""
    """Of the values; empty for a share."""


class Room(NamedTuple):
    """How much more fits into a phase, and which one it is."""

    bytes: int
    phase: str


def ceilings(settings: Settings, run: Run, known: Measured | None) -> list[Ceiling]:
    """Return the ceilings of a run."""
    margin = margin_bytes(settings, run)
    found = []
    if settings.engine is not None:
        found += [_utilization(settings, run, margin), _kv_tokens(settings, run, margin)]
        if settings.sync is not None and settings.sync.buckets:
            found.append(_bucket(settings, run, margin))
    found.append(_micro_batch(settings, run, known, margin))
    return found


def margin_bytes(settings: Settings, run: Run) -> int:
    """Return what a recommended value leaves free: how far the fullest phase may be off, or 2 % of the card."""
    fullest = max(run.phases, key=lambda held: held.used_bytes)
    return max(uncertainty_bytes(fullest), int(LEAST_MARGIN * settings.card.total_bytes))


def uncertainty_bytes(held: Held) -> int:
    """Return how far the sum of a phase may be off: that of its owners, which do not depend on each other."""
    return int(sum(amount.uncertainty_bytes**2 for amount in held.bytes.values()) ** 0.5)


def room(settings: Settings, run: Run, having: Callable[[Held], bool]) -> Room:
    """Return what is left in the fullest of some phases, if every cache that can be given back is."""
    total = settings.card.total_bytes
    free = {held.phase: total - held.least_bytes for held in run.phases if having(held)}
    phase = min(free, key=lambda name: free[name])
    return Room(free[phase], phase)


def holds(owner: str) -> Callable[[Held], bool]:
    """Return whether a phase holds something of this owner."""
    return lambda held: owner in held.bytes


def _kv_room(settings: Settings, run: Run) -> Room:
    return room(settings, run, holds(phases.KV))


def _utilization(settings: Settings, run: Run, margin: int) -> Ceiling:
    own = settings.engine
    assert own is not None
    whole = settings.card.cuda_bytes
    at_start = (settings.card.total_bytes - run.at_start_bytes) / whole
    left = _kv_room(settings, run)
    now = own.gpu_memory_utilization
    held = now + left.bytes / whole
    if run.kv_bytes < 0:  # its weights alone are more: what it takes beside them, and then what fits besides
        held = (run.beside_kv.bytes + left.bytes) / whole
    largest = min(at_start, held, 1.0)
    least = (run.beside_kv.bytes + engine.kv_block_bytes(own) * -(-own.max_model_len // engine.BLOCK_TOKENS)) / whole
    with_margin = min(at_start, held) - margin / whole
    return Ceiling(
        settings.names.utilization,
        now,
        _down(largest) if largest >= least else None,
        _down(min(with_margin, 1.0)) if with_margin >= least else None,
        margin,
        START_UP if at_start < held else left.phase,
    )


def _down(value: float) -> float:
    return round(int(value / STEP) * STEP, 3)


def _kv_tokens(settings: Settings, run: Run, margin: int) -> Ceiling:
    own = settings.engine
    assert own is not None
    left = _kv_room(settings, run)
    limit = int(settings.card.total_bytes) - run.at_start_bytes - run.beside_kv.bytes
    by_start = limit < run.kv_bytes + left.bytes
    most = min(limit, run.kv_bytes + left.bytes)
    return Ceiling(
        "tokens of the KV cache",
        engine.kv_tokens(own, run.kv_bytes),
        engine.kv_tokens(own, most) or None,
        engine.kv_tokens(own, most - margin) or None,
        margin,
        START_UP if by_start else left.phase,
        "tokens",
    )


def _bucket(settings: Settings, run: Run, margin: int) -> Ceiling:
    sync = settings.sync
    assert sync is not None
    stays = sync.keeps or not sync.is_freed_at_once
    left = room(settings, run, lambda held: held.phase == "weight_sync" or (stays and phases.KV in held.bytes))
    whole = int(settings.trainer.model.count() * sync.element_bytes)

    def fitting(free: int) -> float | None:
        size = min(sync.bucket_bytes + free // sync.buckets, whole)
        return size // MEBIBYTE if size >= MEBIBYTE else None

    largest = fitting(left.bytes)
    limit = NO_MORE if largest == whole // MEBIBYTE else left.phase
    now = sync.bucket_bytes / MEBIBYTE
    return Ceiling(settings.names.bucket, now, largest, fitting(left.bytes - margin), margin, limit, "MiB")


def _micro_batch(settings: Settings, run: Run, known: Measured | None, margin: int) -> Ceiling:
    """Search the largest micro-batch whose phases fit, by halves."""
    held = {one.phase: one for one in run.phases}
    now = settings.trainer.sequences

    def free(sequences: int) -> int:
        trainer = msgspec.structs.replace(settings.trainer, sequences=sequences)
        again = phases.run(msgspec.structs.replace(settings, trainer=trainer), known, walk(trainer))
        return settings.card.total_bytes - max(one.least_bytes for one in again.phases if one.phase == UPDATE)

    def largest(least_free: int) -> int | None:
        if free(settings.most_sequences) >= least_free:  # a single one adds to no gradients, and may need less
            return settings.most_sequences
        below, above = 0, settings.most_sequences
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (middle, above) if free(middle) >= least_free else (below, middle)
        return below or None

    found = largest(0)
    limit = WHOLE_BATCH if found == settings.most_sequences else UPDATE
    recommended = found if found and free(found) >= margin else largest(margin)
    assert UPDATE in held
    return Ceiling(settings.names.micro_batch, now, found, recommended, margin, limit, "sequences")


UPDATE = "actor.update"
