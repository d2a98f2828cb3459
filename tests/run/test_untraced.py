"""What is said of processes that were not traced, whenever they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rltrace.read.recording import Recording
from rltrace.record import manifest
from rltrace.run import untraced
from rltrace.run.untraced import STANDARD_ONLY, ProcessTree


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProcessTree:
    """The processes of a run below this one."""
    monkeypatch.setenv("RLTRACE_DIR", str(tmp_path))
    manifest.create(tmp_path, owner=None, command=[], config=None)
    return ProcessTree(os.getpid(), tmp_path, [int(name) for name in os.listdir("/proc") if name.isdigit()])


def a_program() -> subprocess.Popen[bytes]:
    """A Python that waits, as soon as it runs."""
    program = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert program.stdout is not None and program.stdout.readline()
    return program


def reasons(tree: ProcessTree, folder: Path) -> list[str]:
    tree.write()
    return [line["reason"] for line in Recording.open(folder).untraced]


def test_process_that_ends_while_it_is_examined(
    tree: ProcessTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that ends between two reads of `/proc`, nothing is said: what it is asked next is empty."""
    program, words = a_program(), untraced._words

    def words_and_end(pid: int, file: str) -> list[str]:
        found = words(pid, file)
        if file == "environ":
            program.kill()
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return found

    monkeypatch.setattr(untraced, "_words", words_and_end)
    tree.look()
    program.communicate()
    assert program.returncode == -signal.SIGKILL and reasons(tree, tmp_path) == []


def test_process_that_was_examined(tree: ProcessTree, tmp_path: Path) -> None:
    """Of one that ends after it was examined, it is said what it was."""
    program = a_program()
    tree.look()
    program.kill()
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
    tree.look()
    program.communicate()
    assert reasons(tree, tmp_path) == [STANDARD_ONLY]
