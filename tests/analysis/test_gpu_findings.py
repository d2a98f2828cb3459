"""Findings about GPUs and processors: each is found where its fault is planted, with its phase and its price."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from planted_runs import CLOSE, SECONDS, STEP_SECONDS, TWO_PERCENT, PlantedRun, has_price, look
from recordings import Written, sample, span

from rltrace.analysis.findings import why
from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding
from rltrace.analysis.summary import analyse

MICRO_BATCHES = 4


def gathers_in_update(run: PlantedRun, *, gather_seconds: float, many: int = MICRO_BATCHES, free_bytes: float) -> None:
    """Forwards of some micro-batches, each of which gathers for so long first, on cards with so much free."""

    def records(run: PlantedRun, rank: int, step: int, begin: float, end: float) -> list[Any]:
        length = (end - begin) / many
        found: list[Any] = []
        for at in (begin + place * length for place in range(many)):
            found.append(span("gpu.fsdp.all_gather", at, at + gather_seconds / many))
            found.append(span("gpu.fsdp.forward", at, at + length * 0.9, module=""))
        for at in (begin, end):
            found += look(at, actor__activations=79.9e9 - free_bytes)
        return found

    run.more["actor.update"] = records


def test_small_micro_batches(tmp_path: Path) -> None:
    """Half of the gathers of small micro-batches are priced where half of the card is free, and not on a full one."""
    well, faulty, one = (PlantedRun(tmp_path / name) for name in ("well", "faulty", "one"))
    gathers_in_update(well, gather_seconds=2 * TWO_PERCENT, free_bytes=20e9)
    gathers_in_update(faulty, gather_seconds=2 * TWO_PERCENT, free_bytes=50e9)
    gathers_in_update(one, gather_seconds=2 * TWO_PERCENT, free_bytes=50e9, many=1)
    assert not well.found("small_micro_batches") and not one.found("small_micro_batches")
    (finding,) = faulty.found("small_micro_batches")
    has_price(finding, TWO_PERCENT)
    assert finding.evidence.phases == ["actor.update"] and finding.evidence.figures["micro_batches"] == MICRO_BATCHES
    assert finding.bound_seconds == pytest.approx(2 * TWO_PERCENT * (1 - 1 / MICRO_BATCHES), rel=CLOSE)


def test_exposed_collectives(tmp_path: Path) -> None:
    """Gathers beside which the GPU computes no layer are priced; those beside a layer are not."""

    def gathers(exposed: float) -> Any:
        def records(run: PlantedRun, rank: int, step: int, begin: float, end: float) -> list[Any]:
            waits = exposed + 0.05 * rank  # who waits longer waits for a rank
            return [
                span("gpu.fsdp.all_gather", begin, begin + 0.6),
                span("gpu.fsdp.forward", begin, end, module=""),
                span("gpu.fsdp.forward", begin, begin + 0.6 - waits, module="layers.0"),
                span("gpu.fsdp.forward", begin + 0.6, end, module="layers.1"),
            ]

        return records

    def judged(folder: Path, exposed: float) -> list[Finding]:
        run = PlantedRun(folder)
        run.more["ref.log_prob"] = gathers(exposed)
        return run.found("exposed_collectives")

    assert not judged(tmp_path / "well", 0.0)
    (finding,) = judged(tmp_path / "faulty", TWO_PERCENT)
    assert finding.seconds_per_step == pytest.approx(TWO_PERCENT, rel=CLOSE)
    assert (finding.evidence.ranks, finding.evidence.phases) == ([0], ["ref.log_prob"])


def launched(
    run: PlantedRun,
    launch_share: float,
    busy_percent: float,
    *,
    first_share: float | None = None,
    free_bytes: float | None = None,
) -> Written:
    """Forwards of the update that take a share of their GPU time to launch, on GPUs that are so busy in it.

    The first one takes another share if one is given. Nobody samples GPUs that are not busy at all, and nobody looks at
    their memory if it is not said what is free.
    """

    def records(run: PlantedRun, rank: int, step: int, begin: float, end: float) -> list[Any]:
        length = (end - begin) / MICRO_BATCHES
        found: list[Any] = []
        launched_at = begin
        for at in (begin + place * length for place in range(MICRO_BATCHES)):
            host_begin = launched_at + 0.002 if launch_share < 1 else at
            share = first_share if first_share is not None and at == begin else launch_share
            launched_at = host_begin + share * length * 0.9
            found += [
                span("fsdp.forward", host_begin, launched_at),
                span("fsdp.forward", host_begin, host_begin + 0.01),
            ]
            found.append(span("gpu.fsdp.forward", at + 0.001, at + length * 0.9 + 0.001, module=""))
        if free_bytes is not None:
            found += [one for at in (begin, end) for one in look(at, actor__activations=79.9e9 - free_bytes)]
        busy.extend(sample(f"gpu.utilisation_percent/GPU-{rank}", begin + at, busy_percent) for at in (0.5, 1.5, 2.5))
        return found

    busy: list[Any] = []
    run.more["actor.update"] = records
    written = run.write()
    return written.process("sampler", *busy, role="sampler", pid=9, ended_s=90) if busy_percent else written


def found(written: Written, name: str) -> list[Finding]:
    """The findings of one id."""
    judged = why(analyse(written.read()))
    assert name not in [one.id for one in judged.unjudged], judged.unjudged
    return [one for one in judged.findings if one.id == name]


def test_launch_bound(tmp_path: Path) -> None:
    """Where a forward takes as long to launch as to run, the time in which no kernel runs is priced."""
    assert not found(launched(PlantedRun(tmp_path / "well"), 0.3, 94), "launch_bound")
    (finding,) = found(launched(PlantedRun(tmp_path / "faulty"), 1.0, 94), "launch_bound")
    has_price(finding, 0.06 * 3.3)  # 2 % of a step
    assert finding.evidence.phases == ["actor.update"]
    assert "0.74 s to launch and 0.74 s to run" in finding.evidence.facts[0]


def test_launch_bound_without_a_sampler(tmp_path: Path) -> None:
    """Without samples of the GPUs' utilisation the finding has a bound and no price."""
    (finding,) = found(launched(PlantedRun(tmp_path / "run"), 1.0, 0), "launch_bound")
    all_but_one = 3.3 * (1 - 1 / MICRO_BATCHES)
    assert finding.seconds_per_step is None and finding.bound_seconds == pytest.approx(all_but_one, rel=CLOSE)


def test_a_full_queue_is_not_launch_bound(tmp_path: Path) -> None:
    """A host that a full queue holds up launches as slowly as its GPU runs, and could be faster."""
    cases = {"busy": launched(PlantedRun(tmp_path / "busy"), 1.0, 100, free_bytes=50e9)}
    cases["first"] = launched(PlantedRun(tmp_path / "first"), 1.0, 0, first_share=0.6, free_bytes=50e9)
    for written in cases.values():
        assert not found(written, "launch_bound")
        assert "small_micro_batches" in [one.id for one in why(analyse(written.read())).unjudged], "without gathers"


def test_small_micro_batches_that_take_as_long_to_launch(tmp_path: Path) -> None:
    """Where launches bound a phase, half of it is priced: half as many micro-batches are launched in half of the time.

    Launches that the GPU waits for leave it idle, so that more than its idle time may be gained.
    """
    well = why(analyse(launched(PlantedRun(tmp_path / "well"), 0.3, 94, free_bytes=50e9).read()))
    assert "small_micro_batches" in [one.id for one in well.unjudged], "without gathers"
    full = launched(PlantedRun(tmp_path / "full"), 1.0, 94, free_bytes=20e9)
    assert not found(full, "small_micro_batches")
    faulty = launched(PlantedRun(tmp_path / "faulty"), 1.0, 94, free_bytes=50e9)
    (finding,) = found(faulty, "small_micro_batches")
    has_price(finding, 3.3 / 2)
    assert finding.evidence.phases == ["actor.update"]
    assert finding.bound_seconds == pytest.approx(3.3 * (1 - 1 / MICRO_BATCHES), rel=CLOSE)
    assert finding.evidence.facts[0].startswith(
        "a forward takes 0.74 s to launch and 0.74 s to run, so the phase lasts"
    )
    assert finding.seconds_per_step is not None, "and the evidence says how this is made"
    assert f"need half of the launches, {as_text(finding.seconds_per_step)} less" in finding.evidence.facts[1]


@pytest.mark.parametrize(("counter", "cause"), [("power_limited", "power limit"), ("heat_limited", "Heat")])
def test_slow_clocks(tmp_path: Path, counter: str, cause: str) -> None:
    """The clock that a GPU lacks while something holds it back is priced, with the rank and the phase."""

    def clocked(folder: Path, megahertz: float) -> Written:
        """Rank 2's clock in the update; it is 1,980 MHz elsewhere."""
        run, samples = PlantedRun(folder), list[Any]()

        def records(run: PlantedRun, rank: int, step: int, begin: float, end: float) -> list[Any]:
            for at in (begin + 0.05 + 0.25 * n for n in range(12)):
                samples.append(sample(f"gpu.sm_clock_megahertz/GPU-{rank}", at, megahertz if rank == 2 else 1980))
                for name in ("power_limited", "heat_limited"):
                    is_held = name == counter and rank == 2 and megahertz < 1980
                    samples.append(sample(f"gpu.{name}/GPU-{rank}", at, is_held))
            return []

        run.more["actor.update"] = records
        written = run.write()
        return written.process("sampler", *samples, role="sampler", pid=9, ended_s=90)

    assert not found(clocked(tmp_path / "well", 1980), "slow_clocks")
    (finding,) = found(clocked(tmp_path / "faulty", 1485), "slow_clocks")
    has_price(finding, 2.5)  # a quarter of the clock, in all samples
    assert (finding.evidence.ranks, finding.evidence.phases) == ([2], ["actor.update"])
    assert cause in finding.title and "1,485 of 1,980 MHz" in finding.title


def test_uneven_batches(tmp_path: Path) -> None:
    """A rank with more tokens than the others is told by what even ones would save, and is no slow rank."""

    def batches(run: PlantedRun, tokens: list[int]) -> PlantedRun:
        def records(run: PlantedRun, rank: int, step: int, begin: float, end: float) -> list[Any]:
            length = (end - begin) / MICRO_BATCHES
            starts = [begin + length * n for n in range(MICRO_BATCHES)]
            return [span("model.forward", at, at + length / 3, rows=1, columns=tokens[rank]) for at in starts]

        run.more["actor.update"] = records
        return run

    even, uneven = (PlantedRun(tmp_path / name) for name in ("even", "uneven"))
    for run in (even, uneven):
        for rank in range(run.ranks):
            run.longer["actor.update", rank] = lambda step, rank=rank: 0.3 if rank == 1 else 0.0
    (slow,) = [one for one in batches(even, [1000, 1030, 1000, 1000]).judge().findings if one.seconds_per_step]
    assert (slow.id, slow.evidence.ranks) == ("slow_rank", [1])
    (finding,) = [one for one in batches(uneven, [1000, 1100, 1000, 1000]).judge().findings if one.seconds_per_step]
    assert finding.id == "uneven_batches"
    has_price(finding, 3.6 * (1 - 1025 / 1100))
    assert (finding.evidence.ranks, finding.evidence.phases) == ([1], ["actor.update"])


def test_offloaded_layers(tmp_path: Path) -> None:
    """Layers in host memory are priced by how much longer the pass takes than the actor's; all of it is the bound."""

    def offloaded(run: PlantedRun, size_bytes: float) -> None:
        def records(run: PlantedRun, rank: int, step: int, begin: float, end: float) -> list[Any]:
            passes = [span("gpu.fsdp.forward", begin + n / 10, begin + n / 10 + 0.05, module="") for n in range(8)]
            return [*passes, sample("ref.params_host_bytes", begin - 0.001, size_bytes)]

        run.more["ref.log_prob"] = records

    well, faulty = PlantedRun(tmp_path / "well"), PlantedRun(tmp_path / "faulty")
    offloaded(well, 0)
    offloaded(faulty, 4e9)
    for rank in range(faulty.ranks):
        faulty.longer["ref.log_prob", rank] = lambda step: 0.5
    assert not well.found("offloaded_layers")
    (finding,) = faulty.found("offloaded_layers")
    has_price(finding, 0.5)
    assert finding.bound_seconds == pytest.approx(SECONDS["ref.log_prob"] + 0.5, rel=0.05)
    assert finding.evidence.phases == ["ref.log_prob"]
    assert finding.bytes == pytest.approx(8 * 4e9) and finding.evidence.figures["crossings"] == 8


def test_busy_processors(tmp_path: Path) -> None:
    """A host whose processors are all in use in most of the steps is named, and one that is idle at times is not."""

    def busy(folder: Path, percent: float) -> Written:
        samples = [sample("host.cpu_percent", at, percent) for at in range(1, 90)]
        return PlantedRun(folder).write().process("sampler", *samples, role="sampler", pid=9, ended_s=90)

    assert not found(busy(tmp_path / "well", 80), "busy_processors")
    (finding,) = found(busy(tmp_path / "faulty", 99), "busy_processors")
    assert finding.evidence.figures["saturated_share"] == 1
    assert finding.seconds_per_step is None and finding.bound_seconds == pytest.approx(10, rel=CLOSE)


def waiting(run: PlantedRun, waits_seconds: float, *more: list[list[Any]], rank: int = 1, **who: Any) -> Written:
    """A host on which the worker of a rank waits so long for a processor in each step; with more samples."""
    name = f"process.waited_for_processor_seconds/w{rank}"
    samples = [sample(name, at, waits_seconds * at / STEP_SECONDS) for at in range(100)]
    samples += [sample("host.cpu_percent", at, 99) for at in range(100)]
    return run.write().process("sampler", *samples, *more, role="sampler", pid=9, ended_s=100, **who)


def test_waits_for_a_processor(tmp_path: Path) -> None:
    """What a rank's main threads wait in a queue is priced, with the rank; a wait below what is told is not."""
    assert not found(waiting(PlantedRun(tmp_path / "well"), 0.01), "busy_processors")
    (finding,) = found(waiting(PlantedRun(tmp_path / "faulty"), TWO_PERCENT), "busy_processors")
    has_price(finding, TWO_PERCENT)
    assert finding.evidence.ranks == [1] and finding.confidence == "high"


def test_other_programs_are_named(tmp_path: Path) -> None:
    """Where other programs take most of the processors, the first thing to change is to run fewer of those."""
    own = [sample(f"process.cpu_percent/w{rank}", at, 20) for rank in (0, 1) for at in range(100)]
    run = waiting(PlantedRun(tmp_path / "run"), TWO_PERCENT, *own, machine={"cpus": 2})
    (finding,) = found(run, "busy_processors")
    assert "99 % of them are in use in the mean, 20 % by processes of the run" in finding.evidence.facts[0]
    assert finding.settings[0].change == "programs beside the run take 79 % of its processors: run fewer of them there"


def test_usual_waits_explain_no_slow_step(tmp_path: Path) -> None:
    """What is waited for processors in every step alike makes none of them slow, though it is more than the loss."""
    run = PlantedRun(tmp_path / "run")
    run.gap_in["actor.update", 5] = 1.5
    (finding,) = found(waiting(run, 6.0), "slow_steps")
    assert finding.evidence.steps == [5] and finding.seconds_per_step == pytest.approx(1.5 / 8, rel=CLOSE)


def test_waits_explain_ranks_in_turns(tmp_path: Path) -> None:
    """A wait for processors explains ranks that are slow in turns, and neither one that always is nor a longer loss.

    1.5 s in a step of 10 s are half a second in the slow phase, which loses three quarters of one.
    """

    def judged(folder: Path, slow: int | None, waits_seconds: float) -> list[Finding]:
        """One rank is slow by a second in each step, the same or another one."""
        run = PlantedRun(folder)
        for rank in range(run.ranks):
            run.longer["actor.update", rank] = lambda step, rank=rank: float(
                rank == (step % 4 if slow is None else slow)
            )
        return [one for one in why(analyse(waiting(run, waits_seconds).read())).findings if one.seconds_per_step]

    (finding,) = judged(tmp_path / "turns", None, 4)
    assert finding.id == "busy_processors"
    assert "explained by it: In actor.update one rank is slow" in finding.evidence.facts[-1]
    assert [one.id for one in judged(tmp_path / "always", 2, 4)] == ["busy_processors", "slow_rank"]
    assert [one.id for one in judged(tmp_path / "longer", None, 1.5)] == ["busy_processors", "slow_rank"]
