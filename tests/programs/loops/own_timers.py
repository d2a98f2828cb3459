"""A loop's own timers: what its author would put around the parts of a step, written as JSON at the end."""

import contextlib
import json
import os
import time

DEVICE = os.environ.get("LOOP_DEVICE", "cpu")
"""Where the loop computes."""

WIDTHS = {"cpu": 1, "cuda": 16}
"""How many times as wide a model is there as in a loop that is quick on a CPU."""

_TIMES = []
"""Name, first instant and last one of each part."""


@contextlib.contextmanager
def timed(name):
    """Time one part; `step` is the whole of one, `idle` a part in which nothing computes."""
    start_ns = time.monotonic_ns()
    try:
        yield
    finally:
        _TIMES.append((name, start_ns, time.monotonic_ns()))


def write():
    """Write the times of this process, if it is the one whose times are wanted."""
    if int(os.environ.get("RANK", "0")) == 0:
        with open(os.environ["OWN_TIMERS"], "w") as out:
            json.dump(_TIMES, out)
