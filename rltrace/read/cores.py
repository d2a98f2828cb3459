"""Reads processes on all cores.

Threads do: while the native decoder or numpy works, Python's lock is free. Each thread holds no more than some rows of
one process, 10 to 20 MB. Python's own decoder holds the lock all the time, and processes are read one after another
then.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from rltrace.read import native

Given = TypeVar("Given")
Made = TypeVar("Made")

MOST = 8
"""More threads would wait for Python's lock, not for the decoder."""


def many() -> int:
    """Return how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no such call
        return os.cpu_count() or 1


def each(make: Callable[[Given], Made], given: Sequence[Given]) -> list[Made]:
    """Return what a function makes of each, in their order."""
    return [*ahead(make, given, len(given))]


def ahead(make: Callable[[Given], Made], given: Sequence[Given], waiting: int | None = None) -> Iterator[Made]:
    """Yield what a function makes of each, in their order, while the next ones are made.

    Args:
        make: The function.
        given: What it is given.
        waiting: How many of the next are asked for at most; by default as many as there are cores.
    """
    workers = min(many(), MOST, len(given))
    if workers < 2 or native.library() is None:
        yield from map(make, given)
        return
    pool = ThreadPoolExecutor(workers, "rltrace reader")
    coming: deque[Future[Made]] = deque()
    try:
        for one in given:
            if len(coming) > (workers if waiting is None else waiting):
                yield coming.popleft().result()
            coming.append(pool.submit(make, one))
        while coming:
            yield coming.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
