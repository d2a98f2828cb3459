"""The plan of a run: who holds what in each phase, whether it fits, and how far each setting can go."""

from __future__ import annotations

import msgspec

from rltrace.analysis.plan import engine, phases
from rltrace.analysis.plan.ceilings import Ceiling, ceilings, uncertainty_bytes
from rltrace.analysis.plan.measured import Measured
from rltrace.analysis.plan.phases import CACHED, Held
from rltrace.analysis.plan.rates import Duration, durations
from rltrace.analysis.plan.settings import Settings
from rltrace.analysis.plan.training import Stage, walk


class PlannedOwner(msgspec.Struct, frozen=True):
    """What an owner holds."""

    bytes: int
    """In the fullest phase."""
    peak_bytes: int
    """Its own most, in whatever phase."""
    peak_phase: str
    uncertainty_bytes: int
    """How far `bytes` may be off."""
    source: str
    """What it follows from, or where it was measured."""


class PlannedPhase(msgspec.Struct, frozen=True):
    """A phase at its fullest moment."""

    phase: str
    used_bytes: int
    """With all that torch's caches keep."""
    least_bytes: int
    """What is used at least: torch gives its cache back before it runs out of memory."""
    free_bytes: int
    """Negative: it does not fit."""
    uncertainty_bytes: int
    bytes: dict[str, int]
    end_bytes: dict[str, int]
    """When it ends, as the ledger has it at a phase boundary."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one GPU of a run will hold; the ranks are alike."""

    version: int = 1
    framework: str
    parameters: int
    """Of the model, exactly."""
    ranks: int
    card: str
    card_bytes: int
    peak_bytes: int
    peak_phase: str
    uncertainty_bytes: int
    headroom_bytes: int
    """What the fullest phase leaves of the card; negative if it does not fit."""
    verdict: str
    """`fits`, `may not fit` if that is within the uncertainty, `does not fit`, or `the engine refuses to start`."""
    owners: dict[str, PlannedOwner]
    phases: list[PlannedPhase]
    ceilings: list[Ceiling]
    durations: list[Duration]
    kv_cache_tokens: int
    unknown: list[str]
    """What the settings leave open, and how a Recording would tell."""
    recording: str | None
    """The earlier Recording that figures were taken from."""


FITS, MAY_NOT_FIT, DOES_NOT_FIT, REFUSES = "fits", "may not fit", "does not fit", "the engine refuses to start"


def plan(settings: Settings, known: Measured | None = None) -> Plan:
    """Return the plan of a run.

    Args:
        settings: The run.
        known: Figures of an earlier Recording.
    """
    stages = walk(settings.trainer)
    run = phases.run(settings, known, stages)
    fullest = max(run.phases, key=lambda held: held.used_bytes)
    return Plan(
        framework=settings.names.framework,
        parameters=settings.trainer.model.count(),
        ranks=settings.ranks,
        card=settings.card.name,
        card_bytes=settings.card.total_bytes,
        peak_bytes=fullest.used_bytes,
        peak_phase=fullest.phase,
        uncertainty_bytes=uncertainty_bytes(fullest),
        headroom_bytes=settings.card.total_bytes - fullest.used_bytes,
        verdict=verdict(settings, run),
        owners=_owners(run.phases, fullest, stages),
        phases=[_phase(settings, held) for held in run.phases],
        ceilings=ceilings(settings, run, known),
        durations=durations(settings, run, known),
        kv_cache_tokens=engine.kv_tokens(settings.engine, run.kv_bytes) if settings.engine else 0,
        unknown=[*settings.unknown, *_unknown(settings, known)],
        recording=known.path if known is not None else None,
    )


def verdict(settings: Settings, run: phases.Run) -> str:
    """Return whether a run fits, at the fullest moment at which nothing can be given back."""
    total, own = settings.card.total_bytes, settings.engine
    if own is not None:
        wanted = int(own.gpu_memory_utilization * settings.card.cuda_bytes)
        too_few = engine.kv_tokens(own, run.kv_bytes) < own.max_model_len
        if wanted > total - run.at_start_bytes or too_few:
            return REFUSES
    tightest = max(run.phases, key=lambda held: held.least_bytes)
    free, off = total - tightest.least_bytes, uncertainty_bytes(tightest)
    return DOES_NOT_FIT if free < 0 else MAY_NOT_FIT if free < off else FITS


def _phase(settings: Settings, held: Held) -> PlannedPhase:
    total = settings.card.total_bytes
    return PlannedPhase(
        held.phase,
        held.used_bytes,
        held.least_bytes,
        total - held.used_bytes,
        uncertainty_bytes(held),
        {owner: amount.bytes for owner, amount in held.bytes.items()},
        held.end_bytes or {owner: amount.bytes for owner, amount in held.bytes.items()},
    )


def _owners(held: list[Held], fullest: Held, stages: dict[str, Stage]) -> dict[str, PlannedOwner]:
    most: dict[str, tuple[int, str]] = {}
    for one in held:
        sizes = {owner: amount.bytes for owner, amount in one.bytes.items()}
        if one.phase in stages:
            stage = stages[one.phase]
            sizes |= {owner: max(sizes.get(owner, 0), size) for owner, size in stage.named_peaks.items() if size}
            sizes[CACHED] = max(sizes.get(CACHED, 0), (one.end_bytes or {}).get(CACHED, 0))
        for owner, size in sizes.items():
            if owner not in most or size > most[owner][0]:
                most[owner] = size, one.phase
    sources = {owner: amount for one in held for owner, amount in one.bytes.items()} | fullest.bytes
    return {
        owner: PlannedOwner(
            fullest.bytes[owner].bytes if owner in fullest.bytes else 0,
            size,
            phase,
            sources[owner].uncertainty_bytes,
            sources[owner].source,
        )
        for owner, (size, phase) in most.items()
        if owner in sources
    }


def _unknown(settings: Settings, known: Measured | None) -> list[str]:
    found = []
    if known is None:
        found.append(
            "what CUDA, NCCL and vLLM take of themselves, on this machine: figures of other machines were taken; "
            "--like RUN takes them from a Recording of one step"
        )
    if not settings.card.is_measured:
        found.append(f"what the driver keeps of a {settings.card.name}: assumed; `rltrace doctor` or --like RUN tells")
    if not settings.is_measured:
        found.append("how far this framework's trainer is from plan's figures: not compared yet; --like RUN shows it")
    return found
