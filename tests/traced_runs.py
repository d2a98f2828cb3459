"""Runs a program as `rltrace exec` does, by the start-up hook, and reads what it recorded."""

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from warm_python import warm

import rltrace
from rltrace.events import Span
from rltrace.read.recording import Recording
from rltrace.record import manifest

ROOT = Path(rltrace.__file__).parents[1]
STARTUP = Path(rltrace.__file__).parent / "hooks" / "startup"


@dataclass
class TracedRun:
    """What a program did and what was recorded of it."""

    returncode: int
    out: str
    err: str
    recording: Recording

    def spans(self, name=None):
        """All spans of all processes, or those of one name."""
        events = [event for process in self.recording.processes for event in process.events()]
        spans = [event for event in events if isinstance(event, Span) and name in (None, event.name)]
        return sorted(spans, key=lambda span: span.start_ns)

    def hooks(self):
        """Target -> hook line, over all processes; the one that says most about a target wins."""
        order = ["waiting", "skipped", "undone", "failed", "installed"]
        lines = [hook for process in self.recording.processes for hook in process.hooks]
        return {hook["target"]: hook for hook in sorted(lines, key=lambda hook: order.index(hook["state"]))}


def traced_environment(folder, *, collects=False, **environment):
    """The environment of a program that is traced into `folder`.

    Garbage collections come when they come, so only tests that are about them record any: `collects`.
    """
    disabled = filter(None, (environment.get("RLTRACE_DISABLE"), None if collects else "python_gc"))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RLTRACE_")}
    path = [STARTUP, ROOT, ROOT / "exporters", ROOT / "reference_run", *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **inherited,
        "RLTRACE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        **environment,
        "RLTRACE_DISABLE": ",".join(disabled),
    }


def run_ranks_traced(tmp_path, source, ranks):
    """Run a program's source once for each rank's variables, side by side, in a Python that has imported torch."""
    folder, program = tmp_path / "recording", tmp_path / "program.py"
    manifest.create(folder, owner=None, command=[], config=None)
    program.write_text(source)
    environments = [traced_environment(folder, **rank) for rank in ranks]
    ended = warm("torch").run_together(program, environments, tmp_path, timeout_s=120)
    assert [done.returncode for done in ended] == [0] * len(ranks), ended
    return Recording.open(folder)


def run_traced(tmp_path, source, *, timeout_s=120, arguments=(), imported="", collects=False, **environment):
    """Run a program's source with tracing; in a Python that has imported a module before, if one is named."""
    folder = tmp_path / "recording"
    manifest.create(folder, owner=None, command=[], config=None)
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(source))
    variables = traced_environment(folder, collects=collects, **environment)
    if imported:
        done = warm(imported).run(program, variables, tmp_path, timeout_s)
        return TracedRun(done.returncode, done.stdout, done.stderr, Recording.open(folder))
    done = subprocess.run(
        [sys.executable, *arguments, str(program)],
        env=variables,
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=tmp_path,
    )
    return TracedRun(done.returncode, done.stdout, done.stderr, Recording.open(folder))
