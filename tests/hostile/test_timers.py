"""Programs whose timers interrupt them all the time: each error that a handler raises is caught by the program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, json, random, signal, sys, threading, time
import numpy  # an import from outside the standard library: here the process joins its run

seed = int(sys.argv[1])
chance = random.Random(seed)
kind = ("handler", "restoring", "thread")[seed % 3]
delay_s = chance.uniform(0.0002, 0.005)
made = chance.choice([TimeoutError, ValueError, RuntimeError, type("LateError", (Exception,), {})])
rounds = min(100, int(0.3 / delay_s))

try:
    import rltrace
    span, counter = rltrace.span, rltrace.counter
except ImportError:
    raise SystemExit("rltrace is not installed")


class Loss:
    def item(self):
        return sum(range(20)) / 3


def work():
    for n in range(50):
        with span("work", loss=Loss(), wide=2**70 if n % 7 == 0 else n, array=numpy.float32(1)) as opened:
            counter("value", n)
            with span("inner"):
                opened.set(late=Loss())


def ring(number, frame):
    if kind == "restoring":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
    with span("ring"):
        pass
    raise made("late") if made is not TimeoutError or seed % 2 else made()


main_ident = threading.get_ident()


def set_from_thread():
    time.sleep(delay_s)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main_ident), ctypes.py_object(made))


caught = 0
for _ in range(rounds):
    deadline = time.monotonic() + 5
    signal.signal(signal.SIGALRM, ring)
    setter = threading.Thread(target=set_from_thread)
    try:
        if kind == "thread":
            setter.start()
        else:
            signal.setitimer(signal.ITIMER_REAL, delay_s)
        while time.monotonic() < deadline:
            work()
    except made:
        caught += 1
    if kind == "thread":
        setter.join()
print(json.dumps([rounds, caught]))
"""


@pytest.mark.parametrize("seed", range(100))
def test_every_error_is_caught(tmp_path: Path, seed: int) -> None:
    """Traced and untraced, with timers from 0.2 to 5 ms, by handlers and by `PyThreadState_SetAsyncExc`."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    plain = [sys.executable, str(program), str(seed)]
    traced = [sys.executable, "-m", "rltrace", "exec", "--out", str(tmp_path / "run"), "--", *plain]
    for command in (plain, traced):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        rounds, caught = json.loads(done.stdout)
        assert caught == rounds, command
