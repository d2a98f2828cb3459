"""What two processes on a card hold because they exist: contexts, communicators, workspaces, graphs."""

from __future__ import annotations

from rltrace.analysis.plan import constants, engine
from rltrace.analysis.plan.amount import Amount
from rltrace.analysis.plan.constants import total
from rltrace.analysis.plan.measured import TAKEN_WITHIN, Measured
from rltrace.analysis.plan.settings import Settings


def fixed(settings: Settings, known: Measured | None) -> dict[str, Amount]:
    """Return the owners whose bytes stay the same through a step."""
    card = settings.card
    reserved_within = 0 if card.is_measured else card.reserved_bytes
    assumed = {
        "cuda.context": _contexts(settings),
        "nccl": _communicators(settings),
        "driver.reserved": Amount(card.reserved_bytes, reserved_within, "NVML" if card.is_measured else "assumed"),
    }
    if settings.engine is not None:
        assumed |= {"rollout.graphs": engine.graphs(settings.engine), "rollout.activations": constants.ENGINE_BUFFERS}
    if known is None:
        return assumed
    taken = {
        owner: Amount(known.bytes[owner], TAKEN_WITHIN, f"measured in {known.path}")
        for owner in assumed
        if owner in known.bytes
    }
    return assumed | taken


def _contexts(settings: Settings) -> Amount:
    own = [constants.TRAINER_CONTEXT, constants.TRAINER_KERNELS]
    if settings.engine is not None:
        own += [constants.ENGINE_CONTEXT, constants.ENGINE_KERNELS]
        own += [] if settings.engine.enforce_eager else [constants.CAPTURE_CONTEXT]
    return total(*own)


def _communicators(settings: Settings) -> Amount:
    if settings.ranks == 1:
        return constants.NCCL_ALONE
    if settings.names.framework == "verl":
        return constants.NCCL_VERL
    return total(constants.NCCL_GROUP, constants.NCCL_SYNC) if settings.sync else constants.NCCL_GROUP


def at_engine_start(settings: Settings, params_bytes: int) -> int:
    """Return what is used of the card when vLLM checks how much is free."""
    groups = constants.NCCL_ALONE if settings.ranks == 1 else constants.NCCL_GROUP
    if settings.names.framework == "verl":
        groups = constants.NCCL_VERL
    contexts = constants.TRAINER_CONTEXT.bytes + constants.ENGINE_CONTEXT.bytes
    return params_bytes + contexts + groups.bytes + settings.card.reserved_bytes
