"""The trace that is made of columns is the one that is made of events, and the native encoder gives Python's bytes."""

from __future__ import annotations

import io
import tempfile
import zlib
from functools import cache
from pathlib import Path

import msgpack
import numpy as np
import perfetto_by_events
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from part_of_recording import first_rank_of
from perfetto_by_events import PerfettoByEvents
from recording_file import RecordingFile
from rltrace_exporters import perfetto_packets, perfetto_process
from rltrace_exporters.perfetto import Perfetto
from rltrace_exporters.perfetto_process import counter_packets
from rltrace_exporters.protobuf import data, integer
from same_trace import blocks_of, packets_of, said
from shipped import SHIPPED
from trace_processor import Importer, Trace
from written_segments import damaged, process_of_segments, segments

from rltrace.read import columns, native
from rltrace.read.recording import Process, Recording

ways = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


@cache
def shipped(file: Path) -> bytes:
    """Return the trace of a shipped Recording."""
    return export(file)


@cache
def shipped_by_events(file: Path) -> bytes:
    """Return the trace that is made of its events."""
    return export(file, PerfettoByEvents())


def export(path: Path, exporter: Perfetto | PerfettoByEvents | None = None) -> bytes:
    out = io.BytesIO()
    (exporter or Perfetto()).write(Recording.open(path), out)
    return out.getvalue()


def by_python(path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Export by the encoder in Python."""
    with monkeypatch.context() as patch:
        patch.setattr(perfetto_process, "encoder", lambda _, sequence: perfetto_packets.PythonPackets(sequence))
        return export(path)


def packets(data: bytes) -> bytes:
    """Return the packets of a trace, without the last one, which is a block of its own: it tells traces apart."""
    return b"".join(blocks_of(data)[:-1])


@pytest.fixture(scope="module", params=SHIPPED, ids=lambda file: file.stem)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a shipped Recording with one rank of its trainer; of whole ones in tests/hostile."""
    return first_rank_of(request.param, tmp_path_factory.mktemp("shipped"))


def test_shipped_recordings_say_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace of columns says of every track what one of events says, and both encoders give the same packets."""
    assert native.library() is not None, f"segments are decoded {native.decoder()}"
    found = shipped(file)
    assert said(found) == said(shipped_by_events(file))
    assert packets(found) == packets(by_python(file, monkeypatch))


def test_importers_answer_the_same(file: Path, importer: Importer) -> None:
    """Both of Perfetto's importers give the same slices, arguments, counters, arrows and rows."""
    answers = [_answers(importer.load(trace)) for trace in (shipped(file), shipped_by_events(file))]
    for found, expected in zip(*answers, strict=True):
        assert found == expected


def _answers(trace: Trace) -> list[list[str]]:
    """Return what the tables say, without the numbers of rows."""
    row = "coalesce(t.name, '') as row, coalesce(above.name, '') as above, coalesce(p.name, '') as process"
    of = f"{row} from %s join track t on t.id = x.track_id left join track above on above.id = t.parent_id"
    of += " left join process_track pt on pt.id = t.id left join process p using (upid)"
    slices = "select x.ts, x.dur, x.name, x.depth, x.arg_set_id, x.id, " + of % "slice x"
    args = dict(trace.query(ARGS))
    rows = trace.query(slices)
    shown = {found[5]: repr((*found[:4], args.get(found[4]), *found[6:])) for found in rows}
    flows = trace.query("select slice_out, slice_in from flow")
    counters = trace.query("select x.ts, x.value, " + of % "counter x")
    threads = trace.query("select tid, count(*) from thread group by tid")
    return [
        sorted(shown.values()),
        sorted(shown[out] + shown[into] for out, into in flows),
        sorted(map(repr, counters)),
        sorted(map(repr, threads)),
        sorted(map(repr, trace.problems())),
    ]


ARGS = """
    select arg_set_id, group_concat(said) as said
    from (select arg_set_id, key || '=' || ifnull(display_value, 'null') as said from args order by arg_set_id, key)
    group by arg_set_id
"""
"""What each set of arguments says: SQL puts them together quicker than Python."""


@settings(ways, max_examples=40)
@given(segments())
def test_whatever_was_written(contents: list[bytes]) -> None:
    """What anybody wrote says the same by columns and by events, and both encoders give the same packets.

    Of a thousand processes in tests/hostile.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = _written(Path(folder), contents)
        found = export(path)
        assert said(found) == said(export(path, PerfettoByEvents()))
        assert packets(found) == packets(by_python(path, patch))


@settings(ways, max_examples=30)
@given(segments().flatmap(damaged), st.integers(1, 8))
def test_damage_in_the_middle_repeats_nothing(contents: list[bytes], rows: int) -> None:
    """Where the native decoder gives up after some rows were written, none of them is written again.

    A thread that is renamed later has the name that was known when its row was written, so names are left out here.
    """
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for writer in (perfetto_process.ProcessWriter, perfetto_by_events._ProcessWriter):
            patch.setattr(writer, "_thread_name", lambda _, thread: f"thread {thread}")
        patch.setattr(columns, "ROWS", rows)
        patch.setattr(columns, "EVENTS", rows + 1)
        path = _written(Path(folder), contents)
        assert said(export(path)) == said(export(path, PerfettoByEvents()))


def _written(folder: Path, contents: list[bytes]) -> Path:
    """Write a Recording of one process that has these segments."""
    process_of_segments(folder / "run", contents)
    return folder / "run"


def test_damage_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of three segments is damaged when two have been written."""
    recording = RecordingFile(tmp_path / "run")
    process = recording.process()
    for segment in range(3):
        thread = process.thread()
        for index in range(10):
            start = 1000 * segment + 10 * index
            thread.span("a", start, start + 5, index=index)
            thread.counter("queue_length", start, index)
    thread.tear(3)
    monkeypatch.setattr(columns, "ROWS", 5)
    restarts = []
    whole = columns.fold
    monkeypatch.setattr(
        columns, "fold", lambda process, begin, add: whole(process, lambda: restarts.append(0) or begin(), add)
    )
    found = said(export(recording.path))
    assert len(restarts) == 2, "the native decoder did not give up"
    assert found == said(export(recording.path, PerfettoByEvents()))


def test_odd_arguments_are_encoded_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only Python knows how to read lies between what the library reads."""
    recording = RecordingFile(tmp_path / "run")
    thread = recording.process().thread()
    deep: object = 1
    for _ in range(20):
        deep = {"in": deep}
    odd = [
        b"bytes", [b"x", 1], {"a": 1, "b": {"c": [1, 2.5, None]}}, deep, (1 << 64) - 1, -(1 << 63), [], {}, "",
        {f"key {n}": n for n in range(40)}, {"a.b": {"c.": 1, ".d": [{}]}}, True, float("inf"), "x" * 3000,
    ]  # fmt: skip
    for index, value in enumerate(odd):
        thread.span("a", 10 * index, 10 * index + 5, before=index, value=value, after="z")
        thread.span("fsdp.forward", 10 * index + 6, 10 * index + 7, module=value)
    thread.begin("a", 900, **{"k": 1, "": 2, "x" + ".y" * 40: 3})
    found = export(recording.path)
    assert said(found) == said(export(recording.path, PerfettoByEvents()))
    assert packets(found) == packets(by_python(recording.path, monkeypatch))


def test_letters_that_are_no_text_are_encoded_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlong, cut, surrogate and too large: at every place of a text, as a key and as a value."""
    wrong = [b"\xc0\x80", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf0\x80\x80\x80", b"\xf4\x90\x80\x80", b"\xf5", b"\x80"]
    right = [b"\xc2\x80", b"\xe0\xa0\x80", b"\xed\x9f\xbf", b"\xf0\x90\x80\x80", b"\xf4\x8f\xbf\xbf"]
    letters = [*wrong, *right, *(whole[:-1] for whole in right)]
    texts = [around for one in letters for around in (one, b"eight letters" + one, one + b"and more of them")]
    content = msgpack.packb([7, "main", True])
    for at, text in enumerate(texts):
        packed = bytes([0xD9, len(text)]) + text
        args = b"\x82" + packed + b"\xa1v" + b"\xa1k" + packed
        begin = msgpack.packb(["a", 0, 10 + 2 * at, None, True]).replace(b"\xc0\xc3", args + b"\xc3")
        content += begin + msgpack.packb([10 + 2 * at, 11 + 2 * at, None, True])
    path = _written(tmp_path, [content])
    found = export(path)
    assert said(found) == said(export(path, PerfettoByEvents()))
    assert packets(found) == packets(by_python(path, monkeypatch))


def test_counter_packets_are_those_of_perfetto() -> None:
    """Times of any size, and values that are no number."""
    times = np.array([0, 1, (1 << 28) - 1, 1 << 28, (1 << 62) + 12345], np.int64)
    values = np.array([0.0, -1.5, 1e300, float("nan"), 2**53], np.float64)
    found = packets_of(_block(counter_packets(integer(10, 7), 300, times, values)))
    assert [packet.timestamp for packet in found] == times.tolist()
    assert [repr(packet.track_event.double_counter_value) for packet in found] == [*map(repr, values.tolist())]
    assert {(packet.trusted_packet_sequence_id, packet.track_event.track_uuid) for packet in found} == {(7, 300)}


def _block(content: bytes) -> bytes:
    return data(1, data(50, zlib.compress(content)))


def test_native_export_reads_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event of a sound Recording is read one by one."""
    monkeypatch.setattr(Process, "events", lambda process: pytest.fail(f"{process.name} was read in Python"))
    export(SHIPPED[0])
