"""A command ends at once, and does all that is to be done at the end of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rltrace.read.recording import Recording

CALL = """
import atexit, sys, threading
{before}
from rltrace.__main__ import main
sys.argv = ["rltrace", *{args}]
main()
"""


def called(before: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that has done something before."""
    source = CALL.format(before=before, args=args)
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, cwd=cwd)


def test_what_is_registered_is_done(tmp_path: Path) -> None:
    """Functions that the process has registered for its exit are called, and what they print is seen."""
    done = called("atexit.register(print, 'registered')", "--version", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("rltrace, version") and done.stdout.endswith("registered\n")


def test_a_thread_goes_on(tmp_path: Path) -> None:
    """A thread that Python would wait for is waited for."""
    thread = "threading.Thread(target=lambda: (threading.main_thread().join(), print('went on'))).start()"
    assert called(thread, "--version", cwd=tmp_path).stdout.endswith("went on\n")


@pytest.mark.parametrize(("args", "code"), [(("--help",), 0), (("summary", "nothing"), 3), (("no-command",), 2)])
def test_the_code_is_that_of_the_command(args: tuple[str, ...], code: int, tmp_path: Path) -> None:
    assert called("", *args, cwd=tmp_path).returncode == code


def test_a_traced_command_ends_in_good_order(tmp_path: Path) -> None:
    """A command that is traced itself says that it has ended, and loses no span."""
    before = f"""
import rltrace
rltrace.start({str(tmp_path / "run")!r})
with rltrace.span("mine"):
    pass
"""
    assert called(before, "--version", cwd=tmp_path).returncode == 0
    (process,) = Recording.open(tmp_path / "run").processes
    assert process.end_ns is not None
    assert [event.name for event in process.events()] == ["mine"]
