"""The example with another seed on one rank, to its end, and on four, and without a sync; the suite has first steps."""

from __future__ import annotations

from pathlib import Path

import reference_runs as runs


def test_one_rank_learns_to_count_down(tmp_path: Path) -> None:
    """One rank, whose engine sleeps at level 1, learns to count down in 24 steps."""
    records = runs.finish(tmp_path, ranks=1, seed=1, rollout={"sleep_level": 1})
    rewards = runs.rewards(records)
    assert [record["step"] for record in records] == list(range(24))
    assert runs.mean(rewards[:5]) <= 0.15
    assert runs.mean(rewards[-5:]) >= 0.9
    # bf16 noise between two implementations; a policy of another step differs by much more.
    assert max(record["logprob_abs_diff_mean"] for record in records) < 0.02
    assert all(record["tokens"] > 0 and record["tokens_per_second"] > 0 for record in records)


def test_four_ranks_at_level_1(tmp_path: Path) -> None:
    """Four ranks work and sleep at level 1."""
    records = runs.finish(tmp_path, ranks=4, steps=2, rollout={"n": 4, "sleep_level": 1})
    assert len(records) == 2
    assert 0 < runs.mean(runs.rewards(records)) < 0.2
    assert max(record["logprob_abs_diff_mean"] for record in records) < 0.02


def test_no_sync_no_learning(tmp_path: Path) -> None:
    """Without the sync the reward does not rise."""
    records = runs.finish(tmp_path, ranks=1, steps=7, rollout={"sync": False, "sleep_level": 0})
    rewards = runs.rewards(records)
    assert runs.mean(rewards[-2:]) <= runs.mean(rewards[:2]) + 0.02 <= 0.1
    # The actor moves away from what the engine goes on saying.
    assert records[0]["logprob_abs_diff_mean"] < 0.02 < records[-1]["logprob_abs_diff_mean"]
