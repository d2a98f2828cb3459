"""What a plan is made of: a card, a trainer, an engine, and how weights pass between them."""

from __future__ import annotations

import msgspec

from rltrace.analysis.plan.cards import Card
from rltrace.analysis.plan.engine import Engine
from rltrace.analysis.plan.trainer import Trainer
from rltrace.errors import ConfigError


class Sync(msgspec.Struct, frozen=True, kw_only=True):
    """How weights get to the engine."""

    bucket_bytes: int
    buckets: int
    element_bytes: float
    """Of what is sent."""
    keeps: bool = False
    """The buckets stay from step to step."""
    is_freed_at_once: bool = False
    """True: their memory goes back to the device after a sync; False: it stays in torch's cache through the rollout."""


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """What the settings are called in the framework."""

    framework: str
    utilization: str
    bucket: str
    micro_batch: str
    kv_cache: str = "KV tokens"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A run that has not run."""

    card: Card
    ranks: int
    trainer: Trainer
    engine: Engine | None
    """None: nothing is sampled on this card."""
    sync: Sync | None
    names: Names
    most_sequences: int
    """Sequences of a rank in a minibatch: a micro-batch cannot have more."""
    offload_stays_cached: bool = False
    """Whether what is offloaded before the KV cache wakes still lies in torch's cache then."""
    is_measured: bool = True
    """Whether runs of this framework, sharded like this, were compared with plan's figures."""
    unknown: tuple[str, ...] = ()
    """What these settings leave open, in sentences."""


def divided(name: str, value: int, by: int, by_name: str) -> int:
    """Return the quotient.

    Raises:
        ConfigError: there is a rest.
    """
    if by < 1 or value % by:
        near = [number for number in (value // by * by, value // by * by + by) if number] if by >= 1 else []
        give = " or ".join(map(str, near)) or f"{by_name} of at least 1"
        raise ConfigError(f"{name}: {value} does not divide over {by_name}: {by}; give {give}")
    return value // by
