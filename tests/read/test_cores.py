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


@natively
def test_few_are_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is looked at, no more of the next are made than there are cores, and none once nobody asks."""
    monkeypatch.setattr(cores, "many", lambda: 2)
    begun: list[int] = []
    coming = cores.ahead(lambda number: begun.append(number) or number, range(100))
    assert [next(coming) for _ in range(5)] == [*range(5)]
    assert len(begun) <= 5 + 1 + 2
    coming.close()
    before = len(begun)
    assert before < 100 and [*coming] == [] and len(begun) == before


def test_python_reads_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a native decoder, threads would only wait for each other."""
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(cores, "many", lambda: 2)
    for way in (cores.each, cores.ahead):
        assert [*way(lambda _: threading.current_thread(), range(3))] == [threading.current_thread()] * 3
