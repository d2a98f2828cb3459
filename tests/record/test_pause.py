"""A paused process records nothing and pays nothing for its hooks; its Recording says from when to when."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import rltrace
from rltrace import instrument
from rltrace.events import Counter, Span
from rltrace.hooks.patching import PatchSet
from rltrace.read.recording import Process, Recording
from rltrace.record import spans


def events_of(process: Process) -> list[str]:
    return [event.name for event in process.events()]


@pytest.fixture
def recorded(folder: Path) -> Iterator[Path]:
    rltrace.start(folder)
    yield folder
    rltrace.stop()


def record_everything(name: str) -> None:
    with rltrace.span(name):
        rltrace.flow(name, "out")
    with rltrace.phase(name):
        pass
    rltrace.span_at(name, 1, 2)
    rltrace.counter(name, 1)
    rltrace.typed_span(name)().__enter__()


def test_pause_records_nothing(recorded: Path) -> None:
    """What happens in a pause is not recorded, and what happens around it is."""
    record_everything("before")
    rltrace.pause()
    record_everything("inside")
    rltrace.resume()
    record_everything("after")
    rltrace.stop()
    (process,) = Recording.open(recorded).processes
    names = events_of(process)
    assert names.count("before") == names.count("after") == 5
    assert "inside" not in names
    assert (process.torn, process.orphans, process.lost_events) == (0, 0, 0)
    ((begin_ns, end_ns),) = process.pauses
    inside = [event for event in process.events() if isinstance(event, Counter) and begin_ns <= event.ts_ns < end_ns]
    assert inside == []


def test_span_around_a_pause(recorded: Path) -> None:
    """A span around a pause is whole."""
    with rltrace.span("step", recorded=False) as step:
        rltrace.pause()
        rltrace.resume()
        step.set(seconds=1)
    rltrace.stop()
    (process,) = Recording.open(recorded).processes
    (span,) = [event for event in process.events() if isinstance(event, Span)]
    assert span.end_ns is not None
    assert span.args == {"recorded": False, "seconds": 1}


def test_span_that_ends_in_a_pause(recorded: Path) -> None:
    """A span that is open when a pause begins and ends inside of it ends at the pause; later spans are not in it."""
    call = rltrace.span("call").__enter__()
    rltrace.pause()
    call.__exit__(None, None, None)
    rltrace.resume()
    with rltrace.span("later"):
        pass
    rltrace.stop()
    (process,) = Recording.open(recorded).processes
    found = {event.name: event for event in process.events() if isinstance(event, Span)}
    ((begin_ns, end_ns),) = process.pauses
    assert end_ns is not None
    assert found["call"].end_ns == begin_ns < end_ns < found["later"].start_ns


def test_thread_begun_in_a_pause(recorded: Path) -> None:
    """A thread that begins in a pause records once the pause is over."""
    paused, go_on = threading.Event(), threading.Event()

    def work() -> None:
        record_everything("inside")
        paused.set()
        go_on.wait()
        record_everything("after")

    rltrace.pause()
    thread = threading.Thread(target=work)
    thread.start()
    paused.wait()
    rltrace.resume()
    go_on.set()
    thread.join()
    rltrace.stop()
    (process,) = Recording.open(recorded).processes
    assert set(events_of(process)) == {"after"}
    assert process.lost_events == 0


def test_end_while_paused(recorded: Path) -> None:
    """A process that ends while it is paused ends in good order."""
    rltrace.pause()
    rltrace.stop()
    (process,) = Recording.open(recorded).processes
    assert process.end_ns is not None
    assert [end_ns for _, end_ns in process.pauses] == [None]


def test_start_while_paused(recorded: Path, tmp_path: Path) -> None:
    """Starting again while paused joins the same Recording."""
    rltrace.pause()
    assert rltrace.start(tmp_path / "another") == recorded
    rltrace.identify(role="driver")
    rltrace.stop()
    (process,) = Recording.open(recorded).processes
    assert process.role == "driver"


def test_fork_while_paused(recorded: Path) -> None:
    """A child forked in a pause is paused and can go on."""
    rltrace.pause()
    child = os.fork()
    if child == 0:
        record_everything("inside")
        rltrace.resume()
        record_everything("child")
        rltrace.stop()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    rltrace.stop()
    of_child = next(p for p in Recording.open(recorded).processes if p.pid == child)
    assert set(events_of(of_child)) == {"child"}


def test_pause_without_recording() -> None:
    """Pausing what is not recorded does nothing."""
    rltrace.pause()
    rltrace.resume()
    assert spans.current() is None
    assert rltrace.measure_cost() == {}


def test_hooks_rest_in_a_pause(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks neither fire nor work in a pause, and do both again after it."""
    module = ModuleType("paused_module")
    exec("def work(x):\n    return x + 1", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    asked = []
    patches = PatchSet("test", spans.current())
    patches.span("paused_module:work", "work", lambda x: asked.append(x) or {"x": x})
    monkeypatch.setitem(instrument.installed().patch_sets, "test", patches)
    try:
        assert module.work(1) == 2
        rltrace.pause()
        assert module.work(2) == 3
        rltrace.resume()
        assert module.work(3) == 4
    finally:
        patches.undo()
    rltrace.stop()
    (process,) = Recording.open(recorded).processes
    assert asked == [1, 3]
    assert [hook["fired"] for hook in process.hooks] == [2]
    assert [event.args for event in process.events()] == [{"x": 1}, {"x": 3}]


@pytest.mark.parametrize("wanted", [True, False])
def test_dormant_hook_after_a_pause(recorded: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    """A dormant hook keeps after a pause what it was told during it.

    A history of allocations may begin or end while recording is paused.
    """
    module = ModuleType("paused_module")
    exec("def work(x):\n    return x + 1", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    asked: list[int] = []
    patches = PatchSet("test", spans.current())
    with patches.dormant() as switch:
        patches.span("paused_module:work", "work", asked.append)
    monkeypatch.setitem(instrument.installed().patch_sets, "test", patches)
    try:
        switch(not wanted)
        module.work(1)
        rltrace.pause()
        switch(wanted)
        module.work(2)
        rltrace.resume()
        module.work(3)
    finally:
        patches.undo()
    assert asked == ([3] if wanted else [1])


def test_cost_without_events(recorded: Path) -> None:
    """Measuring the cost leaves figures and no events."""
    with rltrace.span("before"):
        pass
    costs = rltrace.measure_cost()
    with rltrace.span("after"):
        pass
    rltrace.stop()
    (process,) = Recording.open(recorded).processes
    assert events_of(process) == ["before", "after"]
    assert process.costs == costs
    assert 0 < costs["counter"] < costs["span"] < 1e6
    assert costs["dormant_hook"] < costs["span"]
    assert not [*recorded.glob(".cost*")]
    assert len([*recorded.glob("processes/*/*.seg")]) == 1, "the thread goes on in the segment that it had"
