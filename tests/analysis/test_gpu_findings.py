"""Findings about GPUs and processors: each is found where its fault is planted, with its phase and its price."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from planted_runs import CLOSE, TWO_PERCENT, PlantedRun, has_price, look
from recordings import sample, span

from rltrace.analysis.findings import why
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


def test_offloaded_layers(tmp_path: Path) -> None:
    """Layers in host memory are priced by how much longer the pass takes than the same pass of the actor."""

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
    assert finding.evidence.phases == ["ref.log_prob"]
    assert finding.bytes == pytest.approx(8 * 4e9) and finding.evidence.figures["crossings"] == 8


def test_busy_processors(tmp_path: Path) -> None:
    """A host whose processors are all in use in most of the steps is named, and one that is idle at times is not."""

    def judged(folder: Path, percent: float) -> list[Finding]:
        written = PlantedRun(folder).write()
        samples = [sample("host.cpu_percent", at, percent) for at in range(1, 90)]
        written.process("sampler", *samples, role="sampler", pid=9, ended_s=90)
        return [one for one in why(analyse(written.read())).findings if one.id == "busy_processors"]

    assert not judged(tmp_path / "well", 80)
    (finding,) = judged(tmp_path / "faulty", 99)
    assert finding.evidence.figures["saturated_share"] == 1
    assert finding.seconds_per_step is None and finding.bound_seconds == pytest.approx(10, rel=CLOSE)
