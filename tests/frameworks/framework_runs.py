"""Runs a program in an environment of its own, bare or under `rltrace exec`."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from environments import ROOT
from traced_runs import TracedRun

from rltrace.analysis.summary import summarize
from rltrace.events import Span
from rltrace.read.recording import Recording

TIMEOUT_SECONDS = 900


def write_program(folder: Path, source: str) -> Path:
    """The program of a test, as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "program.py"
    program.write_text(textwrap.dedent(source))
    return program


def run_bare(environment: Path, program: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it without tracing."""
    return _run([environment / "bin/python", program, *arguments], program.parent, variables)


def run_exec(environment: Path, program: Path, *arguments: str, **variables: str) -> TracedRun:
    """Run it under `rltrace exec` of its own environment."""
    folder = program.parent / "recording"
    command = [environment / "bin/rltrace", "exec", "--out", folder, "--", environment / "bin/python", program]
    done = _run([*command, *arguments], program.parent, variables)
    return TracedRun(done.returncode, done.stdout, done.stderr, Recording.open(folder))


def trace(environment: Path, folder: Path, source: str, **variables: str) -> TracedRun:
    """Run a program under `rltrace exec`, to its end and with no hook that fails."""
    run = run_exec(environment, write_program(folder, source), **variables)
    assert run.returncode == 0, run.err[-4000:]
    assert "rltrace: the hook" not in run.err, run.err[-4000:]
    return run


def by_kind(traced: TracedRun, kinds: Mapping[str, str]) -> SimpleNamespace:
    """What each process of a trainer's run recorded, by what it is, and the summary.

    Args:
        traced: The run.
        kinds: What a process is, by the name of a span that only such a one has; no two are the same.
    """
    found: dict[str, SimpleNamespace] = {}
    for process in traced.recording.processes:
        spans = sorted((e for e in process.events() if isinstance(e, Span)), key=lambda span: span.start_ns)
        names = {span.name for span in spans}
        kind = next((kind for name, kind in kinds.items() if name in names), None)
        if kind is not None:
            assert kind not in found
            found[kind] = SimpleNamespace(process=process, spans=spans)
    return SimpleNamespace(spans=found, summary=summarize(traced.recording))


def named(run: SimpleNamespace, kind: str, *names: str) -> list[Span]:
    """The spans of these names of one process, in order."""
    return [span for span in run.spans[kind].spans if span.name in names]


def inside(span: Span, mark: Span) -> bool:
    """Whether a span lies in another one."""
    assert span.end_ns is not None and mark.end_ns is not None
    return mark.start_ns <= span.start_ns and span.end_ns <= mark.end_ns


def result_of_bare(environment: Path, folder: Path, source: str, **variables: str) -> Any:
    """Run a program without tracing, to its end, and give its result."""
    run = run_bare(environment, write_program(folder, source), **variables)
    assert run.returncode == 0, run.stderr[-4000:]
    return result(run.stdout)


def result(out: str) -> Any:
    """What a program says of itself, in its one line that begins with RESULT."""
    (line,) = [line for line in out.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def run_contracts(environment: Path, chosen: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Whether the chosen rows of the table of instrumentations keep what each promises with what is installed."""
    return run_tests(environment, "tests/contracts/test_instrumentations.py", "-k", chosen, **variables)


def run_tests(environment: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run tests of ours with what is installed in an environment."""
    return _run([environment / "bin/python", "-m", "pytest", "-q", "-rs", *arguments], ROOT, variables)


def _run(command: list[str | Path], folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("RLTRACE_") and name != "PYTHONPATH"
    }
    return subprocess.run(
        list(map(str, command)),
        env={**inherited, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables},
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
