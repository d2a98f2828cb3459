"""Whatever interrupts a thread of ours at whatever bytecode, the others get the lock after it."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError  # Python's own from 3.11 on
from pathlib import Path
from types import FrameType
from typing import Any

import bytecode_tracer
import pytest

import rltrace
from rltrace.host.clock import now_ns
from rltrace.instrument.torch.between import Between
from rltrace.instrument.torch.device_time import DeviceTimes
from rltrace.read.recording import Recording
from rltrace.record import lock as recorder_lock
from rltrace.record import spans
from rltrace.record.chosen_steps import Follower
from rltrace.record.lock import InterruptibleLock
from rltrace.record.step_numbers import numbers
from rltrace.record.torch import kernels

OURS = str(Path(rltrace.__file__).parent / "record")
IN_THE_LOCK = recorder_lock.__file__


class LateError(Exception):
    """The timeout of a program."""


@pytest.fixture(scope="module")
def interrupter(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return bytecode_tracer.build(tmp_path_factory.mktemp("interrupter"))


def raise_late(*_: object) -> None:
    raise LateError


def is_interrupted(interrupter: Any, folder: str, number: int, way: str, work: Any) -> bool:
    """Run it in a new thread, and interrupt that at the n-th bytecode of ours, if it has as many."""

    def interrupted() -> bool:
        interrupter.start(folder, number, raise_late, LateError if way == "thread" else None)
        try:
            work()
            for _ in range(2):  # what another thread sets comes where a function begins or a loop goes on
                pass
        except LateError:
            pass
        return bool(interrupter.stop())

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(interrupted).result(timeout=60)


def is_open(lock: InterruptibleLock) -> bool:
    """Whether this thread gets it at once."""
    return lock._lock.acquire(blocking=False) and lock._lock.release() is None


@pytest.mark.parametrize("way", ["trace function", "thread"])
@pytest.mark.parametrize(
    ("work", "bytecodes"), [(lambda: rltrace.counter("value", 1), 100), (lambda: spans.current().lose(), 30)]
)
def test_at_every_bytecode(folder: Path, interrupter: Any, way: str, work: Callable[[], None], bytecodes: int) -> None:
    """A thread that is interrupted at any bytecode of its first record holds up neither other threads nor the end."""
    rltrace.start(folder)
    number = 1
    while is_interrupted(interrupter, OURS, number, way, work):
        assert is_open(spans.current().run_alone.__self__), number
        number += 1
    assert number > bytecodes
    rltrace.counter("after", 1)
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    assert process.end_ns is not None and "after" in {event.name for event in process.events()}


@pytest.mark.parametrize("way", ["trace function", "thread"])
def test_nested_calls(interrupter: Any, way: str) -> None:
    """A call inside of another one is interrupted: when the outer one has ended, the lock is open."""
    lock = InterruptibleLock()
    for number in itertools.count(1):
        if not is_interrupted(interrupter, IN_THE_LOCK, number, way, lambda: lock.run(lock.run, int)):
            break
        assert is_open(lock), number
    assert number > 30


class Device:
    """What is submitted to it is done at once."""

    def new_event(self) -> list[int]:
        return [0]

    def is_capturing(self) -> bool:
        return False

    def record(self, event: list[int]) -> int:
        event[0] = now_ns()
        return 1

    record_idle = record

    def has_fired(self, event: list[int]) -> bool:
        return True

    def elapsed_ms(self, earlier: list[int], later: list[int]) -> float:
        return (later[0] - earlier[0]) / 1e6


def device_times() -> tuple[InterruptibleLock, Callable[[], object]]:
    times = DeviceTimes(Device(), lambda _: None)

    def work() -> None:
        times._waiting.clear()  # what interrupted calls have left
        pair = times.begin("work", {})
        if pair is not None:
            times.finish(pair)
        times.poll()

    return times._lock, work


def between() -> tuple[InterruptibleLock, Callable[[], object]]:
    pieces = Between()
    return pieces._lock, lambda: (pieces.begins(), pieces.ends())


def chosen() -> tuple[InterruptibleLock, Callable[[], object]]:
    follower = Follower(spans.current(), numbers("1-3", has_periods=True), None)
    return follower._lock, lambda: (follower.look(), follower.step_begins({}))


def profiler() -> tuple[InterruptibleLock, Callable[[], object]]:
    state = kernels._State()
    return state._lock, state.take


HOLDERS = {"device_time": device_times, "between": between, "chosen_steps": chosen, "kernels": profiler}


@pytest.mark.parametrize("way", ["trace function", "thread"])
@pytest.mark.parametrize("name", HOLDERS)
def test_other_holders(folder: Path, interrupter: Any, way: str, name: str) -> None:
    """Whoever takes such a lock leaves it open, wherever its thread is interrupted."""
    rltrace.start(folder)
    lock, work = HOLDERS[name]()
    for number in itertools.count(1):
        if not is_interrupted(interrupter, str(Path(rltrace.__file__).parent), number, way, work):
            break
        assert is_open(lock), number
    assert number > 20
    rltrace.stop()


def test_lock_if_free() -> None:
    """What need not be done now is left out while another thread holds the lock, and done where nobody does."""
    lock = InterruptibleLock()
    with ThreadPoolExecutor(1) as pool:
        held = lock.run(lambda: (pool.submit(lock.run_if_free, int).result(timeout=60), lock.run_if_free(int)))
        assert held == (None, 0)
        lock._lock.acquire()  # as an interrupted holder leaves it
        assert pool.submit(lock.run_if_free, int).result(timeout=60) == 0


def test_no_plain_locks() -> None:
    """Threads of traced programs take no lock that an interruption could leave closed."""
    root = Path(rltrace.__file__).parent
    traced = [path for name in ("record", "hooks", "instrument", "host") for path in (root / name).rglob("*.py")]
    plain = [path.name for path in traced if re.search(r"threading\.R?Lock\(", path.read_text())]
    assert plain == ["lock.py"]


class Inside:
    """A thread that is in a call until it is let go."""

    def __init__(self, lock: InterruptibleLock) -> None:
        self._here, self._go_on = threading.Event(), threading.Event()
        work = (lambda: (self._here.set(), self._go_on.wait()),)
        self._thread = threading.Thread(target=lock.run, args=work, daemon=True)
        self._thread.start()
        assert self._here.wait(60)

    def leave(self) -> None:
        self._go_on.set()
        self._thread.join()


def test_dead_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of a thread that has ended with it, or has left, is taken over; that of one at work is waited for."""
    monkeypatch.setattr(recorder_lock, "PATIENCE_S", 0.02)
    lock = InterruptibleLock()
    thread = threading.Thread(target=lock._lock.acquire)
    thread.start()
    thread.join()
    assert lock.run(lambda: "taken over") == "taken over"

    at_work = Inside(lock)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lock.run, lambda: "waited")
        with pytest.raises(NotYetError):
            waiting.result(timeout=0.1)
        at_work.leave()
        assert waiting.result(timeout=60) == "waited"


@pytest.mark.parametrize("is_followed", [False, True], ids=["free", "taken"])
def test_holder_that_leaves_while_it_is_looked_for(monkeypatch: pytest.MonkeyPatch, *, is_followed: bool) -> None:
    """A holder that leaves between two looks has not left the lock closed, nor has the thread that gets it then."""
    monkeypatch.setattr(recorder_lock, "PATIENCE_S", 0.02)
    lock, has = InterruptibleLock(), InterruptibleLock._has
    first = Inside(lock)
    followers: list[Inside] = []

    def leave_before(self: InterruptibleLock, frame: FrameType | None) -> bool:
        monkeypatch.setattr(InterruptibleLock, "_has", has)
        first.leave()
        followers.extend(Inside(lock) for _ in range(is_followed))
        return has(self, None)

    monkeypatch.setattr(InterruptibleLock, "_has", leave_before)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lock.run, lambda: "waited")
        if is_followed:
            with pytest.raises(NotYetError):
                waiting.result(timeout=0.5)
            followers[0].leave()
        assert waiting.result(timeout=60) == "waited"


def test_errors_of_the_work() -> None:
    """An error of the function goes on, and the lock is open."""
    lock = InterruptibleLock()
    with pytest.raises(ZeroDivisionError):
        lock.run(lambda: lock.run(lambda: 1 / 0))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lock.run, lambda: "open").result(timeout=60) == "open"
