"""Whoever is killed is named, and nobody is left behind. Real processes, really killed, without rltrace.

A killed worker and a killed driver are in tests/cli/test_cli_run.py, traced, and in tests/hostile, without rltrace.
"""

from __future__ import annotations

import os
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


def test_told_driver_ends_quietly(run: subprocess.Popen[str]) -> None:
    """A driver that is told to end does so quietly, also in the middle of a wait.

    That it does so by Ctrl-C too is in tests/cli/test_cli_run.py.
    """
    others = runs.children(run)
    runs.engines(run)[0].send_signal(signal.SIGSTOP)
    time.sleep(1.5)  # for more than a second: Ray's own code looks for signals then
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=120)
    assert (run.returncode, errors) == (143, "")
    runs.wait_until_gone(others)


HOLD_ONE_BACK = """
import sys
import wrapt

@wrapt.when_imported("rltrace_reference.weight_sync")
def hold_one_back(module):
    load = module.Receiver.load

    def load_all_but_one(receiver, bucket):
        stale = receiver.parameters["model.norm.weight"].clone()
        load(receiver, bucket)
        if ".2." in bucket.key:  # of step 2
            receiver.parameters["model.norm.weight"].copy_(stale)

    module.Receiver.load = load_all_but_one
"""


def test_lost_weights_name_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose weights did not arrive ends with one line that names the tensor."""
    (tmp_path / "sitecustomize.py").write_text(HOLD_ONE_BACK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    run = runs.start(runs.write_config(tmp_path, ranks=1, **runs.TINY))
    out, errors = run.communicate(timeout=100)
    assert [line.split()[1] for line in out.splitlines() if line.startswith("step  ")] == ["0", "1"]
    assert run.returncode == 4
    (line,) = errors.splitlines()
    assert "model.norm.weight did not arrive in the engine of rank 0: checksum" in line
