"""Verdicts on sleeps and wake-ups from literals: what the ledger expected, the engine said and the kernel counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recordings import Written, sample, span

from rltrace.analysis import summarize
from rltrace.analysis.transactions import Transaction

MIB = 1 << 20
WEIGHTS, KV_CACHE = "weights", "kv_cache"
Mib = dict[str, float]


def looked(
    at_s: float, held: Mib, total_mib: float, *, of_gpu: bool = False, trainers_cpu_s: float = 0
) -> list[list[list[Any]]]:
    """An edge that was over at a time, with what the engine's tags held and what the driver or the kernel counted."""
    total = round(total_mib * MIB)
    totals = {"used": total, "driver.reserved": 0} if of_gpu else {"1": total, "2": 0}
    return [
        *(sample(f"rollout.{tag}_bytes", at_s, round(size * MIB)) for tag, size in held.items()),
        span("memory.edge", at_s - 0.01, at_s, totals=totals, cpu_ns={"1": 0, "2": round(trainers_cpu_s * 1e9)}),
    ]


def said(name: str, start_s: float, end_s: float | None, **mib: float) -> list[list[Any]]:
    """What the engine says that it moved."""
    return span(name, start_s, end_s, tags={tag: round(size * MIB) for tag, size in mib.items()})


def read(folder: Path, *records: list[list[Any]]) -> list[Transaction]:
    written = Written(folder)
    written.process("e", *records, role="engine", rank=0, device={"host": "h", "uuid": "cpu-0"}, pid=1, ended_s=99)
    return summarize(written.read()).sleeps


def sleep(
    folder: Path, before: Mib, moved: Mib, after: Mib, *, level: int = 2, fell_mib: float, of_gpu: bool = False
) -> Transaction:
    """One sleep of a second, in half of which the engine moved; the kernel's total fell by so much from 1000 MiB."""
    records = [
        *looked(1, before, 1000, of_gpu=of_gpu),
        span("rollout.sleep", 1, 2, level=level),
        said("cumem.unmap", 1.2, 1.7, **moved),
        *looked(2, after, 1000 - fell_mib, of_gpu=of_gpu),
    ]
    (found,) = read(folder, *records)
    return found


ALL, NOTHING = {WEIGHTS: 100, KV_CACHE: 200}, {WEIGHTS: 0, KV_CACHE: 0}


def test_moments_around_a_sleep(tmp_path: Path) -> None:
    """A sleep is given the moments just before and just after it."""
    found = sleep(tmp_path / "run", ALL, ALL, NOTHING, fell_mib=300)
    assert (found.verdict, found.reason, found.level, found.seconds) == ("ok", "", 2, 1.0)
    assert found.expected_bytes == found.moved_bytes == {WEIGHTS: 100 * MIB, KV_CACHE: 200 * MIB}
    assert (found.changed_bytes, found.left_bytes) == (300 * MIB, {})
    assert found.gigabytes_per_second == pytest.approx(300 * MIB / 1e9 / 0.5)


@pytest.mark.parametrize(
    ("fell_mib", "verdict"),
    [
        (300, "ok"),
        (268, "ok"),  # what others load meanwhile
        (267, "freed less than it said"),
        (160, "freed less than it said"),
        (149, "freed nothing"),
        (0, "freed nothing"),
    ],
)
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("of_gpu", [False, True])
def test_device_that_did_not_fall(tmp_path: Path, fell_mib: float, verdict: str, level: int, of_gpu: bool) -> None:
    """A sleep by which the device did not fall is named at every level, whatever the engine says."""
    found = sleep(tmp_path / "run", ALL, ALL, NOTHING, level=level, fell_mib=fell_mib, of_gpu=of_gpu)
    assert (found.verdict, found.changed_bytes) == (verdict, fell_mib * MIB)
    if verdict != "ok":
        assert found.reason == f"300.0 MiB were unmapped, but the device's total fell by only {fell_mib:.1f} MiB"


def test_weights_on_gpu_are_no_copy(tmp_path: Path) -> None:
    """Weights that stayed on a GPU are no copy on the host."""
    stayed = {WEIGHTS: 100, KV_CACHE: 0}
    found = sleep(tmp_path / "run", ALL, ALL, stayed, level=1, fell_mib=200, of_gpu=True)
    assert (found.verdict, found.reason) == ("left bytes behind", "rollout.weights 100.0 MiB")


@pytest.mark.parametrize(("fell_mib", "verdict"), [(160, "ok"), (149, "freed nothing")])
def test_old_samples_need_half_a_sleep(tmp_path: Path, fell_mib: float, verdict: str) -> None:
    """If processes have run since their samples, only half of a sleep counts as a shortfall.

    A trainer whose last word is a second old may have given back, or taken, what it did not say.
    """
    edges = [*looked(1, ALL, 1000), *looked(2, NOTHING, 1000 - fell_mib, trainers_cpu_s=1)]
    written = Written(tmp_path / "run")
    device = {"host": "h", "uuid": "cpu-0"}
    moves = [span("rollout.sleep", 1, 2, level=2), said("cumem.unmap", 1.2, 1.7, **ALL)]
    written.process("e", *edges, *moves, role="engine", rank=0, device=device, pid=1, ended_s=99)
    trainer = [sample("actor.params_bytes", 0.15, 5 * MIB), *looked(0.2, {}, 5)]
    written.process("t", *trainer, role="worker", rank=0, device=device, pid=2, ended_s=99)
    (found,) = summarize(written.read()).sleeps
    assert found.verdict == verdict


def test_unlooked_sleep_is_not_blamed(
    tmp_path: Path,
) -> None:
    """A sleep after which nobody looked at the device is not said to have left it as it was."""
    (found,) = read(
        tmp_path / "run",
        *looked(1, ALL, 1000),
        span("rollout.sleep", 1, 2, level=2),
        said("cumem.unmap", 1.2, 1.7, **ALL),
        *(sample(f"rollout.{tag}_bytes", 1.8, 0) for tag in ALL),
    )
    assert found.changed_bytes is None


@pytest.mark.parametrize(
    ("level", "after", "fell_mib", "verdict"),
    [
        (2, {WEIGHTS: 0, KV_CACHE: 2}, 398, "left bytes behind"),
        (2, {WEIGHTS: 0, KV_CACHE: 0.5}, 399.5, "ok"),
        (2, {WEIGHTS: 300, KV_CACHE: 0}, 100, "freed nothing"),
        (1, {WEIGHTS: 300, KV_CACHE: 0}, 100, "ok"),  # the copy lies in the same memory
        (1, {WEIGHTS: 300, KV_CACHE: 0}, 60, "freed less than it said"),
        (1, {WEIGHTS: 300, KV_CACHE: 0}, 0, "freed nothing"),
        (1, {WEIGHTS: 600, KV_CACHE: 0}, -200, "freed nothing"),  # beside the copy the weights themselves
        (1, {WEIGHTS: 300, KV_CACHE: 100}, 0, "left bytes behind"),
        (0, {WEIGHTS: 300, KV_CACHE: 100}, 0, "ok"),  # it keeps everything
    ],
)
def test_what_stays_depends_on_level(tmp_path: Path, level: int, after: Mib, fell_mib: float, verdict: str) -> None:
    """What may stay depends on the level."""
    held = {WEIGHTS: 300, KV_CACHE: 100}
    assert sleep(tmp_path / "run", held, held, after, level=level, fell_mib=fell_mib).verdict == verdict


def test_small_rest_has_no_verdict(tmp_path: Path) -> None:
    """Less than a mebibyte is not worth a verdict."""
    little = {WEIGHTS: 0.5, KV_CACHE: 0}
    assert sleep(tmp_path / "run", little, little, little, fell_mib=0).verdict == "ok"


@pytest.mark.parametrize(
    ("left_mib", "reason"),
    [
        (0, "kv_cache slept already; the rest was freed"),
        (100, "kv_cache slept already, and the call did nothing: 100.0 MiB are still awake"),
    ],
)
def test_sleeping_tag_is_named(tmp_path: Path, left_mib: float, reason: str) -> None:
    """A tag that slept already is named with what stayed, even if the engine said that it went."""
    half = {WEIGHTS: 100, KV_CACHE: 0}
    first, wake, second = read(
        tmp_path / "run",
        *looked(1, ALL, 1000),
        span("rollout.sleep", 1, 2, level=2),
        said("cumem.unmap", 1.2, 1.7, **ALL),
        *looked(2, NOTHING, 700),
        span("rollout.wake_weights", 3, 4),
        said("cumem.map", 3.2, 3.7, weights=100),
        *looked(4, half, 800),
        span("rollout.sleep", 5, 6, level=2),
        said("cumem.unmap", 5.2, 5.7, weights=100),
        *looked(6, {WEIGHTS: left_mib, KV_CACHE: 0}, 700),
    )
    assert (first.verdict, wake.verdict, wake.expected_bytes) == ("ok", "ok", {WEIGHTS: 100 * MIB})
    assert (second.verdict, second.reason) == ("partly awake", reason)


@pytest.mark.parametrize(
    ("moved_mib", "rose_mib", "verdict"), [(100, 51, "ok"), (100, 49, "took less"), (0.5, 0, "ok"), (100, 300, "ok")]
)
def test_wake_up_took_less(tmp_path: Path, moved_mib: float, rose_mib: float, verdict: str) -> None:
    """A wake-up of which the kernel saw less than half took less."""
    (wake,) = read(
        tmp_path / "run",
        *looked(1, NOTHING, 700),
        span("rollout.wake_weights", 1, 2),
        said("cumem.map", 1.2, 1.7, weights=moved_mib),
        *looked(2, {WEIGHTS: moved_mib, KV_CACHE: 0}, 700 + rose_mib),
    )
    assert (wake.verdict, wake.changed_bytes) == (verdict, rose_mib * MIB)


@pytest.mark.parametrize(
    ("error", "told_s", "verdict"),
    [
        ("OutOfMemoryError", None, "no room"),
        ("MemoryError", None, "no room"),
        ("RuntimeError", 1.65, "no room"),  # CUDA's, of which the innermost hook said what it was
        ("OSError", 2.001, "no room"),
        ("RuntimeError", None, "failed: RuntimeError"),
        ("RuntimeError", 0.9, "failed: RuntimeError"),  # that was another one
        ("RuntimeError", 4, "failed: RuntimeError"),
        ("KeyError", None, "failed: KeyError"),
    ],
)
def test_failed_wake_up(tmp_path: Path, error: str, told_s: float | None, verdict: str) -> None:
    """A wake-up that failed moved nothing, and had no room only if the error is about memory."""
    wake = span("rollout.wake_kv_cache", 1, 2, error="RayTaskError")
    mapping = span("cumem.map", 1.2, 1.7, tags={KV_CACHE: 200 * MIB}, error=error)
    told = [] if told_s is None else [span("memory.out_of_memory", told_s, told_s + 0.01, reason="out of memory")]
    (found,) = read(tmp_path / "run", *looked(0.9, NOTHING, 700), wake, mapping, *told)
    assert (found.verdict, found.moved_bytes) == (verdict, {})
    assert found.reason == f"rollout.wake_kv_cache of kv_cache failed after 1.000 s: {error}"


def test_sleep_ended_by_an_error(tmp_path: Path) -> None:
    """A sleep that an error ended is named by the error."""
    failed = span("rollout.sleep", 1, 2, level=2, error="KeyError")
    (found,) = read(tmp_path / "run", *looked(1, ALL, 1000), failed, *looked(2, ALL, 1000))
    assert (found.verdict, found.reason) == (
        "failed: KeyError",
        "rollout.sleep of memory failed after 1.000 s: KeyError",
    )


def test_cut_wake_up_is_not_no_room(tmp_path: Path) -> None:
    """A wake-up that was cut short is not said to have had no room.

    Whoever killed the engine, the kernel or somebody else, did it in the middle.
    """
    wake, mapping = span("rollout.wake_kv_cache", 1, None), span("cumem.map", 1.2, None, tags={KV_CACHE: 200 * MIB})
    (found,) = read(tmp_path / "run", *looked(0.9, NOTHING, 700), wake, mapping)
    assert (found.verdict, found.moved_bytes) == ("never ended", {})
    assert found.reason.startswith("rollout.wake_kv_cache of kv_cache was still under way when the process ended")


def test_moves_of_one_tag_add_up(tmp_path: Path) -> None:
    """Moves of one tag add up, and one after a phase stands alone."""
    in_phase, alone = read(
        tmp_path / "run",
        span("rollout.wake_weights", 1, 2),
        said("cumem.map", 1.1, 1.3, weights=30),
        said("cumem.map", 1.4, 1.6, weights=40),
        said("cumem.map", 2, 2.5, kv_cache=200),
    )
    assert (in_phase.name, in_phase.moved_bytes) == ("rollout.wake_weights", {WEIGHTS: 70 * MIB})
    assert (alone.name, alone.moved_bytes) == ("cumem.map", {KV_CACHE: 200 * MIB})
