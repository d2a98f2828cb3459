"""Kills of the reference run whose promises the suite has in another one: without rltrace, and of a traced engine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import reference_runs as runs
from rltrace_reference.reaper import processes_of
from test_cli_run import going_on, kill_one

__all__ = ["going_on"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    yield from runs.in_its_steps(tmp_path)


def test_killed_worker_is_named(run: subprocess.Popen[str]) -> None:
    """A killed worker ends the run with one line that names it."""
    # A kernel before Linux 6.15 tells only a parent how its child ended.
    runs.kill_and_name("worker", runs.workers(run)[-1], run, how=r"killed (by SIGKILL|or crashed)")


def test_a_killed_driver_leaves_nobody_behind(run: subprocess.Popen[str]) -> None:
    others = runs.children(run)
    assert len(runs.engines(run)) == len(runs.workers(run)) == 1
    reaper = runs.reaper_of(others)
    folder = Path(reaper.cmdline()[-1])
    assert {child.pid for child in others} == {reaper.pid, *processes_of(str(folder))} - {run.pid}
    run.kill()
    runs.wait_until_gone(others)
    assert not folder.exists()


def test_killed_engine_is_one_line(going_on: Callable[[int], tuple[subprocess.Popen[str], Path]]) -> None:
    """A traced run whose engine was killed ends with one line that names it."""
    kill_one(*going_on(1), "engine", 0)
