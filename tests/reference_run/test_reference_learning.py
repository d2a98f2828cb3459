"""The default configuration learns its task, until it is told to end; one run without rltrace.

With its own seed on two ranks it learns in tests/run/test_laptop_run.py, traced. Without the weight sync it does not:
tests/hostile.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import reference_runs as runs

pytestmark = pytest.mark.run

STEPS = 7


class Told(NamedTuple):
    """A run that was told to end after its first steps."""

    records: list[dict[str, Any]]
    """Of these steps."""
    returncode: int
    errors: str
    others: list[psutil.Process]
    """All its processes but the driver."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """One rank that sleeps at level 1; it is told to end while it waits for its engine."""
    folder = tmp_path_factory.mktemp("learning")
    config = runs.write_config(folder, ranks=1, seed=1, steps=1000, rollout={"sleep_level": 1})
    run = runs.start(config, "--out", str(folder))
    try:
        while len(records := lines_of(folder / "steps.jsonl")) < STEPS:
            assert run.poll() is None, run.communicate()
            time.sleep(0.05)
        others = runs.children(run)
        runs.engines(run)[0].send_signal(signal.SIGSTOP)
        time.sleep(1.5)  # for more than a second: Ray's own code looks for signals then
        run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=120)
    finally:
        run.kill()  # of no effect unless something has failed
    return Told([json.loads(line) for line in records[:STEPS]], run.returncode, errors, others)


def lines_of(file: Path) -> list[bytes]:
    """The whole lines of a file that may not be there yet."""
    return file.read_bytes().split(b"\n")[:-1] if file.exists() else []


def test_one_rank_learns(told: Told) -> None:
    """One rank that sleeps at level 1 learns from its first steps on; tests/hostile has all 24."""
    rewards = runs.rewards(told.records)
    assert [record["step"] for record in told.records] == list(range(STEPS))
    assert runs.mean(rewards[:2]) <= 0.08
    assert rewards[-1] >= 0.2
    # bf16 noise between two implementations; a policy of another step differs by much more.
    assert max(record["logprob_abs_diff_mean"] for record in told.records) < 0.02
    assert all(record["tokens"] > 0 and record["tokens_per_second"] > 0 for record in told.records)


def test_told_driver_ends_quietly(told: Told) -> None:
    """A driver that is told to end does so quietly, also in the middle of a wait.

    That it does so by Ctrl-C too is in tests/cli/test_cli_run.py.
    """
    assert (told.returncode, told.errors) == (143, "")
    runs.wait_until_gone(told.others)
