"""Threads that C made and that call into Python now and then, as Ray's and gRPC's do.

Python makes a state for such a thread before each call and removes it afterwards, with all that the thread has
stored. The system's thread stays the same.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rltrace
from rltrace.events import Span
from rltrace.read.recording import Process
from rltrace.record import spans

pytestmark = [
    pytest.mark.usefixtures("recording_way"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler: cc"),
]

SOURCE = """
#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
struct thread { sem_t asked, done; void (*function)(void); };
static void wait_for(sem_t *sem) { while (sem_wait(sem)); } /* a signal of another test may come */
static void *answer(void *given) {
    struct thread *self = given;
    for (;;) { wait_for(&self->asked); self->function(); sem_post(&self->done); }
}
struct thread *start(void (*function)(void), const char *name) {
    struct thread *self = malloc(sizeof *self);
    pthread_t id;
    sem_init(&self->asked, 0, 0); sem_init(&self->done, 0, 0); self->function = function;
    pthread_create(&id, 0, answer, self); pthread_setname_np(id, name); pthread_detach(id);
    return self;
}
void ask(struct thread *self) { sem_post(&self->asked); wait_for(&self->done); }
"""

Start = Callable[[Callable[[], None], str], Callable[[], None]]
"""Starts a thread of a name that calls a function each time that it is asked, and returns what asks it."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Compile the threads."""
    source = tmp_path_factory.mktemp("foreign") / "threads.c"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", source.with_suffix(".so"), source, "-lpthread"], check=True)
    return ctypes.CDLL(str(source.with_suffix(".so")))


@pytest.fixture
def start(library: ctypes.CDLL) -> Start:
    """Return what starts a thread."""
    library.start.restype = ctypes.c_void_p

    def start(function: Callable[[], None], name: str) -> Callable[[], None]:
        callback = ctypes.CFUNCTYPE(None)(function)
        thread = ctypes.c_void_p(library.start(callback, name.encode()))

        def ask(_callback: Any = callback) -> None:
            library.ask(thread)

        return ask

    return start


def test_records_stay_with_their_thread(folder: Path, start: Start, process_of: Callable[[Path], Process]) -> None:
    """What a thread records is its own, also where another one has begun between two of its calls."""
    rltrace.start(folder)
    begin, end = threading.Barrier(2), threading.Barrier(2)

    def stay() -> None:
        with rltrace.span("theirs"):
            begin.wait()
            end.wait()

    def call() -> None:
        for _ in range(2):
            spans.automatic_span_at("ours", 0, 1)

    ask = start(call, "pool")
    ask()
    other = threading.Thread(target=stay, name="other")
    other.start()
    begin.wait()
    ask()
    end.wait()
    other.join()
    rltrace.stop()
    process = process_of(folder)
    recorded = [event for event in process.events() if isinstance(event, Span)]
    found = sorted((span.name, process.threads[span.thread]) for span in recorded)
    assert found == [*[("ours", "pool")] * 4, ("theirs", "other")]


def test_a_thread_takes_its_segment_again(folder: Path, start: Start, spans_of: Callable[..., list[Span]]) -> None:
    """A thread is named once in the segment that it leaves and takes again, and Python's list of threads stays."""
    rltrace.start(folder)
    rltrace.span_at("first", 0, 1)
    known = threading.enumerate()
    asks = [start(lambda name=name: rltrace.span_at(name, 1, 2), name) for name in ("one", "two")]
    for _ in range(100):
        for ask in asks:
            ask()
    assert threading.enumerate() == known
    rltrace.stop()
    assert len(spans_of(folder)) == 201
    segments = [segment.read_bytes() for segment in folder.glob("processes/*/*.seg")]
    assert sorted(segment.count(b"\xa3one") + segment.count(b"\xa3two") for segment in segments) == [0, 101, 101]
