"""A process that forks: the child's records and counts are its own, the parent's stay intact."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import rltrace
from rltrace.events import Span
from rltrace.read.recording import Process, Recording
from rltrace.record import spans


def _fork(function: Callable[[], object]) -> int:
    """Run `function` in a forked child; the child's exit status."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # a child that hangs fails instead
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _processes(folder: Path) -> tuple[Process, list[Process]]:
    """The process of this test, and its children by when they began."""
    processes = Recording.open(folder).processes
    (parent,) = (process for process in processes if process.pid == os.getpid())
    return parent, [process for process in processes if process is not parent]


def _names(process: Process) -> list[str]:
    return [event.name for event in process.events()]


def _record(*names: str) -> None:
    for name in names:
        with rltrace.span(name):
            pass


def test_child_has_own_folder(folder: Path) -> None:
    """A forked child records into a folder of its own."""
    rltrace.start(folder, role="driver")
    _record("before")
    with rltrace.span("around"):
        assert _fork(lambda: _record("child 1", "child 2")) == 0
    _record("after")
    rltrace.stop()
    parent, (child,) = _processes(folder)
    assert _names(parent) == ["before", "around", "after"]
    assert _names(child) == ["child 1", "child 2"]
    assert (child.parent, child.role) == (parent.key, "driver")
    assert child.identity["ppid"] == parent.pid


def test_silent_child_leaves_nothing(folder: Path) -> None:
    """A forked child that records nothing leaves nothing."""
    rltrace.start(folder)
    assert _fork(lambda: rltrace.identify(role="nobody", rank=3)) == 0
    rltrace.stop()
    parent, children = _processes(folder)
    assert children == []
    assert (parent.role, parent.rank) == ("main", None), "what a child says of itself is not its parent's"


def test_child_counts_hooks_from_start(folder: Path) -> None:
    """Hooks of a forked child start counting at zero.

    What fired before the child's first record counts too; it leaves as after a kill, so what fired later may not.
    """
    rltrace.start(folder)
    hook = spans.current().hook("fsdp2", "m:A.f", "installed")

    def child() -> None:
        hook.fired()
        hook.fired()
        _record("child")
        hook.fired()

    for _ in range(5):
        hook.fired()
    assert _fork(child) == 0
    hook.fired()
    rltrace.stop()
    parent, (forked,) = _processes(folder)
    assert [process.hooks[0]["fired"] for process in (parent, forked)] == [6, 2]
    assert parent.lost_events == forked.lost_events == 0


def test_failing_hook_in_silent_child(folder: Path) -> None:
    """A hook that fails in a forked child is reported even if the child records nothing."""
    rltrace.start(folder)
    hooks = spans.current()
    hooks.hook("fsdp2", "m:A.f", "installed")
    assert _fork(lambda: hooks.hook("fsdp2", "m:A.f", "failed", "TypeError: ours")) == 0
    rltrace.stop()
    parent, (forked,) = _processes(folder)
    assert [process.hooks[0]["state"] for process in (parent, forked)] == ["installed", "failed"]
    assert forked.hooks[0]["reason"] == "TypeError: ours"


def test_child_counts_its_own_losses(folder: Path) -> None:
    """Events lost by a forked child are its own."""
    rltrace.start(folder)

    def child() -> None:
        rltrace.counter("huge", 2**70)
        _record("child")

    assert _fork(child) == 0
    rltrace.stop()
    parent, (forked,) = _processes(folder)
    assert (parent.lost_events, forked.lost_events) == (0, 1)


def test_fork_does_not_hang_the_child(folder: Path) -> None:
    """A fork while the recorder is at work in another thread does not hang the child.

    The lock is held at the moment of the fork, by a thread that the child does not have.
    """
    rltrace.start(folder)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        release.wait()

    thread = threading.Thread(target=spans.current().run_alone, args=(hold,))
    thread.start()
    held.wait()

    def child() -> None:
        rltrace.counter("huge", 2**70)
        _record("child")
        rltrace.stop()

    try:
        assert _fork(child) == 0
    finally:
        release.set()
        thread.join()
    rltrace.stop()
    _, (forked,) = _processes(folder)
    assert _names(forked) == ["child"] and forked.end_ns is not None


def test_forks_disturb_no_thread(folder: Path) -> None:
    """Forks while other threads write disturb nobody."""
    rltrace.start(folder)
    go_on, left = True, [0, 0, 0]

    def work(worker: int) -> None:
        while go_on:
            with rltrace.span("work", worker=worker, n=left[worker], filler="x" * 100):
                left[worker] += 1

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    statuses = [_fork(lambda: _record(*"abcdefghij")) for _ in range(15)]
    go_on = False
    for thread in threads:
        thread.join()
    rltrace.stop()

    assert statuses == [0] * 15
    parent, children = _processes(folder)
    assert [_names(child) for child in children] == [list("abcdefghij")] * 15
    spans = [event for event in parent.events() if isinstance(event, Span) and event.end_ns]
    for worker in range(3):
        assert [s.args["n"] for s in spans if s.args["worker"] == worker] == list(range(left[worker]))
    assert sum(left) > 100 and parent.torn == parent.orphans == parent.lost_events == 0


def test_multiprocessing_child_ends_well(folder: Path) -> None:
    """A child of multiprocessing ends its part in good order.

    Forked ones leave by `os._exit`, without atexit; its own children name it as their parent.
    """
    rltrace.start(folder)
    context = multiprocessing.get_context("fork")

    def child() -> None:
        _record("child")
        grandchild = context.Process(target=_record, args=("grandchild",))
        grandchild.start()
        grandchild.join()

    process = context.Process(target=child)
    process.start()
    process.join()
    rltrace.stop()
    parent, children = _processes(folder)
    first, second = children
    assert [_names(first), _names(second)] == [["child"], ["grandchild"]]
    assert (first.parent, second.parent) == (parent.key, first.key)
    assert Recording.open(folder).is_complete
