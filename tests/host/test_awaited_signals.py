"""Blocked signals are taken one by one, and a stop is none.

In a process of its own: a signal to one with several threads goes to any that does not block it, which ends pytest's.
"""

from __future__ import annotations

import subprocess
import sys

HEAD = """
import os, subprocess, time
from signal import SIG_BLOCK, SIGCONT, SIGSTOP, SIGUSR1, SIGUSR2, pthread_sigmask
from rltrace.host.awaited_signals import take_signal
both, us = {SIGUSR1, SIGUSR2}, os.getpid()
pthread_sigmask(SIG_BLOCK, both)

def stopped(then, seconds):  # while somebody stops this process
    script = f"sleep 0.2; kill -STOP {us}; sleep {seconds}; {then} kill -CONT {us}"
    taken = []
    with subprocess.Popen(["sh", "-c", script]) as stopping:
        while stopping.poll() is None:
            taken.append(take_signal(both, 0.3))
    taken.append(take_signal(both, 0))
    return [number for number in taken if number is not None]
"""


def printed(body: str) -> str:
    done = subprocess.run([sys.executable, "-c", HEAD + body], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_each_signal_is_taken_once() -> None:
    """What came before the wait is there at once, and only what was asked for."""
    body = "os.kill(us, SIGUSR2); os.kill(us, SIGUSR1)\n"
    body += "print(take_signal({SIGUSR1}, 60), take_signal({SIGUSR1}, 0), take_signal(both, 60), take_signal(both, 0))"
    assert printed(body) == "10 None 12 None"


def test_wait_takes_its_time() -> None:
    body = "before_s = time.monotonic(); print(take_signal(both, 0.05), time.monotonic() - before_s)"
    taken, waited_s = printed(body).split()
    assert taken == "None" and float(waited_s) >= 0.05


def test_stop_is_no_signal() -> None:
    """A process that is stopped for longer than it wanted to wait was sent nothing."""
    assert printed("print(stopped('', 0.6))") == "[]"


def test_signal_of_a_stopped_process_is_kept() -> None:
    assert printed("print(stopped(f'kill -USR1 {us};', 0.3))") == "[10]"
