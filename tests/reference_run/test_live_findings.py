"""Faults that are planted into the running example are found, each with its place and its price."""

from __future__ import annotations

import pytest
from live_plants import FAULTS, PlantedRun, run_with
from reference_runs import QUICK

pytestmark = pytest.mark.run

CLOSE = 0.2

PLANTED = {
    "slow_rank": 0.5,
    "garbage_collection": 0.3,
    "sender_waits": 0.3,
    "sync_in_no_stage": 0.3,
    "driver_phases": 0.3,
    "between_phases": 0.3,
}
"""Seconds a step. None of them is about the same seconds as another."""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> PlantedRun:
    return run_with(tmp_path_factory.mktemp("planted"), PLANTED, steps=9, **QUICK)


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_live(planted: PlantedRun, fault: str) -> None:
    """Its finding names the rank and the phase, and its price is what the fault really took, within a fifth."""
    finding = planted.of(fault)
    assert finding is not None, [one.title for one in planted.why.findings]
    assert finding.seconds_per_step == pytest.approx(planted.taken_seconds[fault], rel=CLOSE)


def test_the_critical_path_goes_through_the_slow_rank(planted: PlantedRun) -> None:
    """Both ranks take as long, because one waits for the other in the collectives; the path names the slow one."""
    finding = planted.of("slow_rank")
    assert finding is not None and "rank 1 is slow in actor.update" in finding.title
    path = planted.why.critical_path
    assert path is not None
    (part,) = [one for one in path.parts if one.phase == FAULTS["slow_rank"].phase]
    assert next(iter(part.lanes)) == "rank 1"
    (bound,) = [one for one in path.what_ifs if one.what.startswith("rank 1 ")]
    assert bound.bound_seconds == pytest.approx(planted.taken_seconds["slow_rank"], rel=2 * CLOSE)
