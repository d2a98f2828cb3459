"""Who is below whom is the kernel's word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from rltrace.host.parents import is_below, parent_of, running_parent_of, stack_of

GRANDCHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
input()
child.communicate(b"\\n")
"""


def test_below_is_transitive() -> None:
    """A child's child is below, and no process is below itself or one that is not above it."""
    child = subprocess.Popen([sys.executable, "-c", GRANDCHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    grandchild = int(child.stdout.readline())
    assert (parent_of(grandchild), parent_of(child.pid)) == (child.pid, os.getpid())
    assert is_below(grandchild, child.pid) and is_below(grandchild, os.getpid()) and is_below(child.pid, 1)
    assert not is_below(child.pid, grandchild) and not is_below(os.getpid(), os.getpid())
    assert running_parent_of(grandchild) == child.pid
    child.communicate(b"\n")
    assert parent_of(child.pid) is None and not is_below(child.pid, os.getpid())


def test_ended_process_has_no_running_parent() -> None:
    """A process that has ended has a parent, and no running one until its parent asks."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert (parent_of(child.pid), running_parent_of(child.pid)) == (os.getpid(), None)
    child.wait()
    assert parent_of(child.pid) is running_parent_of(child.pid) is None


def test_fork_shares_the_stack() -> None:
    """A fork has its parent's stack, and an executed program has one of its own."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pid = os.fork()
    if pid == 0:
        signal.pause()
    assert stack_of(pid) == stack_of(os.getpid()) != stack_of(child.pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    child.communicate(b"\n")
    assert stack_of(pid) is stack_of(child.pid) is None
