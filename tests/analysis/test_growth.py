"""Of a process that goes on, only what it wrote since the last reading is decoded, and its figures are the same."""

from __future__ import annotations

import json
import os
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from file_limit import files_of_at_most
from recordings import _marked
from same_seen import _said
from shipped import VERL

from rltrace.analysis import growth
from rltrace.analysis.encoded import as_json
from rltrace.analysis.figures import figures
from rltrace.analysis.growth import Growth
from rltrace.analysis.observations import Observations
from rltrace.analysis.seen.seeing import OF_READING
from rltrace.analysis.summary import losses, summarize
from rltrace.host import clock
from rltrace.read import cache, native
from rltrace.read.recording import Process, Recording
from rltrace.read.records import whole_bytes
from rltrace.record import checksum, manifest

pytestmark = pytest.mark.skipif(native.library() is None, reason="only natively decoded processes go on")


@pytest.fixture(autouse=True)
def everything_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "WORTH_BYTES", 1)
    monkeypatch.setattr(growth, "SHARE", 1 << 30)
    monkeypatch.setattr(cache, "WORTH_BYTES", 1)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the segments that were read, in order."""
    names: list[str] = []
    read = Process.segment

    def segment(process: Process, name: str) -> bytes:
        names.append(name)
        return read(process, name)

    monkeypatch.setattr(Process, "segment", segment)
    return names


class Live:
    """A Recording of one process, which is this very one and writes segments of another."""

    def __init__(self, folder: Path, contents: list[bytes], lines: tuple[dict[str, Any], ...] = ()) -> None:
        manifest.create(folder, owner=None, command=["python"], config={})
        self.folder, self.contents = folder, contents
        self.process = folder / manifest.PROCESSES / "worker"
        self.process.mkdir()
        identity = {
            "kind": "process", "host": socket.gethostname(), "pid": os.getpid(), "role": "worker", "rank": 0,
            "start_ticks": manifest.started_ticks(os.getpid()), "start_ns": 0, "monotonic_ns": 0, "realtime_ns": 0,
            **clock.domain(),
        }  # fmt: skip
        self._say(identity, *lines)

    def write(self, closed: set[int], opened: dict[int, int]) -> Recording:
        """Have some segments closed, and of others so many bytes written; return the Recording as it is now."""
        for at in closed:
            name = f"{at + 1:06d}.seg"
            if self._write(name, self.contents[at]):
                crc32 = zlib.crc32(self.contents[at])
                self._say({"kind": "seal", "segment": name, "bytes": len(self.contents[at]), "crc32": crc32})
        for at, size_bytes in opened.items():
            content = self.contents[at][:size_bytes]
            self._write(f"{at + 1:06d}.seg", content[: whole_bytes(content)] + bytes(64))
        return self.read()

    def read(self) -> Recording:
        return Recording.open(self.folder)

    @property
    def kept(self) -> Path:
        return self.folder / cache.FOLDER / cache.GROWING / "worker"

    def _write(self, name: str, content: bytes) -> bool:
        file = self.process / name
        if file.exists() and file.read_bytes() == content:
            return False
        file.write_bytes(content)
        return True

    def _say(self, *lines: dict[str, Any]) -> None:
        with (self.process / "process.jsonl").open("a") as file:
            file.writelines(checksum.signed(json.dumps(line)) + "\n" for line in lines)


def shipped_worker(folder: Path) -> Live:
    """Return a process that has recorded typed spans, looks at memory and arrows; of them in three segments."""
    process = next(process for process in Recording.open(VERL).processes if process.name == "rank 2 worker")
    # It was recorded before hooks marked their spans.
    contents = [b"".join(map(marked, records(segment.content))) for segment in process.segments()]
    types = [{"kind": "type", "number": number, **declared._asdict()} for number, declared in process.types.items()]
    for line in types:
        line["automatic"] = line.pop("is_automatic")
    return Live(folder, contents, tuple(types))


def records(content: bytes) -> Iterator[list[Any]]:
    unpacker = msgpack.Unpacker(None, max_buffer_size=len(content) + 1)
    unpacker.feed(content.rstrip(b"\0"))
    yield from unpacker


def marked(record: list[Any]) -> bytes:
    return msgspec.msgpack.encode(_marked(record, set()))


def record(*values: Any) -> bytes:
    return msgspec.msgpack.encode([*values, True])


def seen(recording: Recording) -> list[Any]:
    """Return all that is kept of the processes, and what they lost."""
    found = Observations(recording)
    kept = [
        {name: _said(value) for name, value in vars(one).items() if name not in OF_READING} for one in found.processes
    ]
    return [kept, [one.process.threads for one in found.processes], losses(recording), found.damaged]


def seen_anew(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    with monkeypatch.context() as patch:
        patch.setattr(Growth, "see", lambda *_: False)
        return seen(recording)


def test_only_what_grew_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[str]) -> None:
    """Spans that are open over two readings, typed ones, arrows and looks are as if all had been read at once."""
    live = shipped_worker(tmp_path / "run")
    stages = [({0}, {1: 2000}), ({0, 1, 2}, {3: 300_000, 4: 400}), ({0, 1, 2, 3}, {4: 1 << 20}), (set(range(6)), {})]
    read = [[0, 1], [1, 2, 3, 4], [3, 4], [4, 5]]
    for (closed, opened), names in zip(stages, read, strict=True):
        whole = seen_anew(live.write(closed, opened), monkeypatch)
        decoded.clear()
        assert seen(live.read()) == whole
        assert decoded == [f"{at + 1:06d}.seg" for at in names]
    assert whole[0][0]["looks"] and whole[0][0]["device_spans"]


def test_a_slow_thread_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[str]) -> None:
    """The first segment stays open, because its thread writes little; those of another thread are closed meanwhile."""
    monkeypatch.setattr(clock, "now_ns", lambda: 10_000)
    begun = record(5, "main") + record("slow", 0, 10, None)
    live = Live(
        tmp_path / "run",
        [
            begun + record("k", 0, 11, "out") + record(10, 9000, {"bytes": 5}),
            record(6, "other") + record("fast", 0, 100, 101, None) * 50 + record("x", 0, 900, None),
            record(6, "other") + record(900, 950, None) + record("fast", 0, 1000, 1001, None),
        ],
    )  # fmt: skip
    for closed, opened in (({1}, {0: len(begun)}), ({1, 2}, {0: len(begun)}), ({0, 1, 2}, {})):
        decoded.clear()
        found = as_json(summarize(live.write(closed, opened)))
        assert decoded == [name for name in decoded if name != "000002.seg"] or closed == {1}
        live.kept.unlink()
        assert found == as_json(summarize(live.read()))
    assert b'"slow"' in found and b'"fast"' in found


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: content[:-9] + b"?" + content[-8:]])
def test_damage_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any) -> None:
    """What was cut or changed is not used, and the segments are read."""
    live = shipped_worker(tmp_path / "run")
    *whole, _ = seen(live.write({0, 1}, {}))
    live.kept.write_bytes(damage(live.kept.read_bytes()))
    assert figures(live.read()).damaged == [f"{live.kept}: damaged"]
    live.kept.write_bytes(damage(live.kept.read_bytes()))
    assert seen(live.read()) == [*whole, [f"{live.kept}: damaged"]]


def test_a_changed_segment_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made of a segment is not used when its file is another one: it is damaged, and counted as that."""
    live = shipped_worker(tmp_path / "run")
    seen(live.write({0, 1}, {}))
    file = live.process / "000001.seg"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    whole = seen_anew(live.read(), monkeypatch)
    assert seen(live.read()) == whole
    assert whole[2][0].damaged_segments == 1


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of what is kept does not stay, and figures are the same."""
    live = shipped_worker(tmp_path / "run")
    recording = live.write({0, 1}, {})
    whole = seen_anew(recording, monkeypatch)
    with files_of_at_most(500):
        now = seen(live.read())
    assert now == whole
    assert [file for file in (tmp_path / "run" / cache.FOLDER).rglob("*") if file.is_file()] == []
