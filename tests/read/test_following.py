"""The follower of a Recording that grows: it gives what the finished Recording has, and reads nothing twice."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import recordings
from scale.made_recording import Wanted, make
from shipped import RECORDINGS, opened

import rltrace
from rltrace.events import Counter, Span
from rltrace.host import regular_file
from rltrace.read import following, native
from rltrace.read.columns import Growing
from rltrace.read.following import Follower, News
from rltrace.read.recording import Process, Recording
from rltrace.record import manifest
from rltrace.run.collection import bring_together

# ---------------------------------------------------------------- a Recording that is written again, piece by piece


class Rewritten:
    """A finished Recording that is written into another folder as its processes wrote it."""

    def __init__(self, finished: Path, folder: Path, piece_bytes: int) -> None:
        self.folder, self.chance = folder, random.Random(7)
        (folder / "processes").mkdir(parents=True)
        for file in finished.glob("*.json*"):
            shutil.copy(file, folder)
        self.parts = [self._process(of, piece_bytes) for of in sorted((finished / "processes").iterdir())]

    def grow(self) -> bool:
        """Let every process write on; return whether there was anything to write."""
        self.parts = [part for part in self.parts if next(part, None) is not None]
        return bool(self.parts)

    def _process(self, finished: Path, piece_bytes: int) -> Iterator[bool]:
        folder = self.folder / "processes" / finished.name
        folder.mkdir()
        lines = (finished / "process.jsonl").read_bytes().splitlines(keepends=True)
        last = [line for line in lines if line.startswith((b'{"kind": "end"', b'{"kind": "exit"', b'{"kind": "seal"'))]
        first = b"".join(line for line in lines if line not in last)
        (folder / "process.jsonl").write_bytes(first[:-9])  # the last line is being written
        shutil.copy(finished / "counts.u64", folder)
        yield True
        (folder / "process.jsonl").write_bytes(first)
        for segment in sorted(finished.glob("*.seg")):
            yield from self._segment(segment.read_bytes().rstrip(b"\0"), folder / segment.name, piece_bytes)
        (folder / "process.jsonl").write_bytes(first + b"".join(last))
        yield True

    def _segment(self, content: bytes, path: Path, piece_bytes: int) -> Iterator[bool]:
        """Write a segment in pieces that end anywhere in a record, with zeros behind it until it is closed."""
        at = 0
        while at < len(content):
            at = min(len(content), at + self.chance.randrange(1, 2 * piece_bytes))
            path.write_bytes(content[:at])
            with path.open("r+b") as file:
                file.truncate(len(content) + 500)
            yield True
        path.write_bytes(content)


class Followed:
    """All that a follower gave of each process, by its key."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.ended: dict[str, list[Span]] = defaultdict(list)
        self.samples: dict[str, list[Counter]] = defaultdict(list)
        self.began: dict[str, list[Span]] = defaultdict(list)
        self.last: dict[str, News] = {}

    def poll(self) -> int:
        """Poll once; return how many processes had news."""
        keys = set()
        for news in self.follower.poll():
            keys.add(key := news.process.key)
            assert news.is_new == (key not in self.last)
            self.last[key] = news
            self.ended[key] += news.ended
            self.samples[key] += news.samples
            self.began[key] += news.began
        return len(keys)

    def is_same_as(self, process: Process, order: Callable[[Any], Any] | None = None) -> None:
        """Compare with what a reader of the whole process gives; without an order, in its own."""
        events = list(process.events())
        spans = [event for event in events if isinstance(event, Span)]
        ended = [span for span in spans if span.end_ns is not None]
        left_open = [span for span in spans if span.end_ns is None]
        given, samples = self.ended[process.key], [event for event in events if isinstance(event, Counter)]
        if order:
            ended, given = sorted(ended, key=order), sorted(given, key=order)
        assert given == ended
        assert sorted(map(str, self.samples[process.key])) == sorted(map(str, samples))
        begin = {(span.thread, span.task, span.start_ns) for span in left_open}
        assert {(s.thread, s.task, s.start_ns) for s in self.follower.open_spans(process.key)} == begin
        assert begin <= {(s.thread, s.task, s.start_ns) for s in self.began[process.key]}
        losses = self.last[process.key].losses
        assert losses.lost_events == process.lost_events
        assert (losses.torn, losses.orphans) == (process.torn, process.orphans)
        assert (losses.damaged_segments, losses.missed_segments) == (process.damaged_segments, 0)


def part_of(archive: str, many: int, folder: Path) -> Path:
    """Return a Recording of the processes of a shipped one that wrote most."""
    whole = opened(RECORDINGS / archive).folder
    by_segments = sorted((whole / "processes").iterdir(), key=lambda process: len([*process.glob("*.seg")]))
    for process in by_segments[-many:]:
        shutil.copytree(process, folder / "processes" / process.name)
    shutil.copy(whole / "manifest.json", folder)
    return folder


def follow(finished: Path, folder: Path, piece_bytes: int) -> Followed:
    """Follow a Recording that is written again, and compare."""
    rewritten = Rewritten(finished, folder, piece_bytes)
    followed = Followed(Follower(Recording.open(folder)))
    while rewritten.grow():
        followed.poll()
    followed.poll()
    whole = Recording.open(folder)
    assert {process.key for process in followed.follower.processes} == {process.key for process in whole.processes}
    names = {process.key: (process.name, process.end_ns) for process in whole.processes}
    assert {process.key: (process.name, process.end_ns) for process in followed.follower.processes} == names
    for process in whole.processes:
        followed.is_same_as(process)
    return followed


# ---------------------------------------------------------------- the same as the finished Recording


def test_a_shipped_recording_is_followed(tmp_path: Path) -> None:
    """What is given piece by piece is what the finished Recording has, and each byte is read once."""
    finished = part_of("verl_8b_4gpu.zip", 12, tmp_path / "finished")
    followed = follow(finished, tmp_path / "run", piece_bytes=200_000)
    assert followed.follower.is_over and followed.poll() == 0
    files = [*(tmp_path / "run" / "processes").glob("*/*")]
    written = sum(len(file.read_bytes().rstrip(b"\0")) for file in files if file.suffix != ".u64")
    assert followed.follower.bytes_read < 1.5 * written


@pytest.mark.parametrize("how", ["in Python", "made anew"])
def test_every_way_to_decode_gives_the_same(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the native decoder, and with one that forgets its texts all the time, the same is given."""
    if how == "in Python":
        monkeypatch.setattr(native, "library", lambda: None)
    else:
        monkeypatch.setattr(Growing, "MOST_TEXTS", 0)
    follow(part_of("qwen3_8b_4gpu.zip", 3, tmp_path / "finished"), tmp_path / "run", piece_bytes=100_000)


def test_other_clocks_are_aligned(tmp_path: Path) -> None:
    """Times of a host whose clock was read are on the run's clock, as far as it was read when they are given."""
    make(tmp_path / "made", Wanted(9, 1, is_thin=True))
    followed = follow(tmp_path / "made", tmp_path / "run", piece_bytes=400_000)
    assert all(news.is_aligned for news in followed.last.values())
    assert any(news.process.alignment is not None for news in followed.last.values())


def test_idle_polls_read_next_to_nothing(folder: Path) -> None:
    """A poll reads what was appended, and a few bytes to see that nothing was."""
    rltrace.start(folder)
    follower = Follower(Recording.open(folder))
    with rltrace.span("outer"):
        for _ in range(500):
            with rltrace.span("work", text="x" * 100):
                pass
        list(follower.poll())
        before = follower.bytes_read
        for _ in range(100):
            assert not list(follower.poll())
        assert follower.bytes_read - before <= 100 * (256 + 8)
        before = follower.bytes_read
        for _ in range(10):
            with rltrace.span("work", text="x" * 100):
                pass
        (news,) = follower.poll()
        assert len(news.ended) == 10 and follower.bytes_read - before < 8000
    rltrace.stop()


# ---------------------------------------------------------------- a run that goes on

PROGRAM = """
import itertools, select, sys, threading
import rltrace

rltrace.start(sys.argv[1], role="worker", rank=0)
print("begun", flush=True)

def work(name, until):
    for n in itertools.takewhile(until, itertools.count()):
        with rltrace.span(name, n=n):
            with rltrace.span("inner"): rltrace.counter("actor.params_bytes", n)
    pairs.append(n + 1)

def is_told():
    return bool(select.select([sys.stdin], [], [], 0.002)[0])

pairs = []
with rltrace.span("step", step=0):
    threads = [threading.Thread(target=work, args=(f"thread {n}", lambda n: n < 2000)) for n in range(3)]
    [thread.start() for thread in threads]
    work("main", lambda n: n < 6000 or not is_told())
    [thread.join() for thread in threads]
hangs = rltrace.span("hangs").__enter__()
print(sum(pairs), flush=True)
sys.stdin.readline(), sys.stdin.readline()
"""


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_running_program_is_followed(how: str, tmp_path: Path) -> None:
    """Threads that write while we read lose and double nothing, and what hangs is known as open, to the end.

    The program writes on, slowly, until ten polls have brought something, however seldom a busy machine lets them be.
    """
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None and program.stdout is not None
        assert program.stdout.readline() == "begun\n"
        followed = Followed(Follower(Recording.open(tmp_path / "run")))
        polls = 0
        while polls < 10:
            polls += followed.poll()
            time.sleep(0.002)
        program.stdin.write("\n")
        program.stdin.flush()
        while not (open_spans := _open(followed)) or open_spans[-1].name != "hangs":
            followed.poll()
            time.sleep(0.002)
        pairs = int(program.stdout.readline())
        assert pairs >= 12_000 and not followed.follower.is_over
        if how == "is killed":
            program.send_signal(signal.SIGKILL)
        else:
            program.communicate("\n")
    while not followed.follower.is_over:
        followed.poll()
    (process,) = Recording.open(tmp_path / "run").processes
    followed.is_same_as(process, order=lambda span: (span.start_ns, span.thread, span.name))
    assert len(followed.ended[process.key]) == 1 + 2 * pairs


def test_what_only_python_reads_is_read_on(folder: Path) -> None:
    """Behind a record that the native decoder does not know, what was open still is, and ends once."""
    rltrace.start(folder)
    followed = Followed(Follower(Recording.open(folder)))
    with rltrace.span("outer"):
        followed.poll()
        with rltrace.span("odd", **{f"argument {n}": [[[[[[n]]]]]] for n in range(3)}, number=10**30):
            pass
        rltrace.counter("loss", float("inf"))
        with rltrace.span("inner", **{"": 2**63}):
            followed.poll()
        followed.poll()
    rltrace.stop()
    followed.poll()
    (process,) = Recording.open(folder).processes
    followed.is_same_as(process)
    assert [span.name for span in followed.ended[process.key]] == ["odd", "inner", "outer"]


def _open(followed: Followed) -> list[Span]:
    return [span for key in followed.last for span in followed.follower.open_spans(key)]


# ---------------------------------------------------------------- what happens to segments


def test_brief_segments_are_no_damage(folder: Path) -> None:
    """Of a segment that was made brief, what was not read yet is given, and what was is not given again."""
    written = recordings.Written(folder)
    spans = [recordings.span(f"span {n}", n, n + 0.5) for n in range(6)]
    written.process("one", *spans[:3], pid=7)
    segment = folder / "processes" / "one" / "000001.seg"
    followed = Followed(Follower(Recording.open(folder)))
    followed.poll()
    written.process("two", spans[1], *spans[3:], pid=7)  # as if some were removed and some were added
    (folder / "processes" / "two" / "000001.seg").replace(segment)
    followed.poll()
    assert [span.name for span in followed.ended["one"]] == [f"span {n}" for n in range(6)]
    assert followed.last["one"].losses.missed_segments == 1


def test_what_is_collected_again_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another host recorded is collected while it goes on: later states of its files replace earlier ones, its
    lines come before its segments, and nothing is lost or given twice."""
    there, here = tmp_path / "there", tmp_path / "here"
    rltrace.start(there)
    monkeypatch.setattr(manifest, "host_name", lambda: "reader")
    recordings.Written(here)
    followed = Followed(Follower(Recording.open(here)))
    for step in range(3):
        with rltrace.span("step", step=step):
            for number in range(300):
                with rltrace.span("work", number=number):
                    pass
            bring_together([Recording.open(here), Recording.open(there)])
            followed.poll()
    rltrace.stop()
    (process,) = Recording.open(there).processes
    lines = Path("processes", process.key, "process.jsonl")
    shutil.copy(there / lines, here / lines)
    followed.poll()
    assert not followed.follower.is_over and followed.last[process.key].process.end_ns is not None
    bring_together([Recording.open(here), Recording.open(there)])
    followed.poll()
    (process,) = Recording.open(here).processes
    followed.is_same_as(process)
    assert len(followed.ended[process.key]) == 3 * 301


def test_dropped_segments_are_counted(folder: Path) -> None:
    """A segment that is gone before it was read to its end is counted, and the others are read."""
    recordings.Written(folder).process("one", recordings.span("span", 1, 2), pid=7)
    segment = folder / "processes" / "one" / "000001.seg"
    followed = Followed(Follower(Recording.open(folder)))
    followed.poll()
    segment.rename(segment.with_name("000002.seg"))
    followed.poll()
    assert followed.last["one"].losses.missed_segments == 1
    assert len(followed.ended["one"]) == 2


def test_damage_costs_itself(folder: Path) -> None:
    """A damaged record in a growing segment is counted, and what is behind it is read."""
    recordings.Written(folder).process("one", *(recordings.span(f"{n}", n, n + 1) for n in range(9)), pid=7)
    segment = folder / "processes" / "one" / "000001.seg"
    content = bytearray(segment.read_bytes())
    content[content.index(b"\xa13") - 1] = 0xC1
    segment.write_bytes(content)
    followed = Followed(Follower(Recording.open(folder)))
    for seconds in (0.0, 0.0, following.DAMAGED_SECONDS + 0.1, 0.0):
        time.sleep(seconds)
        followed.poll()
    assert [span.name for span in followed.ended["one"]] == ["0", "1", "2", "4", "5", "6", "7", "8"]
    (process,) = Recording.open(folder).processes
    followed.is_same_as(process)
    assert followed.last["one"].losses.torn == 1


@pytest.mark.parametrize("written", [*range(10), *range(-9, 0)])
@pytest.mark.parametrize("is_native", [True, False])
def test_a_record_that_is_being_written_is_awaited(
    is_native: bool, written: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a record, the first bytes or the last may be there first, also when what is behind it is whole: the file grows
    while it is read. None of it is given before it is whole, and nothing is damaged."""
    if not is_native:
        monkeypatch.setattr(native, "library", lambda: None)
    spans = [recordings.span(f"span {n}", n, n + 0.765, n=0xC3) for n in range(3)]
    recordings.Written(folder).process("one", *spans, pid=7)
    segment = folder / "processes" / "one" / "000001.seg"
    content = segment.read_bytes()
    record = msgpack.packb(spans[1][0])
    zeros = bytes(len(record) - abs(written))
    there = record[:written] + zeros if written >= 0 else zeros + record[written:]
    followed = Followed(Follower(Recording.open(folder)))
    for now, names in ((content.replace(record, there), ["span 0"]), (content, ["span 0", "span 1", "span 2"])):
        segment.write_bytes(now)
        for _ in range(3):
            followed.poll()
        assert [span.name for span in followed.ended["one"]] == names
    assert followed.last["one"].losses.torn == 0


def test_a_quick_writer_is_followed_closely(tmp_path: Path) -> None:
    """Who polls all the time, while a thread writes all the time, loses nothing and sees no damage."""
    program = (
        "import sys, time, rltrace\n"
        "rltrace.start(sys.argv[1])\n"
        "print('begun', flush=True)\n"
        "for n in range(20_000):\n"
        "    with rltrace.span('work', n=n, text='x' * (n % 300)): pass\n"
        "    if n % 8 == 0: time.sleep(0.0005)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program_:
        assert program_.stdout is not None and program_.stdout.readline() == "begun\n"
        followed = Followed(Follower(Recording.open(tmp_path / "run")))
        while not followed.follower.is_over:
            followed.poll()
    (spans,) = followed.ended.values()
    assert [span.args["n"] for span in spans] == [*range(20_000)]
    (last,) = followed.last.values()
    assert (last.losses.torn, last.losses.orphans, last.losses.damaged_segments) == (0, 0, 0)


def test_only_the_newest_segments_are_read(folder: Path) -> None:
    """Who looks at a run that has gone on for hours need not read all of it."""
    rltrace.start(folder)
    for n in range(60_000):
        with rltrace.span("work", n=n, text="x" * 60):
            pass
    follower = Follower(Recording.open(folder), newest_segments=2)
    ended = [span for news in follower.poll() for span in news.ended]
    rltrace.stop()
    assert ended[-1].args["n"] == 59_999 and 10_000 < len(ended) < 40_000
    assert follower.bytes_read < 4 << 20


def test_tails_stop_at_zeros(tmp_path: Path) -> None:
    """Zeros inside of what was written do not hide what is behind them."""
    content = (b"\xa0" * 250 + bytes(12)) * 3 + b"\xc3"
    (tmp_path / "000001.seg").write_bytes(content + bytes(1 << 20))
    tail = regular_file.tail(tmp_path / "000001.seg", 0)
    assert tail.content == content and tail.read_bytes < 100_000
    assert regular_file.tail(tmp_path / "000001.seg", len(content)).content == b""
