"""How often a hook fired is known after a kill, and in a forked child is the child's own."""

import signal

from traced_runs import run_traced

PROGRAM = """
import os, signal
import rltrace
from rltrace import recorder
hook = recorder.current().hook("test", "module:function", "installed")
for _ in range(3):
    hook.fired()
child = os.fork()
for _ in range(2 if child == 0 else 1):
    hook.fired()
with rltrace.span("child" if child == 0 else "parent"):
    pass
if child:
    os.waitpid(child, 0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_counts_survive_a_kill_and_a_fork(tmp_path):
    run = run_traced(tmp_path, PROGRAM)
    assert run.returncode == -signal.SIGKILL, run.err
    fired = {}
    for process in run.recording.processes:
        (name,) = {span.name for span in process.events()}
        fired[name] = [hook["fired"] for hook in process.hooks if hook["target"] == "module:function"]
    assert fired == {"parent": [4], "child": [2]}
