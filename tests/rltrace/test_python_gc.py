"""Garbage collections: real ones, of as many objects as it takes."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from recordings import Written, hook, span
from test_summary_screen import screen
from traced_runs import run_traced

import rltrace
from rltrace import instrument, recorder
from rltrace.events import COLLECTION
from rltrace.instrument.python_gc import WORTH_NS, PythonGc
from rltrace.patching import PatchSet
from rltrace.recording import Recording

OBJECTS = 400_000
"""As many as a process has that loaded torch and Ray."""


@pytest.fixture
def patches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PatchSet]:
    """Recording, with the hook installed as `instrument` installs it."""
    rltrace.start(folder)
    patches = PatchSet("python_gc", recorder.current(), PythonGc.supports)  # type: ignore[arg-type]
    monkeypatch.setitem(instrument._installed.patch_sets, "python_gc", patches)
    PythonGc().install(patches)
    with rltrace.span("first"):
        pass
    yield patches
    patches.undo()
    rltrace.stop()


def collections_of(folder: Path) -> list[tuple[int, int, dict[str, object]]]:
    (process,) = Recording.open(folder).processes
    assert (process.torn, process.orphans, process.lost_events) == (0, 0, 0)
    return [(e.start_ns, e.end_ns, e.args) for e in process.events() if e.name == COLLECTION]  # type: ignore[union-attr]


def cycles(count: int) -> None:
    """Garbage that only a collection finds."""
    for _ in range(count):
        one: list[object] = []
        one.append(one)


def test_a_full_collection_is_a_span_with_what_it_found(patches: PatchSet, folder: Path) -> None:
    gc.collect()
    kept = [[number] for number in range(OBJECTS)]
    gc.disable()
    cycles(5_000)
    before_ns = time.monotonic_ns()
    gc.collect()
    after_ns = time.monotonic_ns()
    gc.enable()
    del kept
    start_ns, end_ns, args = next(found for found in collections_of(folder) if found[0] >= before_ns)
    assert before_ns <= start_ns < end_ns <= after_ns
    assert end_ns - start_ns > 0.5 * (after_ns - before_ns)
    assert args["generation"] == 2 and args["collected"] >= 5_000


def test_short_ones_are_not_told_and_none_after_the_hook_was_undone(patches: PatchSet, folder: Path) -> None:
    for _ in range(20):
        gc.collect(1)
    gc.collect()
    rltrace.pause()
    gc.collect()
    rltrace.resume()
    many = len(collections_of(folder))
    assert all(end_ns - start_ns >= WORTH_NS for start_ns, end_ns, _ in collections_of(folder))
    callbacks = len(gc.callbacks)
    patches.undo()
    assert len(gc.callbacks) == callbacks - 1
    kept = [[number] for number in range(OBJECTS)]
    gc.collect()
    del kept
    assert len(collections_of(folder)) == many


def test_one_in_a_pause_is_not_told_though_it_ends_behind_it(patches: PatchSet, folder: Path) -> None:
    """Nor is one told as if it had begun with the one before the pause."""
    (watch,) = (callback for callback in gc.callbacks if callback.__module__ == "rltrace.instrument.python_gc")
    said = {"generation": 2, "collected": 0, "uncollectable": 0}
    gc.disable()
    before = len(collections_of(folder))
    watch("start", said)
    rltrace.pause()
    watch("stop", said)
    watch("start", said)
    rltrace.resume()
    time.sleep(0.01)
    watch("stop", said)
    assert len(collections_of(folder)) == before
    gc.enable()


def test_an_unmodified_program_shows_its_collections_and_no_process_those_alone(tmp_path: Path) -> None:
    program = f"""
        import gc, os, msgspec, rltrace
        kept = [[number] for number in range({OBJECTS})]
        gc.collect()
        if "MARKED" in os.environ:
            with rltrace.span("mine"):
                gc.collect()
        print(len(kept))
    """
    run = run_traced(tmp_path, program, MARKED="1")
    assert run.out == f"{OBJECTS}\n", run.err
    assert {span.name for span in run.spans()} == {"mine", COLLECTION}
    assert run.spans()[0].name == "mine"
    for name, environment in (("without", {"MARKED": "1", "RLTRACE_DISABLE": "python_gc"}), ("alone", {})):
        (tmp_path / name).mkdir()
        assert run_traced(tmp_path / name, program, **environment).spans(COLLECTION) == []


def test_a_process_that_collects_all_the_time_records_on_while_its_segments_change(folder: Path) -> None:
    """A collection may come in the middle of any record, also of the one that makes a new segment."""
    program = """
        import gc, threading, msgspec
        import rltrace
        from rltrace.instrument import python_gc
        python_gc.WORTH_NS = 0
        gc.set_threshold(1, 1, 1)
        def work():
            for number in range(3_000):
                with rltrace.span("work", number=[[number]]):
                    pass
        threads = [threading.Thread(target=work) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    """
    run = run_traced(folder.parent, program)
    assert run.returncode == 0, run.err
    assert len(run.spans("work")) == 12_000
    assert all(found.end_ns is not None for found in run.spans())
    assert len(run.spans(COLLECTION)) > 1_000
    assert all((process.lost_events, process.torn, process.orphans) == (0, 0, 0) for process in run.recording.processes)


@pytest.mark.parametrize("seconds", [0.5, 0.005])
def test_what_it_takes_of_a_step_is_a_line_where_it_is_worth_one(tmp_path: Path, seconds: float) -> None:
    steps = [span("step", at, at + 10, step=at // 10) for at in (0, 10, 20)]
    pauses = [span(COLLECTION, at, at + seconds, generation=2, collected=0) for at in (12, 23)]
    hooks = (hook(1, "gc:callbacks", instrumentation="python_gc", emits=[COLLECTION], fires=2),)
    written = Written(tmp_path / "run").process("d", *steps, role="driver", ended_s=30)
    written.process("w", *pauses, role="worker", rank=0, ended_s=30, hooks=hooks)
    said = " ".join(" ".join(screen(written.read())).split())
    line = "Python's garbage collection 5.0% of a step in worker (longest 0.500 s): `gc.freeze()`"
    assert (line in said) is (seconds == 0.5)
    assert ("garbage collection" in said) is (seconds == 0.5)
