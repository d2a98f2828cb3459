"""Runs the reference run with faults planted from outside, and compares what `why` says with what they really took."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from reference_runs import record

from rltrace.analysis.findings import Why, why
from rltrace.analysis.findings.finding import Finding
from rltrace.analysis.summary import analyse

PROGRAM = Path(__file__).parent / "programs" / "planted"


class Expected(NamedTuple):
    """The finding that a fault has to become."""

    id: str
    rank: int | None = None
    """The rank that it has to name; None if it concerns all."""
    phase: str | None = None


FAULTS = {
    "slow_rank": Expected("slow_rank", 1, "actor.update"),
    "slow_engine": Expected("slow_rank", 1, "rollout.generate"),
    "garbage_collection": Expected("garbage_collection"),
    "sender_waits": Expected("sender_waits", None, "weight_sync"),
    "sync_in_no_stage": Expected("sync_in_no_stage", None, "weight_sync"),
    "driver_phases": Expected("driver_phases", None, "reward"),
    "between_phases": Expected("between_phases"),
    "slow_steps": Expected("slow_steps"),
}
"""By the names of `programs/planted/sitecustomize.py`."""


class PlantedRun(NamedTuple):
    """A run with faults, as it was judged."""

    why: Why
    taken_seconds: Mapping[str, float]
    """By fault: what it really took each time, the mean."""

    def of(self, fault: str) -> Finding | None:
        """Return the finding that a fault became, if it names what it has to."""
        expected = FAULTS[fault]
        for one in self.why.findings:
            is_rank = expected.rank is None or one.evidence.ranks == [expected.rank]
            if one.id == expected.id and is_rank and (expected.phase is None or expected.phase in one.evidence.phases):
                return one
        return None


def run_with(folder: Path, faults: Mapping[str, float], **changes: Any) -> PlantedRun:
    """Record a run in which each fault takes so many seconds a step."""
    lines = folder / "planted"
    lines.mkdir(parents=True)
    environment = {
        "PYTHONPATH": str(PROGRAM), "PLANTED_FAULTS": json.dumps(dict(faults)), "PLANTED_FOLDER": str(lines)
    }  # fmt: skip
    judged = why(analyse(record(folder, environment, **changes)))
    return PlantedRun(judged, _taken(lines))


def _taken(folder: Path) -> dict[str, float]:
    taken: dict[str, list[float]] = defaultdict(list)
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            said = json.loads(line)
            taken[said["fault"]].append(said["seconds"])
    return {fault: fmean(seconds) for fault, seconds in taken.items()}
