"""Errors about memory that nobody catches: told once, with who held what, and printed as without rltrace."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from test_cuda_ledger import Simulated
from traced_runs import TracedRun, run_traced

import rltrace
from rltrace.analysis import summarize
from rltrace.hooks.boundaries import Boundary
from rltrace.hooks.hook import NOBODY, HookRow
from rltrace.hooks.patching import PatchSet
from rltrace.instrument.memory.cuda_ledger import CudaLedger
from rltrace.instrument.memory.uncaught_errors import watch_uncaught
from rltrace.read.recording import Recording

MIB = 1 << 20
PETABYTE = 1 << 50

PLAIN = """
import multiprocessing, sys, threading
import torch

def ask(size_bytes):
    return torch.empty(size_bytes, dtype=torch.uint8)

def handled():
    try:
        ask(1 << 46)
    except RuntimeError:
        pass

def wrapped():
    try:
        ask(1 << 48)
    except RuntimeError as error:
        raise ValueError("no batch fits") from error

if __name__ == "__main__":
    handled()
    held = torch.ones(64 << 20, dtype=torch.uint8)
    for begin in (threading.Thread, multiprocessing.get_context("fork").Process):
        begun = begin(target=ask, args=(1 << 49 if begin is threading.Thread else 1 << 47,))
        begun.start()
        begun.join()
    sys.excepthook = lambda *args, before=sys.excepthook: (print("its own hook", flush=True), before(*args))
    wrapped()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    """A program without any phase, of which a thread, a child and at last the main thread find no room."""
    return run_traced(tmp_path_factory.mktemp("plain"), PLAIN)


def test_uncaught_errors_are_told_once(run: TracedRun) -> None:
    """An error that nobody caught is told once, of each thread and child, with its bytes."""
    told = summarize(run.recording).out_of_memory
    assert sorted(failure.asked_bytes or 0 for failure in told) == [1 << 47, 1 << 48, 1 << 49], run.err
    for failure in told:
        assert "DefaultCPUAllocator" in failure.reason
        assert failure.free_bytes is not None and failure.bound is not None
        assert failure.moment is not None and failure.moment.used_bytes > 64 * MIB


def test_program_dies_as_it_would(run: TracedRun) -> None:
    """The program dies as it would without us, and its own hook is called."""
    assert run.returncode == 1
    assert "its own hook" in run.out
    assert run.err.rstrip().endswith("ValueError: no batch fits")
    assert run.err.count("Traceback (most recent call last)") == 4, "of the last error and of its cause"
    of_main = run.err[run.err.rindex("RuntimeError: [") :]
    assert "rltrace" not in of_main and "wrapped()" in of_main


class Register:
    """Of hooks, whose reports nobody asks for here."""

    def hook(self, *_: object, **__: object) -> HookRow:
        return NOBODY


@pytest.fixture
def watch() -> Iterator[Callable[[CudaLedger], PatchSet]]:
    """Hooks of this process, taken back after the test."""
    pytest.importorskip("torch")
    patches = PatchSet("test", Register())

    def name(ledger: CudaLedger) -> PatchSet:
        watch_uncaught(patches, ledger.out_of_memory)
        return patches

    yield name
    patches.undo()


@pytest.mark.parametrize("is_told_by_a_phase", [False, True])
def test_told_error_is_not_told_again(
    folder: Path,
    watch: Callable[[CudaLedger], PatchSet],
    monkeypatch: pytest.MonkeyPatch,
    is_told_by_a_phase: bool,
) -> None:
    """A GPU's error that a phase has told of is not told again."""
    printed: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: printed.append(args[1]))
    rltrace.start(folder, role="worker", rank=0)
    gpu = Simulated()
    ledger = CudaLedger(lambda: gpu)
    watch(ledger)
    error = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
    if is_told_by_a_phase:
        ledger.reached(Boundary(("actor.update",), error=error))
    sys.excepthook(RuntimeError, error, None)
    sys.excepthook(KeyError, KeyError("actor"), None)
    rltrace.stop()
    (told,) = summarize(Recording.open(folder)).out_of_memory
    assert (told.asked_bytes, told.free_bytes) == (2 << 30, gpu.card().free_bytes)
    assert told.moment is not None and told.moment.bytes["cuda.context"] == gpu.context_bytes
    assert [str(known) for known in printed] == [str(error), "'actor'"]


def test_taken_back_everything_is_as_it_was(watch: Callable[[CudaLedger], PatchSet]) -> None:
    before = sys.excepthook, threading.excepthook, BaseProcess.run
    patches = watch(CudaLedger(Simulated))
    assert sys.excepthook is not before[0]
    patches.undo()
    assert (sys.excepthook, threading.excepthook, BaseProcess.run) == before


def test_an_error_that_is_its_own_cause_ends(watch: Callable[[CudaLedger], PatchSet]) -> None:
    watch(CudaLedger(Simulated))
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    sys.excepthook(ValueError, first, None)
