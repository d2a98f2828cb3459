"""200 kills at random moments, some in the first 5 ms of a process: nothing is lost, and no figure is nonsense."""

from __future__ import annotations

from pathlib import Path

import killed_runs
from test_kill import kill_often

KILLS = 200


def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    """SIGKILL to a program of one process, and to one that forks processes of some milliseconds."""
    left = 0
    for kill, (mode, after_seconds) in enumerate(killed_runs.moments(KILLS, seed=1)):
        folder = tmp_path / str(kill)
        left += killed_runs.check(folder, *killed_runs.run_and_kill(folder, mode, after_seconds))
    assert left > 20 * KILLS, "the programs did too little to prove anything"


def test_kills_of_threads_and_tasks_lose_nothing(tmp_path: Path) -> None:
    """A program of threads and asyncio tasks, a hundred times."""
    kill_often(tmp_path, KILLS // 2, seed=1)
