"""What is between two pieces of work: the part in which the output of the last one was kept."""

from __future__ import annotations

import gc
import itertools
import signal
from collections.abc import Iterator

import pytest

from rltrace.instrument.torch.between import Between


class Output:
    """Something that weak references may refer to, as to a tensor."""


class LateError(Exception):
    """The timeout of a program."""


@pytest.fixture
def alarm() -> Iterator[None]:
    """An alarm whose handler raises; no collection is in its way."""

    def ring(_number: int, _frame: object) -> None:
        raise LateError

    before = signal.signal(signal.SIGALRM, ring)
    gc.disable()
    yield
    gc.enable()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_alarm_while_the_output_goes(alarm: None) -> None:
    """An alarm that comes in a long call of C, which drops the output at its end, reaches the program."""
    kept = [Output()]
    between = Between()
    between.ends(kept[0])
    with pytest.raises(LateError):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        max(itertools.repeat(0, 2_000_000), default=kept.pop())  # at its end nobody has the output any more
        for _ in range(2):
            pass
    assert len(between._dropped_ns) == 1


def test_time_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first output's time does not count for the second one."""
    between = Between()
    first, second = Output(), Output()
    between.ends(first)
    between.ends(second)
    del first
    assert between._dropped_ns == []
    del second
    assert len(between._dropped_ns) == 1
