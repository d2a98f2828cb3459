"""The states of a chosen step, and what moves a process from one to the next."""

from __future__ import annotations

from pathlib import Path

import pytest

import rltrace
from rltrace.events import NO_GPU, allocations_of
from rltrace.hooks.hook import Hook
from rltrace.instrument.memory import chosen_allocations
from rltrace.instrument.memory.chosen_allocations import AllocationKeeper
from rltrace.instrument.torch.kept_step import TRANSITIONS, Event, KeptStep, State
from rltrace.read.recording import Recording


@pytest.fixture
def kept() -> KeptStep:
    return KeptStep(Hook("chosen_allocations", "rltrace.hooks.boundaries:watch"), AllocationKeeper())


def unavailable(folder: Path) -> dict[str, str]:
    """What the Recording of this process says is not there, with the reason."""
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    return dict(process.unavailable)


@pytest.mark.parametrize("state", State)
def test_every_state_is_left(state: State) -> None:
    """A step that has begun can end, or turn out to be another's, wherever the process is in it."""
    inside = state is not State.OUTSIDE
    assert ((state, Event.LEAVE) in TRANSITIONS, (state, Event.DISOWN) in TRANSITIONS) == (inside, inside)
    assert state in {after for after, _ in TRANSITIONS.values()}
    assert all(
        after is State.OUTSIDE for (_, event), (after, _) in TRANSITIONS.items() if event in (Event.LEAVE, Event.DISOWN)
    )


def test_without_gpu(kept: KeptStep, tmp_path: Path) -> None:
    """A process that has used no GPU by the end of the step says so, once."""
    rltrace.start(tmp_path)
    kept.on(Event.LOOK)
    kept.on(Event.LEAVE)
    assert kept.step is None, "it was in none"
    kept.enter(3)
    kept.on(Event.LOOK)
    assert kept.step == 3
    kept.on(Event.LEAVE)
    kept.on(Event.LEAVE)
    assert kept.step is None
    assert unavailable(tmp_path) == {allocations_of(3): NO_GPU}


def test_refused(kept: KeptStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch cannot do is tried once, and its reason is said when the step ends."""
    rltrace.start(tmp_path)
    monkeypatch.setattr(chosen_allocations, "has_used_gpu", lambda: True)
    kept.enter(4)
    monkeypatch.setattr(chosen_allocations.allocations, "begin", None)  # it is not called again
    kept.on(Event.LOOK)
    kept.on(Event.LEAVE)
    (reason,) = unavailable(tmp_path).values()
    assert reason == f"RuntimeError: {NO_GPU}"


def test_disowned(kept: KeptStep, tmp_path: Path) -> None:
    """A step that was another process's leaves nothing behind."""
    rltrace.start(tmp_path)
    kept.enter(5)
    kept.on(Event.DISOWN)
    assert kept.step is None
    kept.enter(6)
    assert kept.step == 6
    kept.on(Event.DISOWN)
    rltrace.counter("loss", 1)
    assert unavailable(tmp_path) == {}
