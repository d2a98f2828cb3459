"""Findings about memory: each is found where its fault is planted, with its rank, its phase and its bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from planted_runs import CLOSE, HOOKS, TWO_PERCENT, PlantedRun, has_price, look, planted
from recordings import Written, span

from rltrace.analysis.findings import why
from rltrace.analysis.findings.finding import Finding
from rltrace.analysis.summary import analyse

STEPS = 9
WEIGHTS, KV_CACHE = 16e9, 20e9
SLEEP_LENGTH = 0.5

Held = dict[str, float]
Moment = Callable[[int], Held]


def nothing(step: int) -> Held:
    """Bytes beside those of a run that is well."""
    return {}


def colocated(
    folder: Path, *, asleep: Moment = nothing, training: Moment = nothing, waking: Moment = nothing
) -> Written:
    """Rank 5's card in steps of 10 s: its engine wakes at 0, sleeps at 4, and the actor trains from 5 on.

    Args:
        folder: Where to write it.
        asleep: Bytes by owner that are there besides when the engine has gone to sleep, in a step.
        training: The same while the actor trains.
        waking: The same when the engine wakes.
    """
    written = Written(folder)
    records: list[Any] = []
    base = {"actor__params": 8e9, "rollout__weights": 0.0, "rollout__kv_cache": 0.0, "allocator__cached": 0.0}
    awake = {**base, "rollout__weights": WEIGHTS, "rollout__kv_cache": KV_CACHE}
    tags = {"weights": int(WEIGHTS), "kv_cache": int(KV_CACHE)}
    for n in range(STEPS):
        at = 10.0 * n
        records += [span("step", at, at + 9.9, step=n)]
        records += [span("rollout.wake_weights", at + 0.1, at + 0.5), span("cumem.map", at + 0.1, at + 0.5, tags=tags)]
        records += [span("rollout.generate", at + 1, at + 4)]
        records += [span("rollout.sleep", at + 4, at + 4 + SLEEP_LENGTH, level=2)]
        records += [span("cumem.unmap", at + 4.1, at + 4.4, tags=tags), span("actor.update", at + 5, at + 9.5)]
        for moment, held in (
            (at + 0.1, base | waking(n)), (at + 0.5, awake), (at + 4, awake), (at + 4 + SLEEP_LENGTH, base | asleep(n)),
            (at + 5, base | training(n)), (at + 9.5, base | training(n)),
        ):  # fmt: skip
            records += look(moment, **held)
    device = {"host": "here", "uuid": "GPU-5"}
    written.process("w", *records, role="worker", rank=5, device=device, pid=3, ended_s=10.0 * STEPS)
    return written


def found(written: Written, name: str) -> list[Finding]:
    """The findings of one id."""
    judged = why(analyse(written.read()))
    assert name not in [one.id for one in judged.unjudged], judged.unjudged
    return [one for one in judged.findings if one.id == name]


def holds(finding: Finding, size_bytes: float, phase: str) -> None:
    """It is about these bytes of rank 5 in a phase."""
    assert finding.bytes == pytest.approx(size_bytes, rel=CLOSE)
    assert (finding.evidence.ranks, finding.evidence.phases) == ([5], [phase])


def test_nearly_full_card(tmp_path: Path) -> None:
    """A card with less than a twentieth left is named, with the phase; one with room is not."""
    assert not found(colocated(tmp_path / "room"), "nearly_full")
    full = colocated(tmp_path / "full", training=lambda step: {"actor__activations": 70e9})
    (finding,) = found(full, "nearly_full")
    holds(finding, 1.9e9, "actor.update")


def test_memory_that_grows(tmp_path: Path) -> None:
    """What grows from sleep to sleep is named with its owner and how much a sleep; what is constant is not."""

    def held(size: Callable[[int], float]) -> Moment:
        return lambda step: {"unattributed": size(step)}

    assert not found(colocated(tmp_path / "well", asleep=held(lambda step: 2e9)), "memory_grows")
    (finding,) = found(colocated(tmp_path / "faulty", asleep=held(lambda step: 1e9 + 0.5e9 * step)), "memory_grows")
    holds(finding, 0.5e9, "rollout.sleep")
    assert finding.title.startswith("unattributed grows by 477 MiB")


def test_sleep_that_leaves_bytes(tmp_path: Path) -> None:
    """What an engine holds while it sleeps is told, with the rank; a sleep that gives all of it back is not."""
    assert not found(colocated(tmp_path / "well"), "sleep_leaves")
    (finding,) = found(colocated(tmp_path / "faulty", asleep=lambda step: {"rollout__kv_cache": 3e9}), "sleep_leaves")
    holds(finding, 3e9, "rollout.sleep")
    assert "left bytes behind" in finding.evidence.facts[0]


def test_cache_in_the_way(tmp_path: Path) -> None:
    """What torch's cache keeps while an engine wakes is told from 5 % of the card on."""
    assert not found(colocated(tmp_path / "well", waking=lambda step: {"allocator__cached": 2e9}), "allocator_cache")
    faulty = colocated(tmp_path / "faulty", waking=lambda step: {"allocator__cached": 10e9 if step == 6 else 1e9})
    (finding,) = found(faulty, "allocator_cache")
    holds(finding, 10e9, "rollout.wake_weights")
    assert "step 6" in finding.evidence.facts[0]


def test_fragments_in_the_way(tmp_path: Path) -> None:
    """What stays cached though the cache was emptied since the actor trained is told as fragments, and not as cache."""

    def fragmented(folder: Path, size: float) -> Written:
        written = colocated(folder, waking=lambda step: {"allocator__cached": size})
        emptied = [span("allocator.empty_cache", 10 * n + 0.01, 10 * n + 0.03) for n in range(STEPS)]
        device = {"host": "here", "uuid": "GPU-5"}
        return written.process("t", *emptied, role="worker", rank=5, device=device, pid=5, ended_s=99, hooks=HOOKS)

    cached = colocated(tmp_path / "cached", waking=lambda step: {"allocator__cached": 8e9})
    assert not found(cached, "allocator_fragments")
    assert not found(fragmented(tmp_path / "well", 1e9), "allocator_fragments")
    assert not found(
        colocated(tmp_path / "cache", waking=lambda step: {"allocator__cached": 8e9}), "allocator_fragments"
    )
    faulty = fragmented(tmp_path / "faulty", 8e9)
    (finding,) = found(faulty, "allocator_fragments")
    holds(finding, 8e9, "rollout.wake_weights")
    assert not found(faulty, "allocator_cache")


def test_emptying_the_cache(tmp_path: Path) -> None:
    """The time in which the cache is emptied is priced, with the rank and the phase that it is in."""

    def plant(run: PlantedRun) -> None:
        run.more["actor.update"] = lambda run, rank, step, begin, end: (
            [span("allocator.empty_cache", end - TWO_PERCENT, end)] if rank == 2 else []
        )

    finding = planted(tmp_path, "allocator_cache", plant)
    has_price(finding, TWO_PERCENT)
    assert (finding.evidence.ranks, finding.evidence.phases) == ([2], ["actor.update"])


def test_kv_cache_too_large(tmp_path: Path) -> None:
    """Of a KV cache that is never a quarter full, what is left beside twice of its use is spare."""

    def used(folder: Path, share: float) -> Written:
        written = colocated(folder)
        steps = [span("engine.step", 10 * n + 2, 10 * n + 3, running=8, kv_usage=share) for n in range(STEPS)]
        device = {"host": "here", "uuid": "GPU-5"}
        return written.process("e", *steps, role="engine", rank=5, device=device, pid=4, ended_s=10.0 * STEPS)

    assert not found(used(tmp_path / "well", 0.3), "kv_cache")
    (finding,) = found(used(tmp_path / "faulty", 0.1), "kv_cache")
    assert finding.bytes == pytest.approx(KV_CACHE * 0.8, rel=CLOSE)
    assert finding.evidence.phases == ["rollout.generate"] and finding.seconds_per_step is None
