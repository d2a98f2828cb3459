"""What a process knows of itself: the kernel's counts, its allocator's, and for how long an answer of that holds."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recordings import since_of

import rltrace
from rltrace.host import memory
from rltrace.instrument.memory.process_ledger import SAME_BYTES, SAME_CPU_NS, ProcessLedger

MIB = 1 << 20


ALONE = "RLTRACE_TEST_ALONE"


def in_its_own_process(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a process that has run no other: what others left in a heap, and where, is not known."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        if ALONE in os.environ:
            test(*args, **kwargs)
            return
        rltrace.stop()  # of the fixture's
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"{__file__}::{test.__name__}"]
        done = subprocess.run(command, env=environment | {ALONE: "1"}, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout

    return run


def status(pid: int) -> memory.Resident:
    """What the kernel says in a process's status."""
    text = Path(f"/proc/{pid}/status").read_text()
    return memory.Resident(*(int(kib) << 10 for kib in re.findall(r"^Rss(?:Anon|File|Shmem):\s+(\d+) kB", text, re.M)))


def touched(pages: mmap.mmap | bytearray) -> None:
    """Put a page in memory behind each of them."""
    for place in range(0, len(pages), mmap.PAGESIZE):
        pages[place] = 1


def test_pages_by_what_is_behind_them() -> None:
    """Pages are counted by what is behind them."""
    own = memory.ProcessMemory()
    kept = []
    for size in (7 * MIB, 9 * MIB):
        before = own.resident()
        kept += [mmap.mmap(-1, size), mmap.mmap(-1, 3 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)]
        for pages in kept[-2:]:
            touched(pages)
        after = own.resident()
        assert after.shared_bytes - before.shared_bytes == size
        assert after.anonymous_bytes - before.anonymous_bytes == pytest.approx(3 * size, abs=MIB // 4)
        assert after == pytest.approx(status(os.getpid()), abs=MIB // 4)
        assert own.resident_bytes() == pytest.approx(sum(after), abs=MIB // 4)


def test_forked_child_counts_its_pages() -> None:
    """A forked child counts its own pages, and not its parent's.

    The file that the parent opened would go on telling of the parent.
    """
    own = memory.ProcessMemory()
    own.resident_bytes()
    child = os.fork()
    if child == 0:
        pages = mmap.mmap(-1, 32 * MIB)
        touched(pages)
        seen_bytes, true_bytes = own.resident_bytes(), memory.ProcessMemory().resident_bytes()
        os._exit(0 if abs(seen_bytes - true_bytes) < MIB else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_page_that_a_range_ends_in_counts() -> None:
    pages = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    touched(pages)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert memory.resident_bytes_at(address, mmap.PAGESIZE + 1) == 2 * mmap.PAGESIZE


def test_pages_of_another_process() -> None:
    """Pages of another process are counted until it is gone."""
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"\n"
        other = memory.ProcessMemory(child.pid)
        assert other.resident() == pytest.approx(status(child.pid), abs=MIB // 4)
        assert other.resident().file_bytes > 0
        child.communicate(b"\n")
    with pytest.raises(OSError):
        other.resident()
    other.close()


@in_its_own_process
def test_heaps_of_later_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heaps of threads that came later are counted too.

    Not looked for again and again, and yet as many pages as if they were.
    """
    memory.heap()
    barrier, kept = threading.Barrier(9), []

    def fill() -> None:
        barrier.wait()  # together, so that each gets a heap of its own
        kept.append([bytearray(b"x" * 4096) for _ in range(2000)])  # zeros would have no pages yet
        barrier.wait()

    threads = [threading.Thread(target=fill) for _ in range(8)]
    for thread in threads:
        thread.start()
    before = memory.heap()
    barrier.wait()
    barrier.wait()
    after = memory.heap()
    for thread in threads:
        thread.join()
    assert after.used_bytes - before.used_bytes >= 8 * 2000 * 4096
    # What threads of earlier tests left free may be handed out again: of that the pages are there already.
    assert after.present_bytes - before.present_bytes >= 8 * 2000 * 4096 - before.cached_bytes
    known = memory.heap().present_bytes
    monkeypatch.setattr(memory, "_HEAPS", memory._Heaps(0, [], -1))
    assert known == pytest.approx(memory.heap().present_bytes, abs=MIB // 4)


@pytest.fixture
def ledger(folder: Path) -> ProcessLedger:
    """Of a process that records, and has just begun."""
    rltrace.start(folder, role="worker", rank=0, device={"host": socket.gethostname(), "uuid": "cpu-0"})
    ledger = ProcessLedger()
    ledger.freeze()
    return ledger


@pytest.mark.parametrize(
    ("cpu_ns", "kib", "grads", "moved", "asked"),
    [
        (0, 0, 0, False, 0),
        (SAME_CPU_NS, 0, 0, False, 0),
        (SAME_CPU_NS + 1, 0, 0, False, 1),
        (0, 0, 7, False, 1),
        (0, 4 * SAME_BYTES >> 10, 0, False, 1),
        (SAME_CPU_NS + 1, 0, 0, True, 0),
        (SAME_CPU_NS + 1, 0, 7, True, 1),
        (SAME_CPU_NS + 1, 4 * SAME_BYTES >> 10, 0, True, 1),
    ],
)
def test_allocator_is_asked_if_it_changed(
    ledger: ProcessLedger, monkeypatch: pytest.MonkeyPatch, cpu_ns: int, kib: int, grads: int, moved: bool, asked: int
) -> None:
    """The allocator is asked again only if its answer can have changed.

    By CPU time used since, pages that came, or an owner's bytes; a sleep or wake-up takes CPU time alone.
    """
    ask, answers, used_ns = memory.heap, [], [10**9]
    monkeypatch.setattr(memory, "heap", lambda *args: answers.append(ask(*args)) or answers[-1])
    monkeypatch.setattr(time, "process_time_ns", lambda: used_ns[0])
    held = {"actor.grads_bytes": 0}
    ledger.in_heap["actor"] = lambda: dict(held)
    ledger.sample()
    assert len(answers) == 1
    used_ns[0] += cpu_ns
    held["actor.grads_bytes"] += grads
    pages = mmap.mmap(-1, max(kib << 10, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    touched(pages)
    ledger.sample(moved=moved)
    assert len(answers) - 1 == asked
    rltrace.stop()


def test_repeated_sample_holds_since_it_asked(
    folder: Path, ledger: ProcessLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample that a process repeats holds since the process asked.

    By the stamps: until it asks its allocator again, because it has worked, or an owner's mapping has changed.
    """
    used_ns, mapped = [10**9], {"rollout.weights_bytes": 0}
    monkeypatch.setattr(time, "process_time_ns", lambda: used_ns[0])
    ledger.mapped["Engine"] = lambda: dict(mapped)
    for worked_ns, mapped_bytes in ((0, 0), (SAME_CPU_NS // 2, 0), (SAME_CPU_NS // 2, 0), (0, 8), (SAME_CPU_NS + 1, 8)):
        used_ns[0] += worked_ns
        mapped["rollout.weights_bytes"] = mapped_bytes
        ledger.sample()
    rltrace.stop()
    assert since_of(folder) == [0, 0, 0, 3, 4]


@in_its_own_process
def test_rows_are_the_processs_pages(ledger: ProcessLedger) -> None:
    """What a process held before its model counts once, and all rows add up to its pages.

    What the allocator had free then is no part of the interpreter, or it would count twice.
    """
    rltrace.stop()
    pieces = [bytearray(b"x" * 4096) for _ in range(5000)]
    del pieces[:-1]  # 20 MB that the heap keeps, below the last one
    fresh = ProcessLedger()
    fresh.freeze()
    known = fresh.rows()["interpreter_bytes"]
    assert fresh.rows()["allocator.cached_bytes"] > 10 * MIB
    assert sum(fresh.rows().values()) == pytest.approx(fresh.totals()[os.getpid()], abs=MIB)
    pages = mmap.mmap(-1, 30 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    touched(pages)
    fresh.freeze()
    assert fresh.rows()["interpreter_bytes"] == pytest.approx(known, abs=MIB)


def test_gone_peer_is_forgotten(ledger: ProcessLedger) -> None:
    """A peer that is gone is forgotten, with its file."""
    rltrace.stop()
    ledger.totals()
    files_open = len(os.listdir("/proc/self/fd"))
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None and child.stdout.readline() == b"\n"
        ledger.meet_peer(child.pid)
        assert set(ledger.totals()) == {os.getpid(), child.pid}
        child.communicate(b"\n")
    assert set(ledger.totals()) == {os.getpid()}
    assert len(os.listdir("/proc/self/fd")) == files_open


def test_shared_memory_counts_once(ledger: ProcessLedger) -> None:
    """Shared memory counts once, and is divided anew when it grows."""
    rltrace.stop()
    pages = mmap.mmap(-1, 40 * MIB)
    touched(memoryview(pages)[: 16 * MIB])  # type: ignore[arg-type]
    child = os.fork()
    if child == 0:
        touched(pages)  # what is there already, and the rest
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        os.waitpid(child, os.WUNTRACED)
        ledger.meet_peer(child)
        for seen_mib in (16, 40):
            touched(memoryview(pages)[: seen_mib * MIB])  # type: ignore[arg-type]
            shared = ledger._shared_bytes({os.getpid(): seen_mib * MIB, child: 40 * MIB})
            assert sum(shared.values()) == pytest.approx(40 * MIB, abs=MIB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_host_copy_where_the_host_is_the_device(ledger: ProcessLedger) -> None:
    """A host copy and its owner are one row where the host is the device."""
    ledger.mapped["engine"] = lambda: {"rollout.weights_bytes": 3}
    ledger.in_heap["copy"] = lambda: {"rollout.weights_host_bytes": 5}
    assert ledger.rows()["rollout.weights_bytes"] == 8
    rltrace.stop()


def test_kernels_and_activations_have_rows(ledger: ProcessLedger) -> None:
    """Kernels add up, and what they and activations hold has an owner."""
    before = ledger.rows()["unattributed_bytes"]
    for size_bytes in (30 * MIB, 40 * MIB):
        ledger.add_kernels(size_bytes)
    ledger.activation_bytes = 50 * MIB
    rows = ledger.rows()
    rltrace.stop()
    assert rows["library.kernels_bytes"] == 70 * MIB
    assert rows["unattributed_bytes"] == pytest.approx(before - 120 * MIB, abs=MIB)
