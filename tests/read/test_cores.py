"""Processes are read on all cores, and what is made of them comes in their order."""

from __future__ import annotations

import threading

import pytest

from rltrace.read import cores, native

natively = pytest.mark.skipif(native.library() is None, reason="Python's decoder holds the lock")


@natively
def test_each_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are at work at once, and the later one may be ready first."""
    monkeypatch.setattr(cores, "many", lambda: 2)
    second_is_ready = threading.Event()

    def make(number: int) -> int:
        if number == 0:
            assert second_is_ready.wait(10)
        elif number == 1:
            second_is_ready.set()
        return number * number

    assert cores.each(make, range(20)) == [number * number for number in range(20)]


@natively
def test_the_first_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one of them raises comes out, and those that have not begun do not begin."""
    monkeypatch.setattr(cores, "many", lambda: 2)
    begun = []

    def make(number: int) -> None:
        begun.append(number)
        if number < 2:
            raise MemoryError(number)
        threading.Event().wait(0.01)

    with pytest.raises(MemoryError):
        cores.each(make, range(1000))
    assert len(begun) < 1000


def test_python_reads_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a native decoder, threads would only wait for each other."""
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(cores, "many", lambda: 2)
    assert cores.each(lambda _: threading.current_thread(), range(3)) == [threading.current_thread()] * 3
