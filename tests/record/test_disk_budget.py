"""A Recording never takes more of a host's disk than its budget, whoever is killed meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import budgeted_runs
import pytest

import rltrace
from rltrace.events import Span
from rltrace.read.recording import Process, Recording
from rltrace.record import disk_account, disk_budget, lifecycle, spans
from rltrace.record.disk_account import DiskAccount

MIB = 1 << 20


@pytest.fixture(autouse=True)
def budget(monkeypatch: pytest.MonkeyPatch) -> int:
    """Ten MiB for this process."""
    monkeypatch.setenv(disk_budget.VARIABLE, "10MiB")
    return 10 * MIB


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("20GB", 20 * 10**9), ("1.5 tib", 3 << 39), ("2000000", 2_000_000), ("64Mi", 64 * MIB), ("none", None)],
)
def test_a_budget_is_read(text: str, size_bytes: int | None) -> None:
    """Sizes are decimal or binary, and `none` is no bound."""
    assert disk_budget.parse(text) == size_bytes


@pytest.mark.parametrize("text", ["", "20 apples", "-1GB", "1kB"])
def test_no_budget_is_refused(text: str) -> None:
    """What is no size, or too little for any record, is refused."""
    with pytest.raises(ValueError, match=r"write 20GB|name more"):
        disk_budget.parse(text)


def test_the_default_follows_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word of the user it is 20 GB, or a tenth of what is free."""
    free_bytes = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    default = disk_budget.default(tmp_path)
    assert default is not None and abs(default - min(disk_budget.MOST_BYTES, free_bytes // 10)) < 256 * MIB
    monkeypatch.setattr(disk_budget, "MOST_BYTES", 50 * MIB)
    assert disk_budget.default(tmp_path) == 50 * MIB


def test_the_oldest_goes(folder: Path, process_of: Callable[[Path], Process], budget: int) -> None:
    """One process drops its own oldest segments, keeps what is newest, and readers count what went."""
    rltrace.start(folder)
    for n in range(20_000):
        with rltrace.span("work", n=n, filler="x" * 900):
            pass
        if n % 1000 == 0:
            assert budgeted_runs.disk_bytes(folder) <= budget
    rltrace.stop()
    assert budget - 2 * MIB < budgeted_runs.disk_bytes(folder) <= budget, "not more goes than has to"
    process = process_of(folder)
    kept = [event.args["n"] for event in process.events()]
    assert kept == list(range(kept[0], 20_000)) and kept[0] > 5_000
    assert process.dropped_segments >= 8 and process.damaged_segments == process.lost_events == process.torn == 0


def test_brief_segments_go_last(folder: Path, process_of: Callable[[Path], Process], budget: int) -> None:
    """A segment that was made brief is as old as before, and stays until all that are whole have gone."""
    rltrace.start(folder)
    for n in range(5_000):
        rltrace.span_at("work", n, n + 1, filler="x" * 900)
    (process,) = folder.glob("processes/*")
    _, _, third, *_ = sorted(process.glob("*.seg"))
    before = third.stat().st_mtime_ns
    assert disk_account.DiskAccount(folder, "keeper-1-1").replace(third, third.read_bytes()[:1000])
    assert third.stat().st_mtime_ns == before
    for n in range(20_000):
        rltrace.span_at("work", n, n + 1, filler="x" * 900)
    rltrace.stop()
    first, *others = sorted(process.glob("*.seg"))
    assert first == third and int(others[0].stem) > 8, "all that were whole then are gone"
    assert budgeted_runs.disk_bytes(folder) <= budget
    assert process_of(folder).dropped_segments > 8


def test_a_newcomer_gets_room(folder: Path, budget: int) -> None:
    """A process that begins when the budget is spent takes the place of what is oldest, of a process that lives."""
    rltrace.start(folder)
    for n in range(12_000):
        rltrace.span_at("old", n, n + 1, filler="x" * 900)
    program = (
        "import rltrace, sys\n"
        "from rltrace.record import lifecycle\n"
        "lifecycle.join(sys.argv[1])\n"
        "for n in range(3000): rltrace.span_at('new', n, n + 1, filler='x' * 900)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RLTRACE_DIR"}
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True, env=environment)
    rltrace.stop()
    old, new = Recording.open(folder).processes
    assert len([event for event in new.events() if event.name == "new"]) == 3000 and new.lost_events == 0
    assert old.dropped_segments and old.damaged_segments == 0
    assert budgeted_runs.disk_bytes(folder) <= budget


def test_what_is_written_stays(folder: Path, process_of: Callable[[Path], Process], budget: int) -> None:
    """Where threads that live fill the budget, what they cannot write is lost and counted, and nothing is over."""
    rltrace.start(folder)
    written, go_on = threading.Barrier(31), threading.Event()

    def work(thread: int) -> None:
        for n in range(2000):
            rltrace.span_at(f"thread {thread}", n, n + 1, filler="x" * 400)
        written.wait()
        go_on.wait()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    written.wait()
    assert budgeted_runs.disk_bytes(folder) <= budget
    go_on.set()
    for thread in threads:
        thread.join()
    rltrace.stop()
    process = process_of(folder)
    kept = [event for event in process.events() if isinstance(event, Span)]
    assert process.lost_events > 0 and process.orphans == process.torn == 0
    assert 60_000 - process.dropped_bytes // 400 <= len(kept) + process.lost_events <= 60_000


def test_a_full_segment_is_known_as_closed(folder: Path) -> None:
    """Whatever the last record's length: a segment that its process has left never looks like one that it writes to."""
    rltrace.start(folder)
    for length in range(900, 1000):
        for _ in range(300):
            rltrace.span_at("work", 1, 2, filler="x" * length)
    (process,) = folder.glob("processes/*")
    *left, _ = sorted(process.glob("*.seg"))
    assert {one.path for one in disk_account.closed_in(process)} == set(left) and len(left) > 3
    rltrace.stop()


def test_no_bound_has_no_account_to_keep(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `none` nothing is counted and nothing is dropped."""
    monkeypatch.setenv(disk_budget.VARIABLE, "none")
    rltrace.start(folder)
    for n in range(15_000):
        rltrace.span_at("work", n, n + 1, filler="x" * 900)
    current = spans.current()
    assert current is not None and current.budget_bytes is None
    rltrace.stop()
    assert budgeted_runs.disk_bytes(folder) > 13 * MIB


def test_a_half_done_removal_is_finished(folder: Path, process_of: Callable[[Path], Process]) -> None:
    """Whoever was killed between two steps of a removal leaves it to the next, and it counts once."""
    rltrace.start(folder)
    for n in range(4000):
        rltrace.span_at("work", n, n + 1, filler="x" * 900)
    rltrace.stop()
    before = disk_account.DiskAccount(folder, "other-1-1")
    held_bytes = before.held_bytes()
    oldest = min(folder.glob("processes/*/*.seg"))
    size_bytes = oldest.stat().st_size
    with before._opened() as descriptor:  # as a process that is killed behind its first step
        at = disk_account._entry_of(disk_account._read(descriptor), oldest.parent.name)
        assert at is not None
        pending = disk_account._PENDING.pack(at, disk_account.on_disk(size_bytes), int(oldest.stem), size_bytes)
        os.pwrite(descriptor, pending, disk_account._PENDING_AT)
    for _ in range(2):
        with before._locked():
            pass
    assert not oldest.exists()
    assert before.held_bytes() == held_bytes - disk_account.on_disk(size_bytes)
    process = process_of(folder)
    assert (process.dropped_segments, process.dropped_bytes) == (1, size_bytes)


def test_a_broken_account_is_no_reason_to_fail(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is no account keeps a process from recording, which is said, and not from running."""
    folder.mkdir()
    (folder / disk_account.FILE).write_text("no account")
    assert lifecycle.join(folder) is None
    assert "no account of a disk budget" in capsys.readouterr().err


def test_a_stopped_process_waits_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped while it waits for the lock, as its holder is, still gets it when both go on."""
    holder, waiting = (DiskAccount(tmp_path, f"host-{pid}-1") for pid in (1, 2))
    lock = holder._locked()
    lock.__enter__()
    waits = []

    def stopped(_seconds: float) -> None:
        waits.append(time.monotonic())
        monkeypatch.setattr(time, "monotonic", lambda: waits[0] + 3600)
        if len(waits) == 3:
            lock.__exit__(None, None, None)

    monkeypatch.setattr(time, "sleep", stopped)
    with waiting._locked():
        assert len(waits) == 3


def test_the_lock_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    """Who does not get the lock does without what it wanted to write."""
    holder, waiting = (DiskAccount(tmp_path, f"host-{pid}-1") for pid in (1, 2))
    with holder._locked(), pytest.raises(BlockingIOError), waiting._locked():
        pass


def test_kills_never_go_over(tmp_path: Path) -> None:
    """Processes that are killed at random moments and replaced stay within the budget, and leave no hole that nobody
    counted."""
    folder = tmp_path / "run"
    run = budgeted_runs.record(folder, budget_bytes=8 * MIB, workers=3, kills=12, between=80_000)
    assert budgeted_runs.check(folder, run) > 10_000, "too little was dropped to prove anything"
