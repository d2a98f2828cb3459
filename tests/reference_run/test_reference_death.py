"""How a run without rltrace ends. A killed engine is named, and nobody is left behind; the processes are real.

A killed worker and a killed driver are in tests/cli/test_cli_run.py, traced, and in tests/hostile, without rltrace. A
driver that is told to end is in test_reference_learning.py, and weights that got lost are in test_reference_tiny.py.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference_runs as runs

pytestmark = pytest.mark.run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of one rank in the middle of its steps; one of two is in tests/cli/test_cli_run.py."""
    yield from runs.in_its_steps(tmp_path)


def test_killed_engine_is_named(run: subprocess.Popen[str]) -> None:
    """A stopped engine that is then killed while the driver waits is named."""
    victim = runs.engines(run)[0]
    victim.send_signal(signal.SIGSTOP)  # the ranks now wait for it
    time.sleep(1)
    runs.kill_and_name("engine", victim, run, how="killed by SIGKILL")


def test_whole_run_ends_quietly(tmp_path: Path) -> None:
    """A run that nobody kills makes all its steps, exits with 0 and writes nothing to stderr."""
    records = runs.finish(tmp_path, ranks=1, steps=2, **runs.TINY)
    assert [record["step"] for record in records] == [0, 1]
