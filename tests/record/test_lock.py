"""Whatever interrupts a thread of ours at whatever bytecode, the others get the lock after it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bytecode_tracer
import pytest

import rltrace
from rltrace.read.recording import Recording
from rltrace.record import lock as recorder_lock
from rltrace.record import spans
from rltrace.record.lock import InterruptibleLock

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


def test_dead_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of a thread that has ended with it, or has left, is taken over; that of one at work is waited for."""
    monkeypatch.setattr(recorder_lock, "PATIENCE_S", 0.02)
    lock = InterruptibleLock()
    thread = threading.Thread(target=lock._lock.acquire)
    thread.start()
    thread.join()
    assert lock.run(lambda: "taken over") == "taken over"

    inside, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=lock.run, args=(lambda: (inside.set(), go_on.wait()),))
    thread.start()
    inside.wait()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lock.run, lambda: "waited")
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.1)
        go_on.set()
        assert waiting.result(timeout=60) == "waited"
    thread.join()


def test_errors_of_the_work() -> None:
    """An error of the function goes on, and the lock is open."""
    lock = InterruptibleLock()
    with pytest.raises(ZeroDivisionError):
        lock.run(lambda: lock.run(lambda: 1 / 0))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lock.run, lambda: "open").result(timeout=60) == "open"
