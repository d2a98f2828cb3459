"""Garbage collections: real ones, of as many objects as it takes."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from recordings import Written, hook, span
from test_summary_screen import screen
from traced_runs import run_traced

import rltrace
from rltrace import instrument
from rltrace.events import COLLECTION, Span
from rltrace.hooks import boundaries
from rltrace.hooks.patching import PatchSet
from rltrace.instrument import python_gc
from rltrace.instrument.python_gc import PythonGc
from rltrace.read.recording import Recording
from rltrace.record import spans

OBJECTS = 400_000
"""As many as a process has that loaded torch and Ray."""


@pytest.fixture
def patches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PatchSet]:
    """Recording, with the hook installed as `instrument` installs it."""
    rltrace.start(folder)
    patches = PatchSet("python_gc", spans.current(), PythonGc.supports)  # type: ignore[arg-type]
    monkeypatch.setitem(instrument.installed().patch_sets, "python_gc", patches)
    PythonGc().install(patches)
    with rltrace.span("first"):
        pass
    yield patches
    patches.undo()
    rltrace.stop()


@pytest.fixture
def many() -> list[list[int]]:
    """As many objects as a process has that loaded torch and Ray."""
    return [[number] for number in range(OBJECTS)]


@pytest.fixture
def by_hand() -> Iterator[None]:
    """No collection but those of the test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def told(folder: Path) -> list[tuple[int, int]]:
    """Begin and end of what was told so far."""
    boundaries.reached(boundaries.Boundary())
    (process,) = (one for one in Recording.open(folder).processes if one.pid == os.getpid())
    spans = [event for event in process.events() if isinstance(event, Span) and event.name == COLLECTION]
    assert (process.torn, process.orphans, process.lost_events) == (0, 0, 0)
    return [(span.start_ns, span.end_ns or 0) for span in spans]


def collect() -> tuple[int, int]:
    """Before and after a full collection."""
    before_ns = time.monotonic_ns()
    gc.collect()
    return before_ns, time.monotonic_ns()


@pytest.mark.usefixtures("by_hand", "many", "patches")
def test_full_collection_is_a_span(folder: Path) -> None:
    """A full collection is a span of its length."""
    ours = [collect() for _ in range(3)]
    assert len(told(folder)) == 3
    shares = []
    for (before_ns, after_ns), (start_ns, end_ns) in zip(ours, told(folder), strict=True):
        assert before_ns <= start_ns < end_ns <= after_ns
        shares.append((end_ns - start_ns) / (after_ns - before_ns))
    assert max(shares) > 0.5, "of the time around it, where nothing else came between"


@pytest.mark.usefixtures("by_hand")
def test_short_collections_are_not_told(patches: PatchSet, folder: Path) -> None:
    """Short collections are not recorded, and none is after the hook was undone."""
    gc.freeze()
    for _ in range(20):
        gc.collect(1)
    assert told(folder) == []
    callbacks = len(gc.callbacks)
    kept = [[number] for number in range(OBJECTS)]
    collect()
    patches.undo()
    assert len(gc.callbacks) == callbacks - 1
    collect()
    del kept
    assert len(told(folder)) == 1


@pytest.mark.usefixtures("by_hand", "many", "patches")
def test_none_of_a_pause_is_told(folder: Path) -> None:
    rltrace.pause()
    collect()
    rltrace.resume()
    before_ns, _ = collect()
    assert [start_ns >= before_ns for start_ns, _ in told(folder)] == [True]


@pytest.mark.usefixtures("by_hand", "many", "patches")
def test_forked_child_tells_its_own(folder: Path) -> None:
    """A forked child records its own collections, and not its parent's."""
    ours = collect()
    pid = os.fork()
    if pid == 0:
        with rltrace.span("mine"):
            pass
        collect()
        boundaries.reached(boundaries.Boundary())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert [ours[0] <= start_ns < end_ns <= ours[1] for start_ns, end_ns in told(folder)] == [True]
    (child,) = (process for process in Recording.open(folder).processes if process.pid == pid)
    (of_child,) = (event for event in child.events() if event.name == COLLECTION)
    assert isinstance(of_child, Span) and of_child.start_ns >= ours[1]


@pytest.mark.parametrize("most", [2, 16_384])
def test_reading_inside_a_collection(
    folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, most: int
) -> None:
    """Only collections are recorded, however many there were, and whoever reads inside of one.

    A finalizer runs inside of a collection, and may reach an edge.
    """
    monkeypatch.setattr(python_gc, "MOST_COLLECTIONS", most)
    for fixture in ("by_hand", "many", "patches"):
        request.getfixturevalue(fixture)

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            boundaries.reached(boundaries.Boundary())

    ours = []
    for number in range(12):
        Cycle() if number % 3 else None
        time.sleep(0.01)
        ours.append(collect())
    found = told(folder)
    assert len(found) >= 1
    for start_ns, end_ns in found:  # none began in one and ended in another
        assert any(before_ns <= start_ns < end_ns <= after_ns for before_ns, after_ns in ours)


def test_signal_inside_a_collection(tmp_path: Path) -> None:
    """A signal that comes inside of a collection reaches the program, whatever its handler raises.

    Its handler raises behind the collection, where the program expects it.
    """
    program = f"""
        import gc, msgspec, signal

        def ring(*_):
            raise error

        signal.signal(signal.SIGALRM, ring)
        gc.disable()  # none but those below
        kept = [[number] for number in range({4 * OBJECTS})]
        for error in (TimeoutError, KeyboardInterrupt):
            caught = 0
            for _ in range(5):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.01)
                    gc.collect()
                    for _ in range(1000):
                        pass
                except error:
                    caught += 1
            print(caught)
    """
    run = run_traced(tmp_path, program, collects=True)
    assert (run.out, run.err) == ("5\n5\n", "")


def test_unmodified_program_shows_collections(tmp_path: Path) -> None:
    """An unmodified program shows its collections, and no process joins the Recording for them alone."""
    program = f"""
        import gc, os, msgspec, rltrace
        kept = [[number] for number in range({OBJECTS})]
        gc.collect()
        if "MARKED" in os.environ:
            with rltrace.span("mine"):
                gc.collect()
        print(len(kept))
    """
    run = run_traced(tmp_path, program, collects=True, MARKED="1")
    assert run.out == f"{OBJECTS}\n", run.err
    assert {span.name for span in run.spans()} == {"mine", COLLECTION}
    (mine,) = run.spans("mine")
    assert any(mine.start_ns < pause.start_ns < pause.end_ns < mine.end_ns for pause in run.spans(COLLECTION))
    for name, collects, environment in (("without", False, {"MARKED": "1"}), ("alone", True, {})):
        (tmp_path / name).mkdir()
        assert run_traced(tmp_path / name, program, collects=collects, **environment).spans(COLLECTION) == []


def test_collecting_all_the_time(folder: Path) -> None:
    """A process that collects all the time loses nothing."""
    program = """
        import gc, threading, msgspec
        import rltrace
        from rltrace.instrument import python_gc
        python_gc.WORTH_NS = 0
        gc.set_threshold(1, 1, 1)
        def work():
            for number in range(20):
                with rltrace.span("work", number=[[number]]):
                    pass
        for _ in range(20):
            threads = [threading.Thread(target=work) for _ in range(20)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
    """
    run = run_traced(folder.parent, program, collects=True)
    assert run.returncode == 0, run.err
    assert len(run.spans("work")) == 8_000
    assert all(found.end_ns is not None for found in run.spans())
    assert len(run.spans(COLLECTION)) > 1_000
    assert all((process.lost_events, process.torn, process.orphans) == (0, 0, 0) for process in run.recording.processes)


@pytest.mark.parametrize("seconds", [0.5, 0.005])
def test_collections_have_a_line(tmp_path: Path, seconds: float) -> None:
    """The first screen says what collections take of a step, where it is worth a line."""
    steps = [span("step", at, at + 10, step=at // 10) for at in (0, 10, 20)]
    pauses = [span(COLLECTION, at, at + seconds) for at in (12, 23)]
    hooks = (hook(1, "gc:callbacks", instrumentation="python_gc", emits=[COLLECTION], fires=2),)
    written = Written(tmp_path / "run").process("d", *steps, role="driver", ended_s=30)
    written.process("w", *pauses, role="worker", rank=0, ended_s=30, hooks=hooks)
    said = " ".join(" ".join(screen(written.read())).split())
    line = "Garbage collection 5.0% of a step in worker (longest 0.500 s): `gc.freeze()`"
    assert (line in said) is (seconds == 0.5)
    assert ("Garbage collection" in said) is (seconds == 0.5)
