"""The bytes of each owner in each phase of a step, at its fullest moment."""

from __future__ import annotations

from typing import NamedTuple

from rltrace.analysis.plan import constants, engine, processes
from rltrace.analysis.plan.amount import Amount
from rltrace.analysis.plan.constants import SHARE
from rltrace.analysis.plan.generation import generation
from rltrace.analysis.plan.measured import Measured, weights_of
from rltrace.analysis.plan.settings import Settings
from rltrace.analysis.plan.training import Leftover, Stage, Steps, walk

PARAMS, OPTIMIZER, REF = "actor.params", "actor.optimizer", "ref.params"
WEIGHTS, KV, BUCKET = "rollout.weights", "rollout.kv_cache", "weight_sync.bucket"
UPDATE = "actor.update"
CACHED, GATHER, UNATTRIBUTED = "allocator.cached", "weight_sync.gather", "unattributed"

ROLLOUT_PHASES = ("rollout.wake_weights", "weight_sync", "rollout.wake_kv_cache", "rollout.generate")
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


def run(settings: Settings, known: Measured | None = None, steps: Steps | None = None) -> Run:
    """Return the phases of a steady step.

    Args:
        settings: The run.
        known: Figures of an earlier Recording.
        steps: The trainer's phases, if they are known already.
    """
    stages, *kept = walk(settings.trainer) if steps is None else steps
    own = _engine_cache(settings)
    synced, left = (constants.total(constants.CACHED, _rest(one), own) for one in kept)
    always = processes.fixed(settings, known)
    resting = _resting(settings, stages)
    trainer = [_training(settings, name, stage, always, left) for name, stage in stages.items()]
    if settings.engine is None:
        return Run(trainer, 0, Amount(0, 0, ""), 0)
    rest = known.profile_rest if known is not None and known.profile_rest is not None else constants.PROFILE_REST
    beside = engine.beside_kv_cache(settings.engine, rest)
    kv_bytes = engine.kv_cache(settings.engine, settings.card.cuda_bytes, beside)
    awake = _awake(settings, kv_bytes, beside, known)
    rollout = _rollout(settings, always, resting, awake, synced, left)
    if settings.sync is not None and settings.sync.keeps:
        trainer = [_with(one, _buckets(settings)) for one in trainer]
    if settings.engine.is_relaunched:  # while the trainer works there is none
        alone = processes.without_engine(always)
        trainer = [_training(settings, name, stage, alone, left) for name, stage in stages.items()]
        there = _rollout(settings, alone, resting, {}, synced, left)[-1].least_bytes
        return Run([*rollout, *trainer], kv_bytes, beside, there + constants.ENGINE_CONTEXT.bytes)
    if settings.engine.sleep_level == 0:  # it never sleeps
        trainer = [_with(one, awake | {CACHED: own}) for one in trainer]
    params = resting[PARAMS].bytes
    return Run([*rollout, *trainer], kv_bytes, beside, processes.at_engine_start(settings, params))


def first_without_room(settings: Settings, steady: Run, known: Measured | None) -> str | None:
    """Return the phase that ends the run: the first that is too full, in the first step, where the optimizer has no
    states yet, or in a later one; None if all fit."""
    states = next((held.bytes[OPTIMIZER].bytes for held in steady.phases if OPTIMIZER in held.bytes), 0)
    trainer = run(settings, known, walk(settings.trainer, steps=1)).phases
    in_first = {held.phase: held.least_bytes for held in trainer}
    for held in steady.phases:
        if held.phase in ROLLOUT_PHASES:
            in_first[held.phase] = held.least_bytes - (states if OPTIMIZER in held.bytes else 0)
    in_later = {held.phase: held.least_bytes for held in steady.phases}
    total = settings.card.total_bytes
    return next((phase for step in (in_first, in_later) for phase in in_later if step[phase] > total), None)


def computed(size_bytes: int, source: str) -> Amount:
    """Return an amount that follows from shapes."""
    return Amount(size_bytes, int(size_bytes * SHARE), source)


def _resting(settings: Settings, stages: dict[str, Stage]) -> Bytes:
    """Return what the trainer holds between its phases."""
    end = stages[UPDATE].end.owners
    own = {PARAMS: "shapes, divided over the ranks", OPTIMIZER: "its states for each parameter", REF: "shapes"}
    held = {owner: computed(end.get(owner, 0), source) for owner, source in own.items() if end.get(owner)}
    rest = end.get(UNATTRIBUTED, 0) + constants.WORKER_REST.bytes
    return held | {UNATTRIBUTED: Amount(rest, constants.WORKER_REST.uncertainty_bytes, "cuBLAS's workspaces")}


def _awake(settings: Settings, kv_bytes: int, beside: Amount, known: Measured | None) -> Bytes:
    assert settings.engine is not None
    fused = computed(engine.weights(settings.engine)[1], "vLLM's fused shapes")
    mapped = constants.total(fused, constants.WEIGHT_SEGMENTS)
    return {
        WEIGHTS: weights_of(known, settings.engine) or mapped,
        KV: Amount(max(kv_bytes, 0), beside.uncertainty_bytes, beside.source),
    }


def _rest(left: Leftover) -> Amount:
    return Amount(left.bytes, left.by_chance_bytes, "segments of which a part is in use")


def _engine_cache(settings: Settings) -> Amount:
    """Return what an engine that never sleeps, and so never empties its cache, keeps of its rollouts."""
    own = settings.engine
    if own is None or own.sleep_level or own.is_relaunched:
        return Amount(0, 0, "")
    size = generation(own).reserved_bytes
    return Amount(size, size // 2, "the engine's cache of a rollout, which no sleep empties")


def _with(held: Held, more: Bytes) -> Held:
    sums = {
        owner: constants.total(held.bytes[owner], amount) if owner in held.bytes else amount
        for owner, amount in more.items()
    }
    end = held.end_bytes or {}
    end |= {owner: end.get(owner, 0) + amount.bytes for owner, amount in more.items()}
    return Held(held.phase, held.bytes | sums, held.least_bytes + _sum(more), end)


def _rollout(
    settings: Settings, always: Bytes, resting: Bytes, awake: Bytes, synced: Amount, left: Amount
) -> list[Held]:
    """Return the phases from waking to sleep.

    Args:
        settings: The run.
        always: What the processes hold because they exist.
        resting: What the trainer holds between its phases.
        awake: What the engine holds.
        synced: What the trainer's cache keeps in the sync.
        left: What it keeps in the rollout.
    """
    sync, own = settings.sync, settings.engine
    assert own is not None
    is_away = settings.trainer.offload
    kept = {owner: amount for owner, amount in resting.items() if not is_away or owner not in (PARAMS, OPTIMIZER)}
    syncing = {owner: amount for owner, amount in resting.items() if not is_away or owner != OPTIMIZER}
    buckets = _buckets(settings)
    stays = sync is not None and not sync.keeps and not sync.is_freed_at_once
    cached = left.bytes + (_sum(buckets) if stays else 0)
    after = always | kept | awake | {CACHED: Amount(cached, left.uncertainty_bytes, "the buckets of the sync, freed")}
    after |= buckets if sync is not None and sync.keeps else {}
    grown, least = (0, 0) if _engine_cache(settings).bytes else generation(own)
    within = left.uncertainty_bytes + grown // 4
    generating = after | {CACHED: Amount(cached + grown, within, "a prefill, and logits, walked through")}
    found = []
    is_awake = not own.is_staged or own.sleep_level == 0
    if own.is_relaunched:
        found.append(_fixed("weight_sync", after))
    else:
        during = always | syncing | (awake if is_awake else {WEIGHTS: awake[WEIGHTS]}) | {CACHED: synced}
        during |= buckets if sync is not None and sync.keeps else {}
        found += [] if own.sleep_level == 0 else [_fixed("rollout.wake_weights", during)]
        found += [] if sync is None else [_syncing(settings, during, buckets)]
        found += [] if is_awake else [_fixed("rollout.wake_kv_cache", after)]
    return [*found, Held("rollout.generate", generating, _sum(after) + least)]


def _buckets(settings: Settings) -> Bytes:
    sync = settings.sync
    return {} if sync is None else {BUCKET: computed(sync.bucket_bytes * sync.buckets, "the setting")}


def _syncing(settings: Settings, during: Bytes, buckets: Bytes) -> Held:
    """Return the sync, and what is left of its buckets when it ends."""
    assert settings.sync is not None
    held = during | buckets | _gathers(settings)
    end = {owner: amount.bytes for owner, amount in (during | (buckets if settings.sync.keeps else {})).items()}
    if not settings.sync.keeps and settings.names.framework != "verl":  # verl empties its cache within the sync
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


def _training(settings: Settings, phase: str, stage: Stage, always: Bytes, left: Amount) -> Held:
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
    held[CACHED] = Amount(cached + constants.CACHED.bytes, within, "the allocator's own rules")
    fixed = _sum(always) + rest.bytes
    end = _at_end(stage, always)
    if settings.trainer.offload and phase == UPDATE:  # both have left when it ends, and the cache was emptied
        end |= {PARAMS: 0, OPTIMIZER: 0, CACHED: left.bytes}
    return Held(phase, always | held, fixed + stage.most_held_bytes, end)


def _at_end(stage: Stage, always: Bytes) -> dict[str, int]:
    """Return who holds what when a phase of the trainer ends: what it freed lies in torch's cache."""
    end = stage.end.owners
    held = {owner: amount.bytes for owner, amount in always.items()} | {
        name: size for name, size in end.items() if size
    }
    held[UNATTRIBUTED] = end.get(UNATTRIBUTED, 0) + constants.WORKER_REST.bytes
    return held | {CACHED: stage.end.reserved_bytes - sum(end.values()) + constants.CACHED.bytes}
