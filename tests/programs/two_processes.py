"""A driver with steps and a worker that it forks: many calls with names of their own, arrows, an error, and a death.

`two_processes.py STEPS CALLS SECONDS`: in each step the worker makes so many calls in about so long. Behind the last
one it is killed in the middle of a phase. In front of the third it waits for the file that `GO_ON` names, if it does.
"""

import os
import signal
import sys
import time

import rltrace

steps, calls, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
orders, to_worker = os.pipe()
answers, to_driver = os.pipe()


def work() -> None:
    """Do what the driver orders, until it is killed."""
    rltrace.identify(role="worker", rank=0)
    while order := os.read(orders, 1):
        with rltrace.span("worker.call"):
            rltrace.flow(f"order:{order[0]}", "in")
            with rltrace.phase("actor.update"):
                make_calls(time.monotonic())
        os.write(to_driver, order)
        if order[0] == steps - 1:
            with rltrace.phase("ref.log_prob"):
                os.write(to_driver, b"!")
                time.sleep(60)


def make_calls(began: float) -> None:
    """Make the calls, at an even rate; ten of each name."""
    for number in range(calls):
        with rltrace.span(f"call.{number // 10}", number=number):
            pass
        if number % 100 == 0:
            time.sleep(max(0.0, began + seconds * number / calls - time.monotonic()))


def drive(worker: int) -> None:
    """Run the steps, and kill the worker."""
    for step in range(steps):
        while step == 2 and "GO_ON" in os.environ and not os.path.exists(os.environ["GO_ON"]):
            time.sleep(0.05)
        with rltrace.span("step", step=step, tokens=100):
            with rltrace.span("order"):
                rltrace.flow(f"order:{step}", "out")
                os.write(to_worker, bytes([step]))
            os.read(answers, 1)
            try:
                with rltrace.phase("reward"):
                    raise ValueError("no answer")
            except ValueError:
                pass
    os.read(answers, 1)
    os.kill(worker, signal.SIGKILL)


worker = os.fork()
if worker == 0:
    work()
    os._exit(0)
rltrace.identify(role="driver")
drive(worker)
os.waitpid(worker, 0)
