"""Damage: it costs what is damaged, is counted, and no figure that rests on it goes without a warning."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mutations
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import Run
from rltrace_exporters.archive import Archive
from rltrace_exporters.perfetto import Perfetto

import rltrace
from rltrace.analysis import summarize
from rltrace.events import Span
from rltrace.read import gate
from rltrace.read.recording import Process, Recording
from rltrace.record import checksum, spans


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    return Run.of_each_kind(tmp_path_factory.mktemp("runs"))


@settings(max_examples=120, derandomize=True, database=None, deadline=None)
@given(seed=st.integers(0, 2**48))
def test_some_damage(runs: list[Run], seed: int) -> None:
    """A part of what `make test-hostile` tries: no traceback, no hang, no wrong figure without a warning."""
    mutations.check(runs[seed % len(runs)], random.Random(seed))


# ---------------------------------------------------------------- seals


def _segment(run: Run) -> Path:
    return sorted(run.folder.glob("processes/*/*.seg"))[0]


def test_flip_in_sealed_segment_shows(runs: list[Run], tmp_path: Path) -> None:
    """Every flipped bit in a sealed segment is noticed.

    Whichever bit it is.
    """
    sealed = _segment(runs[0])
    process, content = Process(sealed.parent), sealed.read_bytes()
    assert process.check_segment(sealed.name, content)
    for bit in range(0, 8 * len(content), 7):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not process.check_segment(sealed.name, bytes(flipped))
    assert process.damaged_segments == len(range(0, 8 * len(content), 7))


def test_full_and_closed_segments_are_sealed(folder: Path, process_of: Callable[[Path], Process]) -> None:
    """Those of threads that are gone too, and each once; what is dropped is not missed."""
    rltrace.start(folder, max_bytes=3 << 20)

    def work() -> None:
        for n in range(20_000):
            with rltrace.span("a", text="x" * 100, n=n):
                pass

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rltrace.stop()
    process = process_of(folder)
    assert list(process.events()) and process.dropped_segments > 0
    assert (process.damaged_segments, process.unsealed, process.torn, process.damaged_lines) == (0, {}, 0, 0)
    seals = [line for line in _lines(process.folder) if line["kind"] == "seal"]
    assert len({line["segment"] for line in seals}) == len(seals)


def test_nothing_is_written_behind_a_seal(folder: Path, process_of: Callable[[Path], Process]) -> None:
    """A signal handler may hold on to the old segment's `write` across all steps: it is refused."""
    rltrace.start(folder)
    rltrace.counter("a", 1)
    stale = spans._local.write
    for _ in range(2):
        with rltrace.span("fills it", text="x" * 60_000):
            pass
    assert spans._local.write is not stale
    with pytest.raises(ValueError):
        stale(b"\0")
    rltrace.stop()
    process = process_of(folder)
    assert len(list(process.events())) == 3 and process.damaged_segments == 0


def test_a_missing_segment_is_counted(runs: list[Run]) -> None:
    with runs[0].copied() as copy:
        next(copy.glob("processes/*/*.seg")).unlink()
        assert [loss.damaged_segments for loss in summarize(Recording.open(copy)).losses] == [1]


def test_killed_process_names_unsealed(runs: list[Run]) -> None:
    """A killed process names the segments that are not sealed."""
    (unsealed,) = runs[1].summary.unsealed
    (worker,) = (p for p in runs[1].summary.processes if p.key == unsealed.process_key)
    assert worker.killed_by == "SIGKILL" and unsealed.segments == 1 and unsealed.bytes > 1000


def test_time_outside_of_life_is_dropped(runs: list[Run]) -> None:
    """A time outside of its process's life is dropped.

    In a segment that nobody closed: of 40 flips of high bits of times, each leaves the run as long as it was.
    """
    with runs[1].copied() as copy:
        (segment,) = (copy / "processes" / runs[1].summary.unsealed[0].process_key).glob("*.seg")
        content = segment.read_bytes()
        start_ns = Process(segment.parent).start_ns
        life_ns = range(start_ns, start_ns + 3600 * 10**9)
        numbers = (at for at in range(len(content)) if content[at] == 0xCF)
        places = [at for at in numbers if int.from_bytes(content[at + 1 : at + 9], "big") in life_ns][:20]
        counted = 0
        assert len(places) == 20
        for at in places:
            for bit in (1 << 4, 1 << 6):
                flipped = bytearray(content)
                flipped[at + 3] ^= bit
                segment.write_bytes(flipped)
                summary = summarize(Recording.open(copy))
                assert summary.run.seconds <= runs[1].summary.run.seconds + 0.02
                counted += bool(summary.losses)
        assert counted > len(places)  # nobody reads the times of arrows


def test_last_span_may_be_long(folder: Path, process_of: Callable[[Path], Process]) -> None:
    """The last span of a killed process may be long.

    Nobody watched, and its end is far behind all that was recorded before: it is no damaged time.
    """
    program = (
        f"import os, rltrace, time; rltrace.start({str(folder)!r})\n"
        "rltrace.counter('c', 1)\n"
        "with rltrace.span('a'): time.sleep(0.2)\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    process = process_of(folder)
    _, event = process.events()
    assert isinstance(event, Span) and event.end_ns is not None and event.seconds >= 0.2
    assert process.torn == 0


# ---------------------------------------------------------------- lines


def _lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "process.jsonl").read_text().splitlines()]


@pytest.fixture
def two_lines(folder: Path) -> Iterator[Path]:
    """The lines of a process with a hook."""
    rltrace.start(folder, rank=3)
    spans.current().hook("i", "m:f", "installed").fired()
    rltrace.stop()
    (lines,) = folder.glob("processes/*/process.jsonl")
    yield lines


def test_a_damaged_line_costs_itself(folder: Path, two_lines: Path) -> None:
    """And is counted: a figure in it that has changed is not believed."""
    two_lines.write_bytes(two_lines.read_bytes().replace(b'"state": "installed"', b'"state": "instolled"'))
    summary = summarize(Recording.open(folder))
    assert not summary.hooks and [loss.damaged_lines for loss in summary.losses] == [1]
    assert [(p.rank, p.state) for p in summary.processes] == [(3, "ended")]


def test_a_missing_line_is_counted(folder: Path, two_lines: Path) -> None:
    lines = two_lines.read_bytes().splitlines(keepends=True)
    two_lines.write_bytes(b"".join(line for line in lines if b'"hook"' not in line))
    assert [loss.damaged_lines for loss in summarize(Recording.open(folder)).losses] == [1]


def test_lines_of_before_checksums_read(folder: Path, two_lines: Path) -> None:
    """As they always did: a state that is a number costs its line."""
    old = [{k: v for k, v in line.items() if k not in ("sum", "line")} for line in _lines(two_lines.parent)]
    old = [line for line in old if line["kind"] != "seal"]
    two_lines.write_text("".join(json.dumps(line) + "\n" for line in old))
    summary = summarize(Recording.open(folder))
    assert not summary.losses and [hook.state for hook in summary.hooks] == ["installed"]
    old = [{**line, "state": 7} if line["kind"] == "hook" else line for line in old]
    two_lines.write_text("".join(json.dumps(line) + "\n" for line in old))
    summary = summarize(Recording.open(folder))
    assert not summary.hooks and [loss.damaged_lines for loss in summary.losses] == [1]


def test_a_process_whose_identity_is_lost(runs: list[Run]) -> None:
    """Its folder's name says who it is, its neighbour the clock of its host: the run is as long as it was."""
    with runs[0].copied() as copy:
        driver = next(p for p in runs[0].summary.processes if p.role == "driver")
        (copy / "processes" / driver.key / "process.jsonl").write_bytes(b"")
        with_worker = next(p for p in runs[0].summary.processes if p.role != "driver").key
        shutil.rmtree(copy / "processes" / with_worker)
        summary = summarize(Recording.open(copy))
    (process,) = summary.processes
    assert (process.host, process.pid, process.key) == (driver.host, driver.pid, driver.key)
    assert summary.run.seconds <= runs[0].summary.run.seconds and process.spans == driver.spans
    assert [loss.process_key for loss in summary.losses] == [driver.key]


def test_counts_are_those_of_the_end(folder: Path, two_lines: Path) -> None:
    """`counts.u64` has no checksum of its own: the last line says what was in it."""
    (two_lines.parent / "counts.u64").write_bytes(b"\xff" * 16384)
    summary = summarize(Recording.open(folder))
    assert [hook.fired for hook in summary.hooks] == [1] and not summary.losses


@pytest.mark.parametrize(
    ("name", "content"),
    [("manifest.json", None), ("clocks.jsonl", b"{}\n"), ("untraced.jsonl", b"7\n"), ("ending.json", b"{]")],
)
def test_damage_of_the_run_is_named(runs: list[Run], name: str, content: bytes | None) -> None:
    """By the file that has it."""
    with runs[0].copied() as copy:
        file = copy / name
        file.write_bytes(file.read_bytes().replace(b'"train.py"', b'"brain.py"') if content is None else content)
        assert name in [loss.process_key for loss in summarize(Recording.open(copy)).losses]


def test_archive_is_signed_too(runs: list[Run], tmp_path: Path) -> None:
    """An archive is signed as its folder is.

    Paths are shortened in it: what was whole is signed anew, what was damaged stays so.
    """
    with runs[0].copied() as copy:
        lines = next(copy.glob("processes/*/process.jsonl"))
        lines.write_bytes(lines.read_bytes().replace(b'"state": "installed"', b'"state": "instolled"'))
        for folder, many in ((runs[0].folder, 0), (copy, 1)):
            file = tmp_path / f"{many}.zip"
            with file.open("wb") as out:
                Archive().write(Recording.open(folder), out)
            assert sum(loss.damaged_lines for loss in summarize(Recording.open(file)).losses) == many


# ---------------------------------------------------------------- what a program may write


def test_whatever_a_program_writes_is_read(folder: Path) -> None:
    """What cannot be what its name says is left out, counted, and everything else stays."""
    began_s = time.monotonic()
    rltrace.start(folder, role="worker", device={"uuid": "cpu:0"})
    rltrace.identify(rank="worker-1", name="\ud800")
    deep: object = 1
    for _ in range(330):
        deep = {"a": [deep]}
    with rltrace.span("step", step="first", tokens=1e308), rltrace.phase("actor.update"):
        for _ in range(2):
            rltrace.counter("actor.params_bytes", 1e308)
            rltrace.counter("loss", 1e308)
        with (
            rltrace.span("weight_sync.send", bytes=10**19),
            spans.automatic_span("memory.out_of_memory", asked_bytes="a"),
        ):
            pass
        rltrace.span_at("c", 2**63, 2**63 + 1)
        spans.counter_at("c", 2**63, 1)
        rltrace.span("is open", deep=deep).__enter__()
    rltrace.stop()
    recording = Recording.open(folder)
    summary = summarize(recording)
    Perfetto().write(recording, io.BytesIO())
    (loss,) = summary.losses
    assert loss.unfit_values == 5  # step, 2 samples, bytes, asked_bytes
    assert loss.lost_events == 2  # whose times no reader could read
    assert summary.run.seconds < time.monotonic() - began_s and [step.step for step in summary.steps] == [0]
    assert summary.out_of_memory[0].asked_bytes is None
    assert [p.name for p in summary.processes] == ["?"]


# ---------------------------------------------------------------- the gate


def test_a_line_too_deep_is_none() -> None:
    """Neither what nobody reads through, nor what Python itself gives up on."""
    for depth in (gate.MOST_DEPTH + 1, 900, 100_000):
        assert gate.parsed(b'{"a": ' + b"[" * depth + b"]" * depth + b"}") is None
    assert gate.parsed(b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}") is not None


def test_a_signed_text_shows_every_flip() -> None:
    """But of the mark before its checksum, where nothing that it says has changed."""
    text = checksum.signed('{"kind": "end", "end_ns": 123456789}').encode()
    assert checksum.is_intact(text) is True
    for bit in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        state = checksum.is_intact(bytes(flipped))
        assert state is False or (state is None and flipped.startswith(text[:36][:-1])), bytes(flipped)


def test_sums_of_file_and_bytes_agree(tmp_path: Path) -> None:
    """A file and its bytes have the same sum."""
    file = tmp_path / "f"
    for size in (0, 1, 65536, 65537, 1 << 20):
        content = os.urandom(size)
        file.write_bytes(content)
        assert checksum.of_file(file) == checksum.of_bytes(content)


# ---------------------------------------------------------------- behind a damaged record


def _recorded_numbers(folder: Path, many: int) -> Path:
    """A segment with spans `a`, each with its number and a sample behind it; its process has ended."""
    rltrace.start(folder)
    for n in range(many):
        with rltrace.span("a", n=n):
            rltrace.counter("c", n)
    rltrace.stop()
    (segment,) = folder.glob("processes/*/*.seg")
    return segment


def _numbers(process: Process) -> set[int]:
    return {event.args["n"] for event in process.events() if isinstance(event, Span) and event.end_ns and event.args}


@pytest.mark.parametrize("what", ["header", "end", "half", "zeros", "deep"])
def test_a_damaged_record_costs_itself(folder: Path, process_of: Callable[[Path], Process], what: str) -> None:
    """Its array's header, its `true`, half of it, a hole of zeros, or more inside of each other than msgpack reads."""
    segment = _recorded_numbers(folder, 100)
    content = segment.read_bytes()
    starts = [at for at in range(len(content)) if content.startswith(b"\x95\xa1a", at)]
    at, end = starts[10], content.index(b"\x94\xa1c", starts[10])
    deep = b"\x95\xa1a\x00" + content[at + 4 : at + 13] + b"\x81\xa1d" + b"\x91" * 3000 + b"\x01\xc3"
    damaged = {
        "header": content[:at] + b"\xc1" + content[at + 1 :],
        "end": content[: end - 1] + b"\xc2" + content[end:],
        "half": content[: at + 8] + content[end:],
        "zeros": content[:at] + bytes(512) + content[at + 512 :],
        "deep": content[:at] + deep + content[end:],
    }[what]
    segment.write_bytes(damaged)
    process = process_of(folder)
    numbers = _numbers(process)
    assert numbers == set(range(100)) - ({10} if what != "zeros" else set(range(10, min(numbers - set(range(10))))))
    assert len(numbers) > 85 and process.torn == 1
    assert process.stray_flows == 0 and process.orphans <= 2


def test_what_looks_like_records_is_none(folder: Path, process_of: Callable[[Path], Process]) -> None:
    """Arguments of a damaged record that have the shape of records, and times of another life."""
    rltrace.start(folder)
    with rltrace.span(
        "a", n=[["false", 0, 7, None, True]] * 9, m=[True, ["false", 5, 1.5, True], ["false", 6, 1, True]]
    ):
        pass
    for _ in range(3):
        with rltrace.span("b"):
            pass
    rltrace.stop()
    (segment,) = folder.glob("processes/*/*.seg")
    content = segment.read_bytes()
    at = content.index(b"\x95\xa1a")
    segment.write_bytes(content[:at] + b"\xc1" + content[at + 1 :])
    assert [event.name for event in process_of(folder).events()] == ["b"] * 3


def test_reading_on_is_bounded(folder: Path, process_of: Callable[[Path], Process]) -> None:
    """Whatever a stranger wrote: a segment full of beginnings of records takes a second at most."""
    segment = _recorded_numbers(folder, 3)
    content = segment.read_bytes()
    begun = time.process_time()
    for piece in (b"\xc3\x93", b"\xc3\xdc\xff\xff", b"\xc3" + b"\x9f" * 600, b"\x93\x01\x02\xc2\xc3"):
        segment.write_bytes(content + piece * (500_000 // len(piece)))
        assert _numbers(process_of(folder)) == {0, 1, 2}
    assert time.process_time() - begun < 5
