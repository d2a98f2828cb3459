"""Blocked signals are taken one by one, and a stop is none."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from rltrace.host.awaited_signals import take_signal

AWAITED = (signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_each_signal_is_taken_once() -> None:
    """What came before the wait is there at once, and only what was asked for."""
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert take_signal({signal.SIGUSR1}, 60) == signal.SIGUSR1
    assert take_signal({signal.SIGUSR1}, 0) is None
    assert take_signal(AWAITED, 60) == signal.SIGUSR2
    assert take_signal(AWAITED, 0) is None


def waited_s() -> float:
    before_s = time.monotonic()
    assert take_signal(AWAITED, 0.05) is None
    return time.monotonic() - before_s


def test_wait_takes_its_time() -> None:
    """Unless somebody stops the process, which would have to happen three times."""
    assert max(waited_s() for _ in range(3)) >= 0.05


def test_stop_is_no_signal() -> None:
    """A process that is stopped for longer than it wanted to wait was sent nothing."""
    script = f"sleep 0.2; kill -STOP {os.getpid()}; sleep 0.6; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", script]):
        assert take_signal(AWAITED, 0.5) is None


def test_signal_of_a_stopped_process_is_kept() -> None:
    script = f"sleep 0.2; kill -STOP {os.getpid()}; sleep 0.3; kill -USR1 {os.getpid()}; kill -CONT {os.getpid()}"
    taken: list[int | None] = []
    with subprocess.Popen(["sh", "-c", script]) as sending:
        while sending.poll() is None:
            taken.append(take_signal(AWAITED, 0.5))
    taken.append(take_signal(AWAITED, 0))
    assert [number for number in taken if number is not None] == [signal.SIGUSR1]
