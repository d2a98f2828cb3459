"""The settings to change, in the order of what they give: room in the phase that is full, or use of what is free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from rltrace.analysis.plan import engine, phases
from rltrace.analysis.plan.ceilings import ceilings, margin_bytes
from rltrace.analysis.plan.measured import Measured
from rltrace.analysis.plan.phases import Run
from rltrace.analysis.plan.settings import Settings

LEAST_BYTES = 256 << 20
"""What a change has to give, to be named: the limit of the ledger on a GPU, below which nothing is told apart."""


class Change(NamedTuple):
    """A setting with another value, and what plan says of it."""

    setting: str
    now: str
    then: str
    gives_bytes: int
    """What it leaves in the phase that is full, or takes of what is free."""
    gives: str
    """The same in words."""
    makes_it_fit: bool


def making_room(settings: Settings, known: Measured | None, phase: str | None) -> list[Change]:
    """Return what makes room in a phase, the largest first.

    Args:
        settings: The run as it was.
        known: What it measured.
        phase: Where memory ran out; the fullest phase if nobody knows.
    """
    before = phases.run(settings, known)
    names = [held.phase for held in before.phases]
    where = phase if phase in names else max(before.phases, key=lambda held: held.least_bytes).phase
    found = [_room(settings, known, before, where, *candidate) for candidate in _smaller(settings, before, known)]
    return sorted((one for one in found if one.gives_bytes >= LEAST_BYTES), key=lambda one: -one.gives_bytes)


def using_room(settings: Settings, known: Measured | None) -> list[Change]:
    """Return what can be larger and still leaves the margin, the largest first."""
    run = phases.run(settings, known)
    return sorted(_larger(settings, run, known), key=lambda one: -one.gives_bytes)


def _smaller(settings: Settings, run: Run, known: Measured | None) -> Iterator[tuple[str, str, str, Settings]]:
    """Yield settings that take less: their name, their value now and then, and the run with it."""
    trainer, own, sync, names = settings.trainer, settings.engine, settings.sync, settings.names
    for one in ceilings(settings, run, known):
        if one.recommended is None or one.recommended >= one.now:
            continue
        if one.setting == names.utilization and own is not None:
            less = msgspec.structs.replace(own, gpu_memory_utilization=one.recommended)
            yield one.setting, f"{one.now:g}", f"{one.recommended:g}", msgspec.structs.replace(settings, engine=less)
        if one.setting == names.bucket and sync is not None:
            smaller = msgspec.structs.replace(sync, bucket_bytes=int(one.recommended) << 20)
            changed = msgspec.structs.replace(settings, sync=smaller)
            yield one.setting, f"{one.now:g}", f"{one.recommended:g}", changed
    if trainer.sequences > 1:
        half = trainer.sequences // 2
        changed = _with_trainer(settings, sequences=half, log_prob_sequences=max(trainer.log_prob_sequences // 2, 1))
        yield names.micro_batch, str(trainer.sequences), str(half), changed
    if trainer.has_ref and not trainer.ref_offload and names.ref_offload:
        yield names.ref_offload, "false", "true", _with_trainer(settings, ref_offload=True)
    if not trainer.offload and names.offload:
        yield names.offload, "false", "true", _with_trainer(settings, offload=True)
    if not trainer.recompute and names.recompute:
        yield names.recompute, "false", "true", _with_trainer(settings, recompute=True)


def _with_trainer(settings: Settings, **values: object) -> Settings:
    return msgspec.structs.replace(settings, trainer=msgspec.structs.replace(settings.trainer, **values))


def _room(
    settings: Settings, known: Measured | None, before: Run, where: str, name: str, now: str, then: str, other: Settings
) -> Change:
    after = phases.run(other, known)
    less = _least(before, where) - _least(after, where)
    total = settings.card.total_bytes
    fits = all(held.least_bytes <= total for held in after.phases)
    return Change(name, now, then, less, f"{less / 2**30:.1f} GiB less in {where}", fits)


def _least(run: Run, phase: str) -> int:
    return next(held.least_bytes for held in run.phases if held.phase == phase)


def _larger(settings: Settings, run: Run, known: Measured | None) -> Iterator[Change]:
    own, names, margin = settings.engine, settings.names, margin_bytes(settings, run)
    for one in ceilings(settings, run, known):
        if one.recommended is None or one.recommended <= one.now:
            continue
        if one.setting == names.utilization and own is not None:
            more = int((one.recommended - one.now) * settings.card.cuda_bytes)
            tokens = [engine.kv_tokens(own, size) for size in (run.kv_bytes, run.kv_bytes + more)]
            gives = f"{tokens[1]:,} tokens of KV cache instead of {tokens[0]:,}"
            yield Change(one.setting, f"{one.now:g}", f"{one.recommended:g}", more, gives, True)
        if one.setting == names.micro_batch:
            trainer = _with_trainer(settings, sequences=int(one.recommended))
            used = _least(phases.run(trainer, known), "actor.update") - _least(run, "actor.update")
            counts = [-(-settings.most_sequences // int(size)) for size in (one.now, one.recommended)]
            gives = f"micro-batches of a minibatch: {counts[1]} instead of {counts[0]}; {used / 2**30:.1f} GiB more"
            yield Change(one.setting, f"{one.now:g}", f"{one.recommended:g}", used, gives, True)
    if settings.trainer.has_ref and settings.trainer.ref_offload and names.ref_offload:
        kept = _with_trainer(settings, ref_offload=False)
        after = phases.run(kept, known)
        fits = all(held.least_bytes + margin <= settings.card.total_bytes for held in after.phases)
        more = _least(after, "actor.update") - _least(run, "actor.update")
        if fits:
            gives = f"the ref stays on the card, {more / 2**30:.1f} GiB more"
            yield Change(names.ref_offload, "true", "false", more, gives, True)
