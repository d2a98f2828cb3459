"""How often a hook fired: exact at the end, no less than once after a kill, and in a forked child the child's own."""

import signal

from traced_runs import run_traced

PROGRAM = """
import os, signal, sys
import rltrace
from rltrace.record import lifecycle, spans
hook = spans.current().hook("test", "module:function", "installed")
spans.current().hook("test", "module:other", "installed")
for _ in range(3):
    hook.fired()
child = os.fork()
for _ in range(2 if child == 0 else 1):
    hook.fired()
with rltrace.span("child" if child == 0 else "parent"):
    pass
%s
hook.fired()
if child:
    os.waitpid(child, 0)
%s
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
FILL = """
for _ in range(20_000):
    rltrace.counter("more_than_a_segment", 1.0)
"""


def counts(run, target="module:function"):
    """By what a process did."""
    return {
        next(iter({span.name for span in process.events() if hasattr(span, "end_ns")})): [
            hook["fired"] for hook in process.hooks if hook["target"] == target
        ]
        for process in run.recording.processes
    }


def test_counts_at_end(tmp_path):
    """Counts are exact when a process ends and a forked child has its own."""
    run = run_traced(tmp_path, PROGRAM % ("", "(lifecycle.stop(), os._exit(0)) if child == 0 else None"))
    assert run.returncode == 0, run.err
    assert counts(run) == {"parent": [5], "child": [3]}
    assert counts(run, "module:other") == {"parent": [0], "child": [0]}


def test_fired_before_kill(tmp_path):
    """After a kill a hook that fired is not said to have never fired."""
    run = run_traced(tmp_path, PROGRAM % ("", KILL))
    assert run.returncode == -signal.SIGKILL, run.err
    found = counts(run)
    assert 1 <= found["parent"][0] <= 5 and 1 <= found["child"][0] <= 3
    assert counts(run, "module:other") == {"parent": [0], "child": [0]}


def test_counts_after_kill(tmp_path):
    """After a kill a count is no older than the last segment."""
    run = run_traced(tmp_path, PROGRAM % (FILL, KILL))
    assert run.returncode == -signal.SIGKILL, run.err
    assert counts(run) == {"parent": [4], "child": [2]}
