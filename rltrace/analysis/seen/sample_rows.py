"""Keeps what counts of samples."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.rows import groups
from rltrace.analysis.seen.spans import place_of
from rltrace.events import (
    ALLOCATED_PEAK,
    ALLOCATIONS,
    ALLOCATIONS_RESERVED,
    SAMPLER,
    STEP_FIGURES,
    USED,
    owner_of_counter,
    owner_of_pinned,
    owner_on_host,
)
from rltrace.read.columns import Columns
from rltrace.read.gate import MOST_BYTES

RESIDENT = "resident_bytes"


class _Sampled(NamedTuple):
    """What a counter samples: where in `Seen` it is kept, and whose it is."""

    where: str
    whose: str = ""


OF_PROCESS = {RESIDENT: "resident", USED: "used", ALLOCATED_PEAK: "allocated_peak"}
"""Counters that a process has one of, and where they are kept."""


@functools.lru_cache(4096)
def _sampled(name: str) -> _Sampled:
    if (owner := owner_of_counter(name)) is not None:
        return _Sampled("owners", owner)
    if name == ALLOCATIONS_RESERVED:
        return _Sampled("reserved")
    if name.startswith(ALLOCATIONS):
        exact = owner_of_counter(name.removeprefix(ALLOCATIONS))
        return _Sampled("") if exact is None else _Sampled("balances", exact)
    if name in OF_PROCESS:
        return _Sampled(OF_PROCESS[name])
    if (on_host := owner_on_host(name)) is not None:
        return _Sampled("on_host", on_host)
    pinned = owner_of_pinned(name)
    return _Sampled("figures", name) if pinned is None else _Sampled("pinned", pinned)


def see_samples(seen: Seen, rows: Columns, shift_ns: int) -> None:
    """Keep the samples that count."""
    name, values = rows.samples.name, rows.samples.value
    times_ns = rows.samples.ts_ns + shift_ns if shift_ns else rows.samples.ts_ns
    named = [(rows.texts[name[places[0]]], places) for places in groups(name)]
    if seen.process.role == SAMPLER:
        for counter, places in named:
            seen.sampled[counter].extend(times_ns.take(places), values.take(places))
        return
    is_size = np.abs(values) <= MOST_BYTES  # of another one nobody knows how many bytes it is
    found = [(of, places) for counter, places in named if (of := _sampled(counter)).where]
    if not is_size.all():
        found = [(of, places if of.where == "figures" else places[is_size[places]]) for of, places in found]
    found = sorted(((of, places) for of, places in found if len(places)), key=lambda one: int(one[1][0]))
    for (where, whose), places in found:
        if where == "figures" and not (whose in STEP_FIGURES or seen.lane.is_driver):
            continue
        if where != "balances":
            kept = getattr(seen, where)[whose] if whose else getattr(seen, where)
            kept.extend(times_ns.take(places), values.take(places))
    exact = [(of.whose, places) for of, places in found if of.where == "balances"]
    if exact:
        owners = np.repeat(
            [place_of(owner, seen.balances.owners) for owner, _ in exact], [len(places) for _, places in exact]
        )
        together = np.concatenate([places for _, places in exact])
        order = np.argsort(together)
        seen.balances.extend(owners[order], times_ns[together[order]], values[together[order]])
