"""How long a sync and waking take, from rates that were measured."""

from __future__ import annotations

import msgspec

from rltrace.analysis.plan.measured import Measured
from rltrace.analysis.plan.phases import KV, WEIGHTS, Run
from rltrace.analysis.plan.settings import Settings

_8B = "docs/measurements/8b.md"

SYNC = (82e9, 175e9)
"""Bytes a second of the reference run's sync of 16.4 GB: 0.2 s with small buckets, 0.093 in the mean of a fast host."""
VERL_SYNC = (37e9, 44e9)
"""The same of verl's sync of 32.8 GB in 0.75 to 0.85 s."""
WAKE = (75e9, 280e9)
"""Bytes a second of a wake-up: 16.4 GB in 0.12 to 0.22 s, 19.2 GB in 0.06 to 0.13 s."""
SLEEP = (190e9, 400e9)
"""Bytes a second of a sleep: 35.6 GB in 0.09 to 0.18 s."""


class Duration(msgspec.Struct, frozen=True):
    """How long a phase takes."""

    phase: str
    bytes: int
    least_seconds: float
    most_seconds: float
    source: str


def durations(settings: Settings, run: Run, known: Measured | None) -> list[Duration]:
    """Return how long the phases take that move whole models or caches."""
    if settings.engine is None:
        return []
    amounts = {owner: amount.bytes for held in run.phases for owner, amount in held.bytes.items()}
    moved = {"rollout.wake_weights": amounts[WEIGHTS], "rollout.wake_kv_cache": amounts[KV]}
    found = []
    if settings.engine.sleep_level:
        rate = (known.wake_bytes_per_second,) * 2 if known and known.wake_bytes_per_second else WAKE
        found += [_duration(name, size, rate, _source(known, "wake")) for name, size in moved.items()]
        found.append(_duration("rollout.sleep", sum(moved.values()), SLEEP, _8B))
    if settings.sync is not None:
        sent = int(settings.trainer.model.count() * settings.sync.element_bytes)
        usual = VERL_SYNC if settings.names.framework == "verl" else SYNC
        rate = (known.sync_bytes_per_second,) * 2 if known and known.sync_bytes_per_second else usual
        found.append(_duration("weight_sync", sent, rate, _source(known, "sync")))
    return found


def _source(known: Measured | None, what: str) -> str:
    rate = known and (known.wake_bytes_per_second if what == "wake" else known.sync_bytes_per_second)
    return known.path if known and rate else _8B


def _duration(phase: str, size: int, rate: tuple[float, ...], source: str) -> Duration:
    return Duration(phase, size, size / rate[1], size / rate[0], source)
