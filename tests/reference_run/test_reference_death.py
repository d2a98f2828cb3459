"""Whoever is killed is named, and nobody is left behind. Real processes, really killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import reference_runs as runs
from rltrace_reference.reaper import processes_of

pytestmark = pytest.mark.run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of one rank in the middle of its steps; one of two is in tests/cli/test_cli_run.py."""
    process = runs.start(runs.write_config(tmp_path, ranks=1, steps=1000, **runs.TINY))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step   1"):
            break
    yield process
    process.kill()
    process.communicate()


def children(run: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(run.pid).children(recursive=True)


def workers(run: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in children(run) if child.name() == "ray::Worker"]


def engines(run: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in children(run) if "rltrace_reference.engine" in child.cmdline()]


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert alive == []


def test_killed_worker_is_named(run: subprocess.Popen[str]) -> None:
    """A killed worker ends the run with one line that names it."""
    victim = workers(run)[-1]
    # A kernel before Linux 6.15 tells only a parent how its child ended.
    check_it_is_named("worker", victim, run, how=r"killed (by SIGKILL|or crashed)")


def test_killed_engine_is_named(run: subprocess.Popen[str]) -> None:
    """A stopped engine that is then killed while the driver waits is named."""
    victim = engines(run)[0]
    victim.send_signal(signal.SIGSTOP)  # the ranks now wait for it
    time.sleep(1)
    check_it_is_named("engine", victim, run, how="killed by SIGKILL")


def check_it_is_named(role: str, victim: psutil.Process, run: subprocess.Popen[str], how: str) -> None:
    """Kills a process of the run: it ends with one line, and nobody is left."""
    others = children(run)
    victim.kill()
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 4
    (line,) = errors.splitlines()
    assert re.fullmatch(rf"rltrace: {role} of rank 0 \(pid {victim.pid}\) died: {how}", line)
    wait_until_gone(others)


def test_a_killed_driver_leaves_nobody_behind(run: subprocess.Popen[str]) -> None:
    others = children(run)
    assert len(engines(run)) == len(workers(run)) == 1
    (reaper,) = [child for child in others if child.cmdline()[-2].endswith("reaper.py")]
    folder = Path(reaper.cmdline()[-1])
    assert {child.pid for child in others} == {reaper.pid, *processes_of(str(folder))} - {run.pid}
    run.kill()
    wait_until_gone(others)
    assert not folder.exists()


def test_told_driver_ends_quietly(run: subprocess.Popen[str]) -> None:
    """A driver that is told to end does so quietly, also in the middle of a wait.

    That it does so by Ctrl-C too is in tests/cli/test_cli_run.py.
    """
    others = children(run)
    engines(run)[0].send_signal(signal.SIGSTOP)
    time.sleep(1.5)  # for more than a second: Ray's own code looks for signals then
    run.send_signal(signal.SIGTERM)
    _, errors = run.communicate(timeout=120)
    assert (run.returncode, errors) == (143, "")
    wait_until_gone(others)


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
