"""Traced runs of real training with FSDP: of the program in `programs/`, on gloo ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

from traced_runs import TracedRun, run_traced

from rltrace.events import COLLECTION, FORWARD, HOST_WORK, Span
from rltrace.read.recording import Process

PROGRAMS = Path(__file__).parents[1] / "programs"
TRAIN = (PROGRAMS / "sharded_training.py").read_text()


def train(
    folder: Path, *kinds: str, ranks: int, source: str = TRAIN, imported: str = "torch", **environment: str
) -> TracedRun:
    """Train in one run with each kind of FSDP: "fsdp2", "fsdp1", or "fsdp1_flat" (flat parameters)."""
    shutil.copy(PROGRAMS / "sharded_model.py", folder)
    run = run_traced(folder, source, imported=imported, RANKS=str(ranks), KINDS=" ".join(kinds), **environment)
    assert run.returncode == 0, run.err
    return run


def spans_inside(process: Process, name: str, **args: str) -> list[Span]:
    """The spans of a process inside its only one of this name and arguments, by their start.

    Without garbage collections, which come when they come, and without what hooks see of any loop.
    """
    spans = sorted((e for e in process.events() if isinstance(e, Span)), key=lambda span: span.start_ns)
    (around,) = [span for span in spans if span.name == name and span.args == args]
    assert around.end_ns is not None
    inside = [s for s in spans if s is not around and around.start_ns <= s.start_ns < around.end_ns]
    return [s for s in inside if not is_of_any_loop(s) and s.name != COLLECTION]


def is_of_any_loop(span: Span) -> bool:
    """Whether a span is inferred, or one of whole models, of the host between them, or of a collective."""
    return span.is_inferred or span.name in (FORWARD, HOST_WORK) or span.name.startswith("dist.")
