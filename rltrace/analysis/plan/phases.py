"""The bytes of each owner in each phase of a step, at its fullest moment."""

from __future__ import annotations

from typing import NamedTuple

from rltrace.analysis.plan import constants, engine, processes
from rltrace.analysis.plan.amount import Amount
from rltrace.analysis.plan.constants import SHARE
from rltrace.analysis.plan.measured import Measured
from rltrace.analysis.plan.settings import Settings
from rltrace.analysis.plan.training import Stage, walk

PARAMS, OPTIMIZER, REF = "actor.params", "actor.optimizer", "ref.params"
WEIGHTS, KV, BUCKET = "rollout.weights", "rollout.kv_cache", "weight_sync.bucket"
CACHED, GATHER, UNATTRIBUTED = "allocator.cached", "weight_sync.gather", "unattributed"

REMAINDERS = ("free", "unaccounted")
"""Rows of the ledger that a plan has not: what is left of the card, and what the ledger itself cannot name."""
TRAINER = ("actor.params", "actor.grads", "actor.optimizer", "actor.activations", "ref.params", "unattributed")
"""Owners of what torch hands out to the trainer."""

Bytes = dict[str, Amount]


class Held(NamedTuple):
    """A phase: who holds what, and what is held at least."""

    phase: str
    bytes: Bytes
    least_bytes: int
    """What is used if every cache that can be given back is given back before memory runs out."""
    end_bytes: dict[str, int] | None = None
    """Who holds what when it ends, if that is something else."""

    @property
    def used_bytes(self) -> int:
        """Return the sum of all owners."""
        return sum(amount.bytes for amount in self.bytes.values())


class Run(NamedTuple):
    """All of a steady step, and what the engine needs to start."""

    phases: list[Held]
    kv_bytes: int
    beside_kv: Amount
    at_start_bytes: int
    """What is used when the engine checks what is free."""


def run(settings: Settings, known: Measured | None = None, stages: dict[str, Stage] | None = None) -> Run:
    """Return the phases of a steady step.

    Args:
        settings: The run.
        known: Figures of an earlier Recording.
        stages: The trainer's phases, if they are known already.
    """
    stages = walk(settings.trainer) if stages is None else stages
    always = processes.fixed(settings, known)
    resting = _resting(settings, stages)
    trainer = [_training(settings, name, stage, always) for name, stage in stages.items()]
    if settings.engine is None:
        return Run(trainer, 0, Amount(0, 0, ""), 0)
    beside = engine.beside_kv_cache(settings.engine)
    kv_bytes = engine.kv_cache(settings.engine, settings.card.cuda_bytes, beside)
    amounts = _awake(settings, kv_bytes, beside)
    if settings.engine.sleep_level == 0:  # it never sleeps
        trainer = [_with(one, amounts) for one in trainer]
    rollout = _rollout(settings, always, resting, amounts)
    params = resting[PARAMS].bytes
    return Run([*rollout, *trainer], kv_bytes, beside, processes.at_engine_start(settings, params))


def computed(size_bytes: int, source: str) -> Amount:
    """Return an amount that follows from shapes."""
    return Amount(size_bytes, int(size_bytes * SHARE), source)


def _resting(settings: Settings, stages: dict[str, Stage]) -> Bytes:
    """Return what the trainer holds between its phases."""
    end = stages["actor.update"].end.owners
    own = {PARAMS: "shapes, divided over the ranks", OPTIMIZER: "its states for each parameter", REF: "shapes"}
    held = {owner: computed(end.get(owner, 0), source) for owner, source in own.items() if end.get(owner)}
    rest = end.get(UNATTRIBUTED, 0) + constants.WORKER_REST.bytes
    return held | {UNATTRIBUTED: Amount(rest, constants.WORKER_REST.uncertainty_bytes, "cuBLAS's workspaces")}


def _awake(settings: Settings, kv_bytes: int, beside: Amount) -> Bytes:
    assert settings.engine is not None
    mapped = engine.weights(settings.engine)[1]
    return {
        WEIGHTS: computed(mapped, "vLLM's fused shapes"),
        KV: Amount(max(kv_bytes, 0), beside.uncertainty_bytes, beside.source),
    }


def _with(held: Held, more: Bytes) -> Held:
    sizes = {owner: amount.bytes for owner, amount in more.items()}
    return Held(held.phase, held.bytes | more, held.least_bytes + sum(sizes.values()), (held.end_bytes or {}) | sizes)


def _rollout(settings: Settings, always: Bytes, resting: Bytes, awake: Bytes) -> list[Held]:
    """Return the phases from waking to sleep."""
    sync, own = settings.sync, settings.engine
    assert own is not None
    both = not own.is_staged or own.sleep_level == 0
    weights = awake if both else {WEIGHTS: awake[WEIGHTS]}
    left = constants.CACHED
    present = {owner: amount for owner, amount in resting.items() if owner != OPTIMIZER or not settings.trainer.offload}
    during = always | present | weights | {CACHED: left}
    offloaded = {owner: amount for owner, amount in resting.items() if owner not in (PARAMS, OPTIMIZER)}
    moved = present[PARAMS].bytes
    kept = offloaded if settings.trainer.offload else resting
    cached = left.bytes + (moved if settings.trainer.offload and settings.offload_stays_cached else 0)
    buckets: Bytes = {}
    if sync is not None:
        size = sync.bucket_bytes * sync.buckets
        buckets = {BUCKET: computed(size, "the setting")}
        cached += 0 if sync.keeps or sync.is_freed_at_once else size
    after = always | kept | awake | {CACHED: Amount(cached, left.uncertainty_bytes, "the buckets of the sync, freed")}
    after |= buckets if sync is not None and sync.keeps else {}
    grown = engine.generating(own)
    generating = after | {CACHED: Amount(cached + grown, left.uncertainty_bytes + grown // 2, "a prefill, and logits")}
    wake = [] if own.sleep_level == 0 else [_fixed("rollout.wake_weights", during)]
    syncing = [] if sync is None else [_syncing(settings, during, buckets)]
    wake_kv = [] if both else [_fixed("rollout.wake_kv_cache", after)]
    return [*wake, *syncing, *wake_kv, Held("rollout.generate", generating, _sum(after))]


def _syncing(settings: Settings, during: Bytes, buckets: Bytes) -> Held:
    """Return the sync, and what is left of its buckets when it ends."""
    assert settings.sync is not None
    held = during | buckets | _gathers(settings)
    end = {owner: amount.bytes for owner, amount in (during | (buckets if settings.sync.keeps else {})).items()}
    if not settings.sync.keeps and not settings.sync.is_freed_at_once:
        end[CACHED] += sum(amount.bytes for amount in buckets.values())
    return Held("weight_sync", held, _sum(held), end)


def _gathers(settings: Settings) -> Bytes:
    """Return what a sync gathers for a moment: one whole parameter at a time, if its buckets are packed of those."""
    if settings.names.framework == "rltrace_reference" or settings.sync is None:
        return {}
    shapes = settings.trainer.model.parameters().values()
    largest = max(_elements(shape) for shape in shapes) * settings.sync.element_bytes
    return {GATHER: computed(int(largest), "the largest parameter, whole")}


def _elements(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _fixed(phase: str, held: Bytes) -> Held:
    return Held(phase, held, _sum(held))


def _sum(held: Bytes) -> int:
    return sum(amount.bytes for amount in held.values())


def _training(settings: Settings, phase: str, stage: Stage, always: Bytes) -> Held:
    """Return a phase of the trainer, its cache as it is when most was handed out."""
    share = SHARE if settings.is_measured else 0.1
    handed_out = stage.most.owners
    held = {
        owner: Amount(size, int(size * (share if owner != "actor.activations" else max(share, 0.05))), "walked through")
        for owner, size in handed_out.items()
        if size
    }
    rest = constants.WORKER_REST
    held[UNATTRIBUTED] = Amount(held.get(UNATTRIBUTED, rest).bytes + rest.bytes, rest.uncertainty_bytes, rest.source)
    cached = stage.most_reserved_bytes - sum(handed_out.values())
    within = int(max(cached, 0) * (0.05 if settings.is_measured else 0.3)) + constants.CACHED.uncertainty_bytes
    held[CACHED] = Amount(cached + constants.CACHED.bytes // 2, within, "the allocator's own rules")
    fixed = _sum(always) + rest.bytes
    return Held(phase, always | held, fixed + stage.most_held_bytes, _at_end(stage, always))


def _at_end(stage: Stage, always: Bytes) -> dict[str, int]:
    """Return who holds what when a phase of the trainer ends: what it freed lies in torch's cache."""
    end = stage.end.owners
    held = {owner: amount.bytes for owner, amount in always.items()} | {
        name: size for name, size in end.items() if size
    }
    held[UNATTRIBUTED] = end.get(UNATTRIBUTED, 0) + constants.WORKER_REST.bytes
    return held | {CACHED: stage.end.reserved_bytes - sum(end.values()) + constants.CACHED.bytes // 2}
