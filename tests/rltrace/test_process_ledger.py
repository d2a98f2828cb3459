"""What a process knows of itself: the kernel's counts, its allocator's, and for how long an answer of that holds."""

from __future__ import annotations

import mmap
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import rltrace
from rltrace import memory
from rltrace.analysis.ledger import ledgers
from rltrace.analysis.observations import Observations
from rltrace.instrument.process_ledger import SAME_BYTES, SAME_CPU_NS, ProcessLedger
from rltrace.recording import Recording

MIB = 1 << 20


def status(pid: int) -> memory.Resident:
    """What the kernel says in a process's status."""
    text = Path(f"/proc/{pid}/status").read_text()
    return memory.Resident(*(int(kib) << 10 for kib in re.findall(r"^Rss(?:Anon|File|Shmem):\s+(\d+) kB", text, re.M)))


def touched(pages: mmap.mmap | bytearray) -> None:
    """Put a page in memory behind each of them."""
    for place in range(0, len(pages), mmap.PAGESIZE):
        pages[place] = 1


def test_pages_are_counted_by_what_is_behind_them() -> None:
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


def test_pages_of_another_process_are_counted_until_it_is_gone() -> None:
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


def test_heaps_of_threads_that_came_later_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not looked for again and again, and yet as many pages as if they were."""
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
    assert after.present_bytes - before.present_bytes >= 8 * 2000 * 4096
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
def test_the_allocator_is_asked_again_only_if_its_answer_can_have_changed(
    ledger: ProcessLedger, monkeypatch: pytest.MonkeyPatch, cpu_ns: int, kib: int, grads: int, moved: bool, asked: int
) -> None:
    """By CPU time used since, pages that came, or an owner's bytes; a sleep or wake-up takes CPU time alone."""
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


def test_what_a_process_repeats_is_as_old_as_the_cpu_time_that_it_has_used_since(
    folder: Path, ledger: ProcessLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    used_ns = [10**9]
    monkeypatch.setattr(time, "process_time_ns", lambda: used_ns[0])
    for worked_ns in (0, SAME_CPU_NS // 2, SAME_CPU_NS // 2):
        used_ns[0] += worked_ns
        ledger.sample()
    rltrace.stop()
    (found,) = ledgers(Observations(Recording.open(folder))).values()
    assert found.apart_ns.tolist() == [0, SAME_CPU_NS / 2, SAME_CPU_NS]
