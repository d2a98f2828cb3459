"""The default configuration learns its task.

With its own seed on two ranks it learns in tests/run/test_laptop_run.py, traced. Without the weight sync it does not:
tests/hostile.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import reference_runs as runs

pytestmark = pytest.mark.run


def test_one_rank_learns(tmp_path: Path) -> None:
    """One rank that sleeps at level 1 learns from its first steps on; tests/hostile has all 24."""
    records = runs.finish(tmp_path, ranks=1, seed=1, steps=7, rollout={"sleep_level": 1})
    rewards = runs.rewards(records)
    assert [record["step"] for record in records] == list(range(7))
    assert runs.mean(rewards[:2]) <= 0.08
    assert rewards[-1] >= 0.2
    # bf16 noise between two implementations; a policy of another step differs by much more.
    assert max(record["logprob_abs_diff_mean"] for record in records) < 0.02
    assert all(record["tokens"] > 0 and record["tokens_per_second"] > 0 for record in records)
