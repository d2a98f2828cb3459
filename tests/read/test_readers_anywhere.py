"""Recordings are written on Linux and read anywhere: what other systems lack is taken away before rltrace loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import rltrace

ELSEWHERE = """
import asyncio, click, http.server, numpy, os, rich.console, signal, subprocess, sys, tempfile

for name in ("fork", "register_at_fork", "posix_fallocate", "memfd_create", "uname", "sched_getaffinity"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGHUP", "SIGKILL", "SIGCHLD"):
    delattr(signal, name)

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "termios", "pwd", "grp"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules.pop(name, None)
sys.platform = "elsewhere"
from rltrace.cli import main
sys.argv = ["rltrace", *sys.argv[1:]]
main()
"""


def elsewhere(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ELSEWHERE, *arguments]
    return subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rltrace.start(tmp_path / "run", role="driver")
    with rltrace.span("step", step=0):
        rltrace.counter("reward_mean", 0.5)
    rltrace.stop()
    return tmp_path


def test_summary_without_fork(folder: Path) -> None:
    """A Recording is summarized where nothing can fork."""
    done = elsewhere(folder, "summary", "run")
    assert done.returncode == 0, done.stderr
    assert "1 step" in done.stdout and "complete" in done.stdout


def test_export_without_fork(folder: Path) -> None:
    """A Recording is exported where nothing can fork."""
    done = elsewhere(folder, "export", "run", "--to", "perfetto", "-o", "run.pftrace")
    assert done.returncode == 0, done.stderr
    assert (folder / "run.pftrace").stat().st_size > 0


def test_running_is_refused_in_one_line(folder: Path) -> None:
    (folder / "laptop.yaml").write_text("steps: 1\n")
    done = elsewhere(folder, "run", "laptop.yaml")
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1 and "Linux" in done.stderr
