"""Long runs under a disk budget: a hundred million records with a hundred kills, and a day at ten times the speed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import budgeted_runs
import long_run

RECORDS = int(os.environ.get("RLTRACE_LONG_RECORDS", "100000000"))
KILLS = 100
HOURS = float(os.environ.get("RLTRACE_LONG_HOURS", "24"))


def test_many_records_and_many_kills(tmp_path: Path) -> None:
    """Processes that are killed at random moments never go over, leave no hole and lose nothing that they do not
    count."""
    spans, began = RECORDS // 2, time.monotonic()
    between = 2 * spans // KILLS
    run = budgeted_runs.record(tmp_path / "run", budget_bytes=256 << 20, workers=2, kills=KILLS, between=between)
    dropped = budgeted_runs.check(tmp_path / "run", run)
    print(
        f"{sum(run.spans.values()):,} spans in {time.monotonic() - began:.0f} s, {run.killed} kills, at most "
        f"{max(run.sizes):,} of {run.budget_bytes:,} bytes in {len(run.sizes)} looks, {dropped:,} spans dropped"
    )
    assert dropped > 0
    assert sum(run.spans.values()) > 0.8 * spans


def test_a_day(tmp_path: Path) -> None:
    """Memory, files and descriptors of the traced process stay as they are, and totals are exact."""
    long_run.check(long_run.simulate(tmp_path / "run", hours=HOURS, speed=10, budget_bytes=1 << 30))
