"""What an edge takes of each process and how it is judged, from literals: each rule on both of its sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import Written, sample, span

from rltrace.analysis import summarize
from rltrace.analysis.looks import CONSISTENT_NS, GRANULE_BYTES
from rltrace.analysis.memory import DeviceMemory
from rltrace.analysis.moments import Boundary
from rltrace.analysis.unstamped import consistent

MIB = 1 << 20
CPU, GPU = {"host": "here", "uuid": "cpu-0"}, {"host": "here", "uuid": "GPU-1"}
WORKER, ENGINE = "1", "2"
PARAMS = sample("actor.params_bytes", 0.5, 10 * MIB)


def sampled(at_s: float, cpu_ms: dict[str, float], **args: Any) -> list[list[Any]]:
    """A process's sample that was over at a time, with the processor time that processes had used by then."""
    return span(
        "memory.edge", at_s - 0.001, at_s, cpu_ns={pid: round(used * 1e6) for pid, used in cpu_ms.items()}, **args
    )


def before_a_sync(cpu_ms: dict[str, float], **args: Any) -> list[Any]:
    """A worker's parameters, and its sample at 2 s, where its sync begins."""
    return [PARAMS, sampled(2, cpu_ms, **args), span("weight_sync", 2.0005, 3)]


def totals_mib(**mib: float) -> dict[str, int]:
    return {pid.removeprefix("of_"): round(size * MIB) for pid, size in mib.items()}


def read(
    folder: Path, worker: list[Any], engine: list[Any], device: dict[str, str] = CPU, engine_ended_s: float = 9
) -> DeviceMemory:
    """The only device of a worker and an engine, which end at 9 s."""
    written = Written(folder)
    written.process("w", *worker, role="worker", rank=0, device=device, pid=int(WORKER), ended_s=9)
    written.process("e", *engine, role="engine", rank=0, device=device, pid=int(ENGINE), ended_s=engine_ended_s)
    (found,) = summarize(written.read()).memory
    return found


def begins(found: DeviceMemory) -> list[Boundary]:
    return [edge for edge in found.boundaries if edge.side == "begin"]


# ---------------------------------------------------------------- judgement


@pytest.mark.parametrize(
    ("device", "used_mib", "unaccounted_mib", "unattributed_mib", "is_over"),
    [
        (CPU, 100, 24, 0, False),
        (CPU, 100, 25, 0, True),
        (CPU, 100, -25, 0, True),
        (CPU, 100, 12, 13, True),
        (CPU, 10_000, 99, 0, False),
        (CPU, 10_000, 102, 0, True),
        (GPU, 1_000, 255, 0, False),
        (GPU, 1_000, 257, 0, True),
        (GPU, 50_000, 499, 0, False),
        (GPU, 50_000, 502, 0, True),
    ],
)
def test_limit_is_one_percent_or_a_floor(
    tmp_path: Path,
    device: dict[str, str],
    used_mib: int,
    unaccounted_mib: int,
    unattributed_mib: int,
    is_over: bool,
) -> None:
    """Unaccounted bytes may be one percent or a floor, whatever their sign."""
    total = {"totals": totals_mib(of_1=used_mib)}
    if device is GPU:
        total = {"totals": {"used": used_mib * MIB, "driver.reserved": 0}}
    rows = [
        sample("actor.params_bytes", 1, (used_mib - unaccounted_mib - unattributed_mib) * MIB),
        sample("unattributed_bytes", 1, unattributed_mib * MIB),
    ]
    worker = [*rows, sampled(2, {WORKER: 0}, **total), span("actor.update", 2.0005, 2.004)]
    found = read(tmp_path / "run", worker, [], device)
    assert found.residual is not None
    assert (found.residual.boundaries, found.residual.inconsistent_boundaries) == (2, 0)
    assert found.residual.boundaries_over_limit == (2 if is_over else 0)
    assert found.residual.worst_bytes == (abs(unaccounted_mib) + unattributed_mib) * MIB
    assert (found.residual.worst_bytes > found.residual.worst_limit_bytes) == is_over


def test_inconsistent_boundary_is_not_judged(tmp_path: Path) -> None:
    """A phase boundary that is not consistent is counted and not judged."""
    worker = [
        sample("actor.params_bytes", 1, 100 * MIB),
        sampled(2, {WORKER: 0, ENGINE: 0}, totals=totals_mib(of_1=101, of_2=50)),
        span("ref.log_prob", 2.0005, 2.004),
        sampled(5, {WORKER: 0, ENGINE: 900}, totals=totals_mib(of_1=300, of_2=50)),
        span("actor.update", 5.0005, 5.1),
    ]
    engine = [sample("rollout.weights_bytes", 1, 50 * MIB), sampled(1.9, {ENGINE: 0})]
    found = read(tmp_path / "run", worker, engine)
    assert found.residual is not None
    assert (found.residual.inconsistent_boundaries, found.residual.boundaries_over_limit) == (2, 0)
    assert (found.residual.worst_bytes, found.residual.worst_phase) == (1 * MIB, "ref.log_prob")


def test_unsampled_boundary_keeps_last(tmp_path: Path) -> None:
    """A phase boundary that nobody sampled is not consistent, and has what was there last.

    A server begins and ends a phase of an engine that says nothing until it sleeps, 2 s later.
    """
    total = {"used": 500 * MIB, "driver.reserved": 0}
    worker = [
        sample("rollout.kv_cache_bytes", 1, 500 * MIB),
        sampled(2, {WORKER: 0}, totals=total),
        span("rollout.generate", 2.004, 4),
        span("ref.log_prob", 6.003, 6.1),
        sample("rollout.kv_cache_bytes", 5.9, 0),
        sampled(6, {WORKER: 0}, totals=total | {"used": 0}),
    ]
    found = read(tmp_path / "run", worker, [], GPU)
    edges = {(edge.phase, edge.side): edge for edge in found.boundaries}
    held = {at: (edge.is_consistent, edge.bytes["rollout.kv_cache"] // MIB) for at, edge in edges.items()}
    assert held == {
        ("rollout.generate", "begin"): (True, 500),
        ("rollout.generate", "end"): (False, 500),
        ("ref.log_prob", "begin"): (True, 0),
        ("ref.log_prob", "end"): (False, 0),
    }
    assert found.residual is not None and found.residual.inconsistent_boundaries == 2
    most = {moment.phase: moment.used_bytes // MIB for moment in found.phases}
    assert most["rollout.generate"] == 500


def test_samples_cost_a_share(tmp_path: Path) -> None:
    """The cost of samples is a share of the finished steps.

    None of the start-up's, of a step's that is open, or of what lies between two.
    """
    steps = [span("step", 2, 4, step=0), span("step", 5, 7, step=1), span("step", 8, None, step=2)]
    edges = [sampled(at_s, {WORKER: 0}, totals=totals_mib(of_1=1)) for at_s in (1, 3, 4.5, 6, 6.5, 8.5)]
    found = read(tmp_path / "run", [*steps, *edges, sample("actor.params_bytes", 0.5, MIB)], [])
    assert found.residual is not None
    assert found.residual.sample_share == pytest.approx(3 * 0.001 / 4)


# ---------------------------------------------------------------- what an edge takes of a process


def test_late_sample_is_not_earlier(tmp_path: Path) -> None:
    """A sample that comes late is not taken for one from before memory moved.

    100 ms behind the edge the engine says that it sleeps; at the edge it may still have been awake.
    """
    worker = before_a_sync({WORKER: 0, ENGINE: 500}, totals=totals_mib(of_1=10, of_2=500))
    engine = [
        sample("rollout.weights_bytes", 0.9, 500 * MIB),
        sampled(1, {ENGINE: 0}),
        sample("rollout.weights_bytes", 2.05, 0),
        sampled(2.1, {ENGINE: 550}),
    ]
    edge = begins(read(tmp_path / "run", worker, engine))[0]
    assert edge.bytes["rollout.weights"] == 500 * MIB
    assert (edge.is_consistent, edge.apart_seconds) == (False, 0.5)


@pytest.mark.parametrize(
    ("at_s", "said_age_ms", "apart_ms"), [(1.999, 4.5, 4.5), (1.999, 5.5, 5.5), (2.001, 3.0, 4.0), (2.001, 4.5, 1000.0)]
)
def test_repeated_sample_is_as_old_as_it_says(tmp_path: Path, at_s: float, said_age_ms: float, apart_ms: float) -> None:
    """A repeated sample is as old as the process says.

    Also a word behind the edge; where that is too old, the last one before it is taken, which is a second old.
    """
    worker = before_a_sync({WORKER: 0, ENGINE: 1000}, totals=totals_mib(of_1=10, of_2=50))
    engine = [
        sample("rollout.weights_bytes", 0.9, 50 * MIB),
        sampled(1, {ENGINE: 0}),
        sampled(at_s, {ENGINE: 1000}, age_ns=round(said_age_ms * 1e6)),
    ]
    edge = begins(read(tmp_path / "run", worker, engine))[0]
    assert edge.apart_seconds == pytest.approx(apart_ms / 1e3)
    assert edge.is_consistent == (apart_ms * 1e6 <= CONSISTENT_NS)


def test_oldest_sample_sets_the_age(tmp_path: Path) -> None:
    """A phase boundary is as old as the oldest of its samples, whichever process comes last."""
    total = {ENGINE: 50 * MIB, WORKER: 10 * MIB}
    worker = before_a_sync({ENGINE: 800, WORKER: 0}, totals=total)
    engine = [sample("rollout.weights_bytes", 0.9, 50 * MIB), sampled(1, {ENGINE: 0})]
    assert begins(read(tmp_path / "run", worker, engine))[0].apart_seconds == 0.8


def test_silent_process_is_its_interpreter(tmp_path: Path) -> None:
    """Before its first sample a process is its interpreter."""
    worker = [
        PARAMS,
        sampled(2, {WORKER: 0, ENGINE: 0}, totals=totals_mib(of_1=10, of_2=70)),
        span("actor.build", 2.0005, 3),
    ]
    engine = [sample("rollout.weights_bytes", 2.002, 500 * MIB), sampled(2.003, {ENGINE: 1})]
    edge = begins(read(tmp_path / "run", worker, engine))[0]
    assert (edge.bytes["interpreter"], edge.bytes["rollout.weights"]) == (70 * MIB, 0)
    assert edge.is_consistent


@pytest.mark.parametrize(("held_mib", "is_consistent"), [(500, True), (499, False)])
def test_unchanged_count_keeps_a_sample(tmp_path: Path, held_mib: int, is_consistent: bool) -> None:
    """While the driver counts the same for a process, its last sample is not old.

    Though it has worked for a second since; what the card holds besides has changed, and so what is unexplained.
    """

    def card(used_mib: int, engine_mib: int) -> dict[str, Any]:
        held = {WORKER: 10 * MIB, ENGINE: engine_mib * MIB}
        return {"totals": {"used": used_mib * MIB, "driver.reserved": 0}, "held_bytes": held}

    worker = before_a_sync({WORKER: 0, ENGINE: 1000}, **card(600, held_mib))
    engine = [sample("rollout.weights_bytes", 0.9, 500 * MIB), sampled(1, {WORKER: 0, ENGINE: 0}, **card(510, 500))]
    edge = begins(read(tmp_path / "run", worker, engine, GPU))[0]
    assert edge.is_consistent is is_consistent
    assert edge.bytes["rollout.weights"] == 500 * MIB


@pytest.mark.parametrize(("ended_s", "weights_mib"), [(1.5, 0), (9, 500)])
def test_unnamed_processes_count_alive(tmp_path: Path, ended_s: float, weights_mib: int) -> None:
    """If the driver names no processes, those count that live."""
    card = {"totals": {"used": 600 * MIB, "driver.reserved": 0}}
    worker = before_a_sync({}, **card)
    engine = [sample("rollout.weights_bytes", 0.9, 500 * MIB), sampled(1, {ENGINE: 0})]
    edge = begins(read(tmp_path / "run", worker, engine, GPU, engine_ended_s=ended_s))[0]
    assert edge.bytes["rollout.weights"] == weights_mib * MIB


def test_new_process_counts_as_it_says(tmp_path: Path) -> None:
    """A process that came since the others were listed counts with what it says."""
    worker = before_a_sync({WORKER: 0}, totals={"used": 300 * MIB, "driver.reserved": 0})
    engine = [sample("rollout.weights_bytes", 1.99, 200 * MIB), sampled(1.999, {ENGINE: 0})]
    (edge,) = begins(read(tmp_path / "run", worker, engine, GPU))
    assert (edge.bytes["rollout.weights"], edge.is_consistent) == (200 * MIB, True)


def test_old_samples_hold_as_last_consistent() -> None:
    """Old samples hold if the unaccounted bytes are what they were at the last consistent moment.

    It may grow by a granule now and then; where it was more, nobody knows.
    """
    old_ns = 2 * CONSISTENT_NS
    unaccounted_bytes = GRANULE_BYTES * np.array([0.0, 0.9, 1.5, 2.4, 3.6, 0.5])
    found = consistent(np.array([0, old_ns, old_ns, old_ns, old_ns, old_ns]), unaccounted_bytes)
    assert found.tolist() == [True, True, True, True, False, True]


def test_old_samples_hold_as_any_consistent() -> None:
    """Old samples hold if the unaccounted bytes are those of any moment that is fully known.

    Of a process that waits, with another level between, and of one that has only said later what it holds.
    """
    old_ns, new_ns = 2 * CONSISTENT_NS, CONSISTENT_NS
    ages_ns = np.array([old_ns, new_ns, new_ns, old_ns, old_ns, new_ns, old_ns])
    levels = GRANULE_BYTES * np.array([40, 60, 50, 60.9, 55, 40, 61.1])
    assert consistent(ages_ns, levels).tolist() == [True, True, True, True, False, True, False]


def test_no_known_moment_no_consistency() -> None:
    """If no moment is fully known, none is consistent."""
    assert consistent(np.array([2.0, 3.0]) * CONSISTENT_NS, np.zeros(2)).tolist() == [False, False]


@pytest.mark.parametrize(("used_mib", "is_consistent", "kv_mib"), [(300, True, 200), (302, False, 100)])
def test_next_sample_holds_at_boundary(tmp_path: Path, used_mib: int, is_consistent: bool, kv_mib: int) -> None:
    """A process's next sample holds at a phase boundary if the card's total is then the same.

    A server ends a generation, in which the engine has grown; that one speaks 100 ms later, as it sleeps.
    """
    used = {"driver.reserved": 0}
    worker = [
        PARAMS,
        sampled(2, {ENGINE: 1000}, totals=used | {"used": 300 * MIB}),
        span("rollout.generate", 1, 1.9995),
    ]
    engine = [
        sample("rollout.kv_cache_bytes", 0.9, 100 * MIB),
        sampled(1, {ENGINE: 0}, totals=used | {"used": 210 * MIB}),
        sample("rollout.kv_cache_bytes", 2.09, 200 * MIB),
        sampled(2.1, {ENGINE: 1100}, totals=used | {"used": used_mib * MIB}),
    ]
    (edge,) = (edge for edge in read(tmp_path / "run", worker, engine, GPU).boundaries if edge.side == "end")
    assert (edge.is_consistent, edge.bytes["rollout.kv_cache"]) == (is_consistent, kv_mib * MIB)


def test_new_sample_beats_later_one(tmp_path: Path) -> None:
    """A new sample is not replaced by a later one with the same total.

    Gradients that are freed into the cache change nothing on the card; at the edge they were there.
    """
    card = {"totals": {"used": 300 * MIB, "driver.reserved": 0}}
    engine = [sampled(2, {WORKER: 1}, **card), span("rollout.generate", 1, 1.9995)]
    worker = [
        sample("actor.grads_bytes", 1.99, 200 * MIB),
        sampled(1.999, {WORKER: 0}),
        sample("actor.grads_bytes", 6.9, 0),
        sample("allocator.cached_bytes", 6.9, 200 * MIB),
        sampled(7, {WORKER: 5000}, **card),
    ]
    (edge,) = (edge for edge in read(tmp_path / "run", worker, engine, GPU).boundaries if edge.side == "end")
    assert (edge.bytes["actor.grads"], edge.bytes["allocator.cached"]) == (200 * MIB, 0)
    assert edge.apart_seconds == pytest.approx(0.001)


# ---------------------------------------------------------------- whose a moment is


@pytest.mark.parametrize(
    ("at_s", "phase"),
    [(3.999, "actor.update"), (4.004, "actor.update"), (4.006, None), (5.996, "ref.log_prob"), (6.0, "ref.log_prob")],
)
def test_sample_belongs_to_phase_around_it(tmp_path: Path, at_s: float, phase: str | None) -> None:
    """A sample belongs to the phase around it, else to the one that ends there, else to the next.

    A counter between two edges, of which the next is seconds away.
    """
    worker = [
        PARAMS,
        span("actor.update", 3, 4),
        span("ref.log_prob", 6, 7),
        span("advantage", 6.001, 7),
        sample("nccl_bytes", at_s, MIB),
        sample("nccl_bytes", at_s + 0.0001, 0),
        sampled(8.5, {WORKER: 0}, totals=totals_mib(of_1=1)),
    ]
    assert read(tmp_path / "run", worker, []).owner_peaks["nccl"].phase == phase


@pytest.mark.parametrize(("ends_s", "step"), [(3.999, 0), (4.001, 0)])
def test_boundaries_share_the_phases_step(tmp_path: Path, ends_s: float, step: int) -> None:
    """Both boundaries of a phase are in the step in which it began."""
    worker = [
        PARAMS,
        span("step", 2, 4, step=0),
        span("step", 4, 6, step=1),
        span("actor.update", 3, ends_s),
        sampled(3, {WORKER: 0}, totals=totals_mib(of_1=1)),
        sampled(4.1, {WORKER: 0}, totals=totals_mib(of_1=1)),
    ]
    assert [edge.step for edge in read(tmp_path / "run", worker, []).boundaries] == [step, step]


def test_moment_between_two_steps(
    tmp_path: Path,
) -> None:
    """A moment at which one step ends and the next begins is in the next, and in none after the last."""
    steps = [span("step", 2, 4, step=0), span("step", 4, 6, step=1)]
    for at_s, step in ((4.0, 1), (6.0, None)):
        found = read(tmp_path / str(step), [PARAMS, *steps, sample("nccl_bytes", at_s, 90 * MIB)], [])
        assert (found.peak_at_seconds, found.peak_step) == (at_s, step)


def test_other_devices_sampling_says_nothing(tmp_path: Path) -> None:
    """The sampling of another device says nothing about this one's phases.

    A sample 20 ms behind a phase, while rank 1 takes 100 ms for an edge that began when that phase ended.
    """
    written = Written(tmp_path / "run")
    own = [PARAMS, span("actor.update", 1, 2), sample("nccl_bytes", 2.02, MIB), sample("nccl_bytes", 2.021, 0)]
    total = {"totals": totals_mib(of_1=1), "cpu_ns": {}}
    others = [PARAMS, span("memory.edge", 2.001, 2.1, totals={"3": MIB}, cpu_ns={"3": 0})]
    written.process("w0", *own, span("memory.edge", 8, 8.001, **total), role="worker", rank=0, device=CPU, pid=1)
    other = {"host": "here", "uuid": "cpu-1"}
    written.process("w1", *others, role="worker", rank=1, device=other, pid=3)
    first, _ = summarize(written.read()).memory
    assert first.owner_peaks["nccl"].phase is None


# ---------------------------------------------------------------- out of memory


def test_changes_that_free_enough(tmp_path: Path) -> None:
    """Changes that would have made enough room are named, the largest first.

    50 MiB asked for, 20 free: 30 are missing. Of the ledger the last 30 seconds are kept.
    """
    rows = {"actor.optimizer": 40, "actor.params": 80, "actor.grads": 29, "rollout.kv_cache": 30, "ref.params": 0}
    samples = [sample(f"{owner}_bytes", 40, size * MIB) for owner, size in rows.items()]
    failure = span("memory.out_of_memory", 50, 50.1, asked_bytes=50 * MIB, free_bytes=20 * MIB, owners=["actor.grads"])
    early = [sample("actor.params_bytes", at_s, MIB) for at_s in (1, 20, 20.2)]
    written = Written(tmp_path / "run")
    written.process("w", *early, *samples, failure, role="worker", rank=0, device=CPU, pid=1, ended_s=60)
    (found,) = summarize(written.read()).out_of_memory
    assert [change.rpartition("(")[2] for change in found.changes] == [
        "actor.grads asked for them)",
        f"actor.params holds {80 * MIB:,} bytes)",
        f"actor.optimizer holds {40 * MIB:,} bytes)",
        f"rollout.kv_cache holds {30 * MIB:,} bytes)",
    ]
    assert [moment.at_seconds for moment in found.before] == [20.2, 40]
