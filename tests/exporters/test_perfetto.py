"""A Recording comes out of Perfetto's own importer as it went in: every span, sample and arrow, where it belongs."""

from __future__ import annotations

import io
import math
import os
import tracemalloc
import zlib
from datetime import datetime, timezone
from pathlib import Path
from time import time_ns
from typing import Any

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace as TraceProto
from recording_file import REALTIME_NS, SECOND, RecordingFile, ThreadFile
from rltrace_exporters import perfetto, perfetto_packets, perfetto_process
from rltrace_exporters.perfetto import Perfetto
from rltrace_exporters.rows import FlatRow, NestedRow, Rows
from trace_processor import STARTS, Importer, Trace

from rltrace.read import columns
from rltrace.read.recording import Recording, in_order
from rltrace.record import manifest


def export(path: Path) -> bytes:
    out = io.BytesIO()
    Perfetto().write(Recording.open(path), out)
    return out.getvalue()


@pytest.fixture
def recording(tmp_path: Path) -> RecordingFile:
    return RecordingFile(tmp_path / "run")


def load(importer: Importer, recording: RecordingFile) -> Trace:
    return importer.load(export(recording.path))


@pytest.mark.parametrize("ends_first", [False, True])
def test_span_that_another_thread_ends(importer: Importer, recording: RecordingFile, ends_first: bool) -> None:
    """A span that another thread ends overlaps what goes on in its own; whichever segment comes first, it has a row."""
    process = recording.process()
    threads = [process.thread(number, name) for number, name in ((200, "ends"), (100, "begins"))]
    ending, beginning = threads if ends_first else threads[::-1]
    beginning.begin("handed over", 10)
    beginning.begin("goes on", 20)
    ending.end(10, 30)
    beginning.end(20, 40)
    beginning.span("later", 50, 60)
    trace = load(importer, recording)
    trace.check_clean(slices=3, counters=0)
    times = {one["name"]: (one["ts"] - REALTIME_NS, one["dur"], one["parent"]) for one in trace.slices()}
    assert times == {"handed over": (10, 20, None), "goes on": (20, 20, None), "later": (50, 10, None)}


def row_names(trace: Trace, process: str) -> list[str]:
    """Names of a process's rows and groups in the order of the UI, which asks this view; threads go above them."""
    trace.query("include perfetto module viz.summary.track_event")
    rows = trace.query(f"""
        select g.name as row from _track_event_tracks_ordered_groups g join process using (upid)
        left join track above on above.id = g.parent_id
        where process.name like '{process}%' and g.name is not null order by above.name, g.order_id
    """)
    return [name for (name,) in rows]


# ---------------------------------------------------------------- spans


def test_spans_nest_as_they_did(importer: Importer, recording: RecordingFile) -> None:
    thread = recording.process().thread()
    thread.begin("step", 0, step=3)
    thread.begin("outer", 10)
    thread.span("inner", 20, 30)
    thread.span("inner", 30, 35)
    thread.end(10, 40)
    thread.end(0, 50)
    trace = load(importer, recording)
    trace.check_clean(slices=4, counters=0)
    found = [(s["name"], s["ts"] - REALTIME_NS, s["dur"], s["depth"], s["parent"]) for s in trace.slices()]
    assert found == [
        ("step 3", 0, 50, 0, None),
        ("outer", 10, 30, 0, None),
        ("inner", 20, 10, 1, "outer"),
        ("inner", 30, 5, 1, "outer"),
    ]


def test_times_are_exact(importer: Importer, recording: RecordingFile) -> None:
    """Times are exact to the nanosecond, counted from 1970."""
    thread = recording.process().thread()
    times = [(1, 2), (3, 268_435_455), (268_435_456, 268_435_457), (7 * SECOND + 1, 86_400 * SECOND + 3)]
    for start, end in times:
        thread.span("a", start, end)
    trace = load(importer, recording)
    trace.check_clean(slices=4, counters=0)
    assert [(s["ts"], s["dur"]) for s in trace.slices()] == [(REALTIME_NS + a, b - a) for a, b in times]


def test_arguments_of_every_kind_arrive(importer: Importer, recording: RecordingFile) -> None:
    thread = recording.process().thread()
    plain = {
        "small": 0,
        "two": 200,
        "large": 1 << 40,
        "huge": (1 << 63) - 1,
        "negative": -5,
        "ratio": 0.25,
        "yes": True,
        "no": False,
    }
    texts = {"text": "grüße 🚀", "empty": "", "long": "x" * 5000, "none": None}
    nested = {"shape": [2, 3], "dtype": {"from": "bf16", "to": {"name": "f32"}}, "nothing": [], "neither": {}}
    nested["layers"] = {"0.weight": 9}
    thread.begin("a", 1, **plain, **texts, **nested)
    thread.end(1, 2, late=7, error="ValueError")
    trace = load(importer, recording)
    trace.check_clean(slices=1, counters=0)
    (found,) = trace.slices()
    assert found["args"] == plain | texts | {
        "none": "None", "shape[0]": 2, "shape[1]": 3, "dtype.from": "bf16", "dtype.to.name": "f32",
        "nothing": "[]", "neither": "{}", "late": 7, "error": "ValueError", "layers.0.weight": 9,
    }  # fmt: skip


def test_keys_with_dots_keep_them(importer: Importer, recording: RecordingFile) -> None:
    """Of every kind of value, beside a key that begins alike; the importer would write `_` for a dot in a name."""
    thread = recording.process().thread()
    values = (0, 300, 1 << 50, -5, 0.25, True, "text", "x" * 5000, "")
    args = {f"model.layers.{number}": value for number, value in enumerate(values)}
    args |= {"model": 7, "..": 1, ".begin": 2, "end.": 3, "deep" + ".x" * 31: 4}
    for at in (1, 5):  # bytes of the first are kept for the second
        thread.span("a", at, at + 2, **args)
    trace = load(importer, recording)
    trace.check_clean(slices=2, counters=0)
    assert [slice_["args"] for slice_ in trace.slices()] == [args, args]
    assert (
        trace.one("select distinct extract_arg(arg_set_id, 'debug.model.layers.1') from slice where name = 'a'") == 300
    )


def test_large_unsigned_argument_keeps_its_bits(importer: Importer, recording: RecordingFile) -> None:
    """An unsigned argument that is too large for a signed one keeps its bits."""
    recording.process().thread().span("a", 1, 2, address=(1 << 64) - 1)
    trace = load(importer, recording)
    trace.check_clean(slices=1, counters=0)
    assert trace.slices()[0]["args"]["address"] % (1 << 64) == (1 << 64) - 1


def test_names_in_any_script_arrive(importer: Importer, recording: RecordingFile) -> None:
    thread = recording.process().thread(name="поток")
    names = ["重み.同期", "généré", "🚀", "with space", "x" * 300, ""]
    for index, name in enumerate(names):
        thread.span(name, 10 * index, 10 * index + 5, ключ="значение")
    trace = load(importer, recording)
    trace.check_clean(slices=len(names), counters=0)
    # v55 calls a slice without a name NULL.
    assert [s["name"] or "" for s in trace.slices()] == names
    assert {s["args"]["ключ"] for s in trace.slices()} == {"значение"}
    assert trace.one("select name from thread where is_main_thread and upid > 0") == "поток"


def test_instant_is_a_slice_of_no_length(importer: Importer, recording: RecordingFile) -> None:
    """An instant is a slice of no length inside its parent."""
    thread = recording.process().thread()
    thread.begin("outer", 0)
    thread.span("now", 5, 5, size=1)
    thread.end(0, 10)
    trace = load(importer, recording)
    trace.check_clean(slices=2, counters=0)
    assert [(s["name"], s["dur"], s["parent"]) for s in trace.slices()] == [("outer", 10, None), ("now", 0, "outer")]


def test_late_spans_nest_on_own_rows(importer: Importer, recording: RecordingFile) -> None:
    """Spans that are recorded afterwards nest on rows of their own."""
    thread = recording.process().thread()
    thread.span_at("kernel", 20, 30, lane=7)
    thread.span_at("range", 10, 40, lane=7)
    thread.span_at("range", 35, 60, lane=7)
    thread.span_at("kernel", 15, 25, lane=8)
    trace = load(importer, recording)
    trace.check_clean(slices=4, counters=0)
    found = [(s["name"], s["ts"] - REALTIME_NS, s["parent"]) for s in trace.slices()]
    assert found == [("range", 10, None), ("kernel", 15, None), ("kernel", 20, "range"), ("range", 35, None)]
    assert trace.one(f"select count(distinct track_id) from slice where name != '{STARTS}'") == 3


# ---------------------------------------------------------------- open, torn, dead


def test_open_spans_stay_open(importer: Importer, recording: RecordingFile) -> None:
    """Open spans stay open around the spans that ended in them."""
    thread = recording.process().thread()
    thread.begin("actor.update", 0, phase=True)
    thread.begin("outer", 10, bytes=5)
    thread.span("done", 20, 30)
    thread.begin("inner", 40)
    trace = load(importer, recording)
    trace.check_clean(slices=4, counters=0)
    found = [(s["name"], s["dur"], s["parent"]) for s in trace.slices()]
    assert found == [("actor.update", -1, None), ("outer", -1, None), ("done", 10, "outer"), ("inner", -1, "outer")]


@pytest.mark.parametrize("torn_bytes", [1, 5, 9])
def test_a_record_torn_by_kill_costs_itself_only(importer: Importer, recording: RecordingFile, torn_bytes: int) -> None:
    thread = recording.process().thread()
    for index in range(100):
        thread.span("a", 10 * index, 10 * index + 5)
    thread.begin("last", 2000)
    thread.end(2000, 2001)
    thread.tear(torn_bytes)
    trace = load(importer, recording)
    trace.check_clean(slices=101, counters=0)
    assert trace.query("select name, dur from slice order by ts desc limit 1") == [("last", -1)]


def test_cut_file_loses_cut_blocks_only(
    importer: Importer, recording: RecordingFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is cut anywhere loses only the blocks that were cut."""
    monkeypatch.setattr(perfetto, "BLOCK_BYTES", 4_000)
    monkeypatch.setattr(perfetto_packets, "BLOCK_BYTES", 4_000)
    thread = recording.process().thread()
    for index in range(1000):
        thread.span("a", 10 * index, 10 * index + 5)
    whole = export(recording.path)
    packets = TraceProto.FromString(whole).packet
    sizes = [len(TraceProto(packet=[packet]).SerializeToString()) for packet in packets]
    assert len(sizes) > 8 and sum(sizes) == len(whole)
    *_, before, last, identity = sizes
    for cut, lost in (
        (1, 0),
        (identity, 0),
        (identity + 1, 1),
        (identity + last // 2, 1),
        (identity + last, 1),
        (identity + last + before // 2, 2),
    ):
        trace = importer.load(whole[:-cut])
        assert trace.problems() == []
        assert (trace.one("select count(*) from slice") == 1001) == (lost == 0)
        assert trace.one("select count(*) from slice") >= 1001 - 110 * lost
    trace = importer.load(whole)
    trace.check_clean(slices=1000, counters=0)


def _blocks(data: bytes) -> list[bytes]:
    trace = TraceProto()
    trace.ParseFromString(data)
    return [packet.compressed_packets for packet in trace.packet]


def test_empty_recording_is_a_valid_trace(importer: Importer, recording: RecordingFile) -> None:
    """A Recording without processes, or without events, is a valid trace."""
    load(importer, recording).check_clean(slices=0, counters=0, starts=0)
    recording.process(role="driver")
    trace = load(importer, recording)
    trace.check_clean(slices=0, counters=0)
    assert "driver · node" in {name for (name,) in trace.query("select name from process")}


# ---------------------------------------------------------------- processes, threads, tasks


def test_processes_are_named_and_ordered(importer: Importer, recording: RecordingFile) -> None:
    """Processes are named after their role, rank and host, and numbered in the order of readers."""
    for pid, role, rank in [
        (7, "engine", 1),
        (6, "worker", 1),
        (5, "engine", 0),
        (4, "worker", 0),
        (3, "driver", None),
        (9, "loader", None),
    ]:
        recording.process(pid, role=role, rank=rank).thread().span("a", pid, pid + 1)
    trace = load(importer, recording)
    trace.check_clean(slices=6, counters=0)
    assert trace.query("select pid, name from process where upid > 0 order by upid") == [
        (3, "driver · node"), (4, "rank 0 worker · node"), (5, "rank 0 engine · node"),
        (6, "rank 1 worker · node"), (7, "rank 1 engine · node"), (9, "loader · node"),
    ]  # fmt: skip


def test_equal_ids_of_two_hosts_stay_apart(importer: Importer, recording: RecordingFile) -> None:
    """Equal pids and thread ids of two hosts stay apart."""
    for host in ("one", "two"):
        process = recording.process(50, host=host, boot=host, rank=int(host == "two"))
        process.thread().span("main", 10, 20)
        process.thread(51, "reader").span("read", 10, 20)
    trace = load(importer, recording)
    trace.check_clean(slices=4, counters=0)
    found = trace.query("""
        select process.name as process, thread.name as thread, thread.is_main_thread as main, slice.name as slice
        from slice join thread_track on thread_track.id = track_id join thread using (utid) join process using (upid)
        order by 1, 2
    """)
    assert found == [
        ("rank 0 worker · one", "MainThread", 1, "main"), ("rank 0 worker · one", "reader", 0, "read"),
        ("rank 1 worker · two, pid 50", "MainThread", 1, "main"), ("rank 1 worker · two, pid 50", "reader", 0, "read"),
    ]  # fmt: skip


def test_reused_pid_is_two_processes(importer: Importer, recording: RecordingFile) -> None:
    """A pid that is used twice on one host is two processes."""
    for start in (1, 2):
        recording.process(50, start_ns=1000 * SECOND + start).thread().span("a", start, start + 1)
    trace = load(importer, recording)
    trace.check_clean(slices=2, counters=0)
    processes = "select count(distinct upid) from thread_track t join thread using (utid) join slice on track_id = t.id"
    assert trace.one(processes) == 2


def test_five_hundred_threads_keep_their_spans(importer: Importer, recording: RecordingFile) -> None:
    process = recording.process()
    for number in range(500):
        thread = process.thread(1000 + number, f"worker-{number}")
        thread.begin("outer", number)
        thread.span("inner", number + 1, number + 2)
        thread.end(number, number + 1000)
    trace = load(importer, recording)
    trace.check_clean(slices=1000, counters=0)
    assert trace.one("select count(distinct track_id) from slice where name = 'inner' and depth = 1") == 500
    assert trace.one("select count(distinct name) from thread where name like 'worker-%'") == 500


def test_asyncio_tasks_have_own_rows(importer: Importer, recording: RecordingFile) -> None:
    """Each asyncio task has a row of its own below its thread."""
    thread = recording.process().thread()
    for task in (11, 12, 13):
        thread.begin("fetch", task, task=task)
    for task in (11, 12, 13):
        thread.span("read", 100 + task, 101 + task, task=task)
    for task in (11, 12, 13):
        thread.end(task, 200 + task)
    trace = load(importer, recording)
    trace.check_clean(slices=6, counters=0)
    assert {s["track"] for s in trace.slices()} == {"MainThread · tasks"}
    assert {(s["name"], s["depth"], s["parent"]) for s in trace.slices()} == {("fetch", 0, None), ("read", 1, "fetch")}
    assert trace.one(f"select count(distinct track_id) from slice where name != '{STARTS}'") == 3


# ---------------------------------------------------------------- rows


def test_interleaved_spans_get_another_row(importer: Importer, recording: RecordingFile) -> None:
    """Spans of interleaved generators go to rows on which they nest."""
    thread = recording.process().thread()
    thread.begin("first", 10)
    thread.begin("second", 20)
    thread.span("inside both", 30, 31)
    thread.end(10, 40)
    thread.end(20, 50)
    thread.span("after", 60, 61)
    trace = load(importer, recording)
    trace.check_clean(slices=4, counters=0)
    assert [(s["name"], s["ts"] - REALTIME_NS, s["dur"], s["track"]) for s in trace.slices()] == [
        ("first", 10, 30, "MainThread"), ("second", 20, 30, "MainThread · overlapping"),
        ("inside both", 30, 1, "MainThread"), ("after", 60, 1, "MainThread"),
    ]  # fmt: skip


def test_phases_have_own_row(importer: Importer, recording: RecordingFile) -> None:
    """Phases and steps have a row of their own, which names their process."""
    driver = recording.process(1, role="driver").thread()
    driver.begin("step", 0, step=1)
    driver.span("reward", 10, 20)
    driver.end(0, 100)
    worker = recording.process(2, rank=0).thread()
    worker.begin("my.phase", 30, phase=True, bytes=1)
    worker.span("work", 40, 45)
    worker.end(30, 50)
    trace = load(importer, recording)
    trace.check_clean(slices=4, counters=0)
    assert [(s["name"], s["track"], s["parent"], s["args"]) for s in trace.slices()] == [
        ("step 1", "Phases · driver", None, {"rltrace_name": "step", "step": 1}),
        ("reward", "Phases · driver", "step 1", {}),
        ("my.phase", "Phases · rank 0 worker", None, {"bytes": 1}), ("work", "MainThread", None, {}),
    ]  # fmt: skip


def test_each_live_request_has_a_row_to_itself(importer: Importer, recording: RecordingFile) -> None:
    thread = recording.process(role="engine", rank=0).thread()
    requests = [(start, start + 25) for start in range(0, 100, 10)]
    for number, (start, end) in enumerate(requests):
        thread.span_at("rollout.request", start, end, lane=number + 1, request_id=f"r{number}")
    trace = load(importer, recording)
    trace.check_clean(slices=10, counters=0)
    assert {(s["track"], s["depth"]) for s in trace.slices()} == {("requests", 0)}
    assert [s["args"]["request_id"] for s in trace.slices()] == [f"r{number}" for number in range(10)]
    assert trace.one(f"select count(distinct track_id) from slice where name != '{STARTS}'") == 3


def test_collections_share_one_row(importer: Importer, recording: RecordingFile) -> None:
    """Garbage collections share one row, whichever thread recorded them."""
    process = recording.process(role="worker", rank=0)
    for number in range(2):
        process.thread().span_at("python.gc", 10 * number, 10 * number + 5, lane=1)
    trace = load(importer, recording)
    trace.check_clean(slices=2, counters=0)
    assert {slice["track"] for slice in trace.slices()} == {"python.gc"}
    assert trace.one("select count(distinct track_id) from slice where name = 'python.gc'") == 1


def test_rows_are_in_reading_order(importer: Importer, recording: RecordingFile) -> None:
    """The rows of a process are in reading order: its phases first, then memory, other counters and requests."""
    thread = recording.process(role="engine", rank=0).thread()
    thread.counter("tokens_per_second", 1, 1.5)
    thread.counter("rollout.kv_cache_bytes", 1, 5)
    thread.counter("rollout.weights_bytes", 1, 5)
    thread.span_at("rollout.request", 1, 5, request_id="r")
    thread.span("rollout.generate", 1, 5)
    thread.span("engine.step", 2, 3)
    trace = load(importer, recording)
    trace.check_clean(slices=3, counters=3)
    assert row_names(trace, "rank 0 engine") == [
        "Phases · rank 0 engine", "Start-up · rank 0 engine", "memory", "other counters", "requests",
        "rollout.weights", "rollout.kv_cache", "tokens_per_second",
    ]  # fmt: skip


def test_engine_start_up_is_not_pinned(importer: Importer, recording: RecordingFile) -> None:
    """The start-up of an engine is on a row of its own, which is not pinned."""
    recording.process(1, role="sampler", start_ns=1)
    worker = recording.process(2, role="worker", rank=0).thread()
    engine = recording.process(3, role="engine", rank=0).thread()
    worker.span("actor.build", 1, 2)
    worker.span("actor.update", 5, 6)
    engine.span("rollout.load", 1, 2)
    engine.span("rollout.sleep", 5, 6)
    trace = load(importer, recording)
    assert trace.one(
        "select t.name from slice s join track t on s.track_id = t.id where s.name = 'recording starts'"
    ) == ("Start-up · sampler")
    assert {(row["name"], row["track"]) for row in trace.slices()} == {
        ("actor.build", "Phases · rank 0 worker"), ("actor.update", "Phases · rank 0 worker"),
        ("rollout.load", "Start-up · rank 0 engine"), ("rollout.sleep", "Phases · rank 0 engine"),
    }  # fmt: skip


INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple), max_size=60)


@pytest.mark.parametrize("kind", [NestedRow, FlatRow])
@given(intervals=INTERVALS)
def test_spans_in_any_order_nest(kind: type[Any], intervals: list[tuple[int, int]]) -> None:
    """Spans nest on every row, in whatever order they were written."""
    rows = Rows(kind)
    placed = [(rows.place(start, end), start, end) for start, end in intervals]
    for later, (row, start, end) in enumerate(placed):
        for other_row, other_start, other_end in placed[:later]:
            if row == other_row:
                apart = other_end <= start or end < other_start
                around = kind is NestedRow and start < other_start and other_end <= end
                assert apart or around


def test_spans_that_fit_one_row_take_one() -> None:
    """A parent that ends with its last child, and a request that comes as the one before it goes."""
    nested, flat = Rows(NestedRow), Rows(FlatRow)
    assert [nested.place(*span) for span in ((2, 5), (1, 5), (6, 9), (0, 9))] == [0, 0, 0, 0]
    assert [flat.place(*span) for span in ((0, 5), (5, 9))] == [0, 0]


def test_row_forgets_the_distant_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row forgets spans that are long past, and still finds the right row for every new one."""
    monkeypatch.setattr("rltrace_exporters.rows.REMEMBERED", 4)
    rows = Rows(NestedRow)
    assert [rows.place(10 * n, 10 * n + 5) for n in range(20)] == [0] * 20
    assert rows.place(5, 12) == 1
    assert rows.place(0, 1000) == 1
    assert len(rows.rows[0].starts) <= 4  # type: ignore[attr-defined]


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[str, int]]:
    """What a thread does: begin a span, or end one that is open, in any order."""
    open_spans: list[int] = []
    events = []
    for number in range(draw(st.integers(1, 40))):
        if open_spans and draw(st.booleans()):
            events.append(("end", open_spans.pop(draw(st.integers(0, len(open_spans) - 1)))))
        else:
            open_spans.append(number)
            events.append(("begin", number))
    return events


def keep(thread: ThreadFile, schedule: list[tuple[str, int]], prefix: str) -> dict[str, tuple[int, int]]:
    """Write what a thread does; start and length of its spans by name."""
    expected = {}
    for time, (what, number) in enumerate(schedule):
        name = f"{prefix}.{number}"
        if what == "begin":
            thread.begin(name, time)
            expected[name] = (time, -1)
        else:
            start = expected[name][0]
            thread.end(start, time)
            expected[name] = (start, time - start)
    return expected


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(of_threads=st.lists(schedules(), min_size=1, max_size=12))
def test_any_order_is_imported_exactly(
    importer: Importer, tmp_path_factory: pytest.TempPathFactory, of_threads: list[list[tuple[str, int]]]
) -> None:
    """Spans that begin and end in any order are imported exactly.

    An example has many threads: the importer takes as long for one.
    """
    recording = RecordingFile(tmp_path_factory.mktemp("schedule") / "run")
    process = recording.process()
    expected: dict[str, tuple[int, int]] = {}
    for number, schedule in enumerate(of_threads):
        expected |= keep(process.thread(1 + number, f"thread {number}"), schedule, f"s{number}")
    trace = load(importer, recording)
    trace.check_clean(slices=len(expected), counters=0)
    assert {s["name"]: (s["ts"] - REALTIME_NS, s["dur"]) for s in trace.slices()} == expected


def test_slices_say_which_of_many_they_are(importer: Importer, recording: RecordingFile) -> None:
    """A step its number, a call its method, FSDP's spans their module; what the span is called is an argument."""
    thread = recording.process(rank=0).thread()
    spans = [
        ("step", {"step": 3}, "step 3"),
        ("step", {}, "step"),
        ("ray.call", {"method": "Worker.generate_sequences"}, "ray.call Worker.generate_sequences"),
        ("ray.submit", {"method": "generate_sequences"}, "ray.submit generate_sequences"),
        ("fsdp.forward", {"module": "model.layers.7"}, "fsdp.forward model.layers.7"),
        ("fsdp.forward", {"module": "model.layers.8"}, "fsdp.forward model.layers.8"),
        ("fsdp.all_gather", {"module": "", "bytes": 5}, "fsdp.all_gather (root)"),
        ("fsdp.reduce_scatter", {"module": "lm_head"}, "fsdp.reduce_scatter lm_head"),
        ("fsdp.backward", {"module": "lm_head"}, "fsdp.backward lm_head"),
        ("gpu.fsdp.forward", {"module": "", "stream": 3}, "gpu.fsdp.forward (root)"),
        ("gpu.fsdp.all_gather", {"bytes": 5}, "gpu.fsdp.all_gather"),
        ("work", {"module": "m", "method": "f"}, "work"),
    ]
    for again in range(2):
        for place, (name, args, _) in enumerate(spans):
            write = thread.span_at if name.startswith("gpu.") else thread.span
            at = 1000 * again + 10 * place
            write(name, at, at + 5, **args)
    trace = load(importer, recording)
    trace.check_clean(slices=2 * len(spans), counters=0)
    expected = [(shown, args | ({"rltrace_name": name} if shown != name else {})) for name, args, shown in spans]
    assert [(s["name"], s["args"]) for s in trace.slices()] == 2 * expected
    stable = "coalesce(extract_arg(arg_set_id, 'debug.rltrace_name'), name)"
    assert trace.one(f"select count(*) from slice where {stable} = 'fsdp.forward'") == 4


def test_samplers_come_last(importer: Importer, recording: RecordingFile) -> None:
    """And the driver first, whoever began first."""
    for pid, role in enumerate(("sampler", "worker", "process", "driver"), 11):
        recording.process(pid, role=role, start_ns=1000 * SECOND + pid).thread().span("work", 10, 20)
    trace = load(importer, recording)
    ordered = [process.role for process in in_order(Recording.open(recording.path).processes)]
    assert ordered == ["driver", "worker", "process", "sampler"]
    numbered = trace.query("select name from process where upid > 0 order by upid")
    assert [name.partition(" ")[0] for (name,) in numbered] == ordered


def test_live_run_says_when_it_was_read(importer: Importer, tmp_path: Path) -> None:
    """The trace of a live run has a row that says when the run was read.

    One of its processes, this one, is alive.
    """
    file = RecordingFile(tmp_path / "run")
    alive = file.process(os.getpid(), host=manifest.host_name(), start_ticks=manifest.started_ticks(os.getpid()))
    alive.thread().span("work", 10, 20)
    before_ns = time_ns()
    trace = load(importer, file)
    trace.check_clean(slices=2, counters=0)
    ((at_ns, row),) = trace.query("""
        select s.ts as ts, t.name as row from slice s join track t on t.id = s.track_id where s.name = 'snapshot'
    """)
    assert before_ns <= at_ns <= time_ns()
    assert row == f" Live run, seen at {datetime.fromtimestamp(at_ns // SECOND, timezone.utc):%H:%M:%S} UTC"


# ---------------------------------------------------------------- counters


def test_memory_that_stays_zero_has_no_row(importer: Importer, recording: RecordingFile) -> None:
    """Of what is something later every sample is there, the zeros before too; other counters may be zero."""
    device = {"host": "node", "uuid": "GPU-1"}
    thread = recording.process(role="worker", rank=0, device=device).thread()
    for ts, params, unknown in ((1, 0, 0), (2, 0, math.nan), (3, 5, 0), (4, 0, 0)):
        thread.counter("actor.params_bytes", ts, params)
        thread.counter("actor.grads_bytes", ts, 0)
        thread.counter("ref.params_bytes", ts, unknown)
        thread.counter("waiting", ts, 0)
    trace = load(importer, recording)
    of_process = "select count(*) from counter c join track t on t.id = c.track_id where t.name = '{}'"
    assert [trace.one(of_process.format(name)) for name in ("actor.grads", "waiting")] == [0, 4]
    values = [
        size_bytes
        for (size_bytes,) in trace.query(f"""
            select {IN_BYTES} as size_bytes from counter c join counter_track u on u.id = c.track_id
            join track t on t.id = u.id join track above on above.id = t.parent_id
            where u.name = 'actor.params' and above.name = 'memory' order by ts
        """)
    ]
    assert values == [0, 0, 5, 0]
    assert trace.one(of_process.format("ref.params")) == 4, "what nobody knows is not zero"
    assert device_groups(trace) == {" Memory · rank 0 · GPU-1": {"actor.params": [0, 5, 0], "owned": [0, 5, 0]}}


@pytest.mark.parametrize(("uuid", "unit"), [("GPU-1", "GiB"), ("MIG-1", "GiB"), ("cpu:0", "MiB"), (None, "MiB")])
def test_memory_keeps_unit_and_bytes(importer: Importer, recording: RecordingFile, uuid: str | None, unit: str) -> None:
    """All memory has one unit, a power of 1,024, and no byte is lost: a value times its unit is what was recorded.

    The UI by itself would write G for 10^9.
    """
    recording.process(1, role="driver").thread().counter("resident_bytes", 1, 12345)
    thread = recording.process(2, device={"host": "node", "uuid": uuid}).thread()
    values = [0, 1, 64_457_932_803, (1 << 53) - 1, -3, 2.5]
    for ts, value in enumerate(values):
        thread.counter("queue_bytes", ts, value)
    trace = load(importer, recording)
    trace.check_clean(slices=0, counters=7)
    assert set(trace.query("select name, unit from counter_track")) == {("resident", unit), ("queue", unit)}
    rows = trace.query(f"""
        select {IN_BYTES} as size_bytes from counter c join counter_track u on u.id = c.track_id
        where u.name = 'queue' order by ts
    """)
    assert [size_bytes for (size_bytes,) in rows] == values


UNITS = {
    "gpu.nvlink_sent_bytes_per_second": "bytes/s",
    "tokens_per_second": "tokens/s",
    "prompt_tokens_per_second": "tokens/s",
    "cpu_percent": "%",
    "gpu.power_watts": "W",
    "gpu.sm_clock_megahertz": "MHz",
    "gpu.power_limited": None,
    "sampler.cpu_seconds": "s",
    "wait_ms": "ms",
    "num_tokens": "tokens",
    "reward_mean": None,
    "kv_usage_ratio": None,
    "loss": None,
    "waiting": None,
}


def test_counters_have_units_of_their_names(importer: Importer, recording: RecordingFile) -> None:
    """Counters keep their values and have the unit that their name ends with.

    The last word does not do: that of `tokens_per_second`, or of `reward_mean`, is no unit.
    """
    thread = recording.process().thread()
    values = [0, 1, 1 << 40, -3, 2.5]
    for name in UNITS:
        for ts, value in enumerate(values):
            thread.counter(name, ts, value)
    trace = load(importer, recording)
    trace.check_clean(slices=0, counters=len(UNITS) * len(values))
    found = "select value from counter join counter_track t on t.id = track_id where name = '{}' order by ts"
    for name in UNITS:
        assert [value for (value,) in trace.query(found.format(name))] == values
    assert {name: unit or None for name, unit in trace.query("select name, unit from counter_track")} == UNITS
    above = "select distinct above.name from counter_track c join track t using (id) join track above on above.id = "
    assert trace.one(above + "t.parent_id") == "other counters"


def test_device_group_sums_its_processes(importer: Importer, recording: RecordingFile) -> None:
    """The group of a device shows what its processes hold together."""
    device = {"host": "node", "uuid": "cpu-0"}
    worker = recording.process(100, role="worker", rank=0, device=device).thread()
    engine = recording.process(200, role="engine", rank=0, device=device).thread()
    for ts, mine, its in ((10, 1, 2), (20, 1, 5), (30, 4, 0)):
        worker.counter("allocator.cached_bytes", ts, mine)
        engine.counter("allocator.cached_bytes", ts + 1, its)
    worker.counter("used_bytes", 12, 70)
    engine.counter("used_bytes", 22, 80)
    worker.counter("loss", 40, 0.5)
    trace = load(importer, recording)
    trace.check_clean(slices=0, counters=7 + 5 + 5 + 2)
    held = [1, 3, 6, 9, 4]
    assert device_groups(trace) == {
        " Memory · rank 0 · cpu-0": {"allocator.cached": held, "owned": held, "used": [70, 80]}
    }


def test_libraries_do_not_flatten_owners(importer: Importer, recording: RecordingFile) -> None:
    """Libraries and free memory have scales of their own, so they do not make the owners' lines flat."""
    thread = recording.process(role="worker", rank=0, device={"host": "node", "uuid": "cpu-0"}).thread()
    thread.counter("actor.params_bytes", 1, 5)
    thread.counter("interpreter_bytes", 1, 700)
    assert device_scales(load(importer, recording)) == {"owned": "totals", "interpreter": None}


IN_BYTES = "c.value * case u.unit when 'GiB' then 1 << 30 when 'MiB' then 1 << 20 end"
"""Of a counter `c` on a track `u`; as in the documents."""

DEVICE_COUNTERS = f"""
    select above.name as above, u.name as row, c.ts as ts, {IN_BYTES} as size_bytes from counter c
    join counter_track u on u.id = c.track_id join track t on t.id = u.id join track above on above.id = t.parent_id
    where above.name like ' Memory ·%' order by row, ts
"""


def device_groups(trace: Trace) -> dict[str, dict[str, list[float]]]:
    """Bytes of each counter of each device's group."""
    found: dict[str, dict[str, list[float]]] = {}
    for group, row, _, size_bytes in trace.query(DEVICE_COUNTERS):
        found.setdefault(group, {}).setdefault(row, []).append(size_bytes)
    return found


SCALES = {"used": "totals", "owned": "totals", "free": None}
"""Of a GPU's group, the axes of all rows but owners', which share one; None: an axis of its own."""


def device_scales(trace: Trace) -> dict[str, str | None]:
    """The axes that counters of devices' groups are on, those on the owners' left out."""
    rows = trace.query("""
        select t.name as name, extract_arg(c.source_arg_set_id, 'y_axis_share_key') as scale, c.unit as unit
        from counter_track c join track t on t.id = c.id join track above on above.id = t.parent_id
        where above.name like ' Memory ·%'
    """)
    assert len({unit for _, _, unit in rows} & {"GiB", "MiB"}) == len({unit for _, _, unit in rows}) == 1
    return {name: scale for name, scale, _ in rows if scale != "owners"}


USED_SOURCES = """
    select cast(c.value * (1 << 30) as int) as value, extract_arg(c.arg_set_id, 'debug.source') as source
    from counter c join track t on t.id = c.track_id join track above on above.id = t.parent_id
    where above.name like ' Memory ·%' and t.name = 'used' order by c.ts
"""
"""Who read each point of the line of what is used."""


def test_gpu_group(importer: Importer, recording: RecordingFile) -> None:
    """A GPU's group has one line of its total, whose points say who read them, and what nobody explains.

    At the first of two boundaries the worker's 60 and the driver's 10 are of 90 bytes, at the second 80 and 10 of 95.
    """
    device = {"host": "node", "uuid": "GPU-1"}
    worker = recording.process(100, role="worker", rank=0, device=device).thread()
    for ts, params, used in ((10, 60, 80), (20, 80, 85)):
        worker.begin("memory.edge", ts)
        worker.counter("actor.params_bytes", ts + 1, params)
        worker.counter("used_bytes", ts + 2, used + 10)
        totals = {"used": used, "driver.reserved": 10}
        worker.end(ts, ts + 3, totals=totals, free_bytes=100 - used, held_bytes={"100": used}, cpu_ns={"100": ts})
    sampler = recording.process(300, role="sampler").thread()
    for uuid, used in (("GPU-1", 81), ("GPU-2", 7)):
        sampler.counter(f"gpu.used_bytes/{uuid}", 15, used)
        sampler.counter(f"gpu.reserved_bytes/{uuid}", 15, 10)
    trace = load(importer, recording)
    assert device_groups(trace) == {
        " Memory · rank 0 · GPU-1": {
            "used": [90, 91, 95],
            "owned": [70, 90],
            "actor.params": [60, 80],
            "driver.reserved": [10],
            "unaccounted": [20, 5],
            "free": [20, 15],
        }
    }
    assert device_scales(trace) == SCALES
    times = {ts - REALTIME_NS for _, row, ts, _ in trace.query(DEVICE_COUNTERS) if row == "unaccounted"}
    assert times == {13, 23}, "where the edges end"
    assert trace.query(USED_SOURCES) == [(90, "rank 0 worker"), (91, "sampler"), (95, "rank 0 worker")]
    shown = group_rows(trace)
    assert shown[0] == "used" and shown[-3:] == ["driver.reserved", "unaccounted", "free"]


def group_rows(trace: Trace) -> list[str]:
    """Rows of all devices' groups in the order of the UI."""
    trace.query("include perfetto module viz.summary.track_event")
    rows = trace.query("""
        select g.name as row from _track_event_tracks_ordered_groups g join track above on above.id = g.parent_id
        where above.name like ' Memory ·%' order by g.order_id
    """)
    return [name for (name,) in rows]


def test_rows_end_with_a_killed_process(importer: Importer, recording: RecordingFile) -> None:
    """Rows of a process that was killed end when it was seen to be gone, in its own group and in its device's."""
    device = {"host": "node", "uuid": "GPU-1"}
    engine = recording.process(200, role="engine", rank=0, device=device)
    thread = engine.thread()
    thread.counter("rollout.weights_bytes", 10, 5 << 30)
    thread.counter("loss", 10, 5)
    engine.is_killed(20)
    trace = load(importer, recording)
    rows = trace.query("""
        select t.name as name, c.ts as ts, c.value as value from counter c join track t on t.id = c.track_id
        order by t.name, c.ts
    """)
    found = [(name, ts - REALTIME_NS, value) for name, ts, value in rows]
    assert sorted(set(found)) == [
        ("loss", 10, 5),
        ("owned", 10, 5),
        ("owned", 20, 0),
        ("rollout.weights", 10, 5),
        ("rollout.weights", 20, 0),
    ]
    assert found.count(("rollout.weights", 20, 0)) == 2


def test_used_outlives_first_process(importer: Importer, recording: RecordingFile) -> None:
    """The used bytes of a GPU do not end with the first of its processes."""
    device = {"host": "node", "uuid": "GPU-1"}
    engine = recording.process(200, role="engine", rank=0, device=device)
    thread = engine.thread()
    thread.counter("rollout.weights_bytes", 10, 5)
    thread.counter("used_bytes", 11, 9)
    engine.ends(20)
    found = device_groups(load(importer, recording))
    assert found == {" Memory · rank 0 · GPU-1": {"rollout.weights": [5, 0], "owned": [5, 0], "used": [9]}}


def test_counter_of_two_threads_is_one_row(importer: Importer, recording: RecordingFile) -> None:
    """A counter that two threads sample is one row."""
    process = recording.process()
    process.thread(1, "a").counter("allocated_bytes", 5, 50)
    process.thread(2, "b").counter("allocated_bytes", 3, 30)
    trace = load(importer, recording)
    trace.check_clean(slices=0, counters=2)
    assert trace.query("select value * (1 << 20) as size from counter order by ts") == [(30,), (50,)]
    assert trace.one("select count(*) from counter_track where name = 'allocated'") == 1


def test_owners_share_a_scale_that_totals_do_not(importer: Importer, recording: RecordingFile) -> None:
    thread = recording.process().thread()
    names = ("actor.grads_bytes", "actor.params_bytes", "resident_bytes")
    for name in names:
        thread.counter(name, 1, 5)
    trace = load(importer, recording)
    trace.check_clean(slices=0, counters=3)
    scale = "extract_arg(source_arg_set_id, 'y_axis_share_key')"
    found = trace.query(f"select name, {scale} as scale from counter_track order by name")
    assert found == [("actor.grads", "owners"), ("actor.params", "owners"), ("resident", "totals")]


def test_host_memory_has_own_group(importer: Importer, recording: RecordingFile) -> None:
    """The host's memory has a group of its own, with the pinned bytes below each owner."""
    thread = recording.process(role="worker", rank=0, device={"host": "node", "uuid": "GPU-1"}).thread()
    samples = {
        "unattributed_pinned_bytes": 4,
        "ref.params_pinned_bytes": 20,
        "ref.params_host_bytes": 30,
        "actor.params_host_bytes": 9,
        "actor.params_pinned_bytes": 0,
    }
    for name, size in samples.items():
        thread.counter(name, 1, size)
    thread.counter("resident_bytes", 1, 70)
    trace = load(importer, recording)
    trace.check_clean(slices=0, counters=5)
    names = row_names(trace, "rank 0 worker")
    assert names[-5:] == [
        "resident", "actor.params_host", "ref.params_host", "ref.params_pinned", "unattributed_pinned",
    ]  # fmt: skip
    of_group = """
        select t.name || '_bytes' as row, c.value * (1 << 30) as size,
               extract_arg(t.source_arg_set_id, 'y_axis_share_key') as scale
        from counter c join track t on t.id = c.track_id join track above on above.id = t.parent_id
        where above.name = 'memory of the host'
    """
    assert {name: (size, scale) for name, size, scale in trace.query(of_group)} == {
        name: (size, "owners") for name, size in samples.items() if size
    }


def test_exact_memory_has_own_tracks(importer: Importer, recording: RecordingFile) -> None:
    """Exact memory has tracks beside the sampled ones, and the clock bound is an argument of its span."""
    device = {"host": "node", "uuid": "GPU-1"}
    thread = recording.process(role="worker", rank=0, device=device).thread()
    thread.span_at("memory.allocations", 10, 90, 1, error_ns=40, lost=0, peak_bytes=7)
    for ts, size in ((10, 3), (20, 7), (20, 5), (90, 0)):
        thread.counter("allocations.actor.params_bytes", ts, size)
    thread.counter("allocations.ref.params_bytes", 10, 1)
    thread.counter("actor.params_bytes", 15, 6)
    trace = load(importer, recording)
    trace.check_clean(slices=1, counters=6 + 2)  # the sampled one is in its device's group too, and in its sum
    sql = """
        select above.name as above, t.name as row, c.ts as ts, c.value * (1 << 30) as size from counter c
        join track t on t.id = c.track_id join track above on above.id = t.parent_id
        where above.name glob 'memory*' order by above, c.ts, c.id
    """
    exact = "memory, every allocation (0 where none was kept)"
    assert [(above, row, ts - REALTIME_NS, value) for above, row, ts, value in trace.query(sql)] == [
        ("memory", "actor.params", 15, 6),
        (exact, "actor.params, every allocation", 10, 3),
        (exact, "ref.params, every allocation", 10, 1),
        *((exact, "actor.params, every allocation", ts, size) for ts, size in ((20, 7), (20, 5), (90, 0))),
    ]
    (whole,) = trace.slices()
    assert (whole["track"], whole["args"]) == ("memory.allocations", {"error_ns": 40, "lost": 0, "peak_bytes": 7})
    names = row_names(trace, "rank 0 worker")
    assert names.index("memory") < names.index(exact) < names.index("memory.allocations")


def test_gpu_rows_say_what_they_hold(importer: Importer, recording: RecordingFile) -> None:
    """A GPU stream, its kernels and torch's operators have rows that say so."""
    thread = recording.process().thread()
    for lane, names in ((1, ("gpu.fsdp.all_gather", "gpu.fsdp.forward")), (7, ("kernel.gemm",)), (9, ("op.aten::mm",))):
        for number, name in enumerate(names):
            thread.span_at(name, 10 * number, 10 * number + 5, lane, error_ns=40)
    trace = load(importer, recording)
    trace.check_clean(slices=4, counters=0)
    assert {(s["name"], s["track"]) for s in trace.slices()} == {
        ("gpu.fsdp.all_gather", "gpu stream 1"),
        ("gpu.fsdp.forward", "gpu stream 1"),
        ("kernel.gemm", "kernels of gpu stream 7"),
        ("op.aten::mm", "torch operators of thread 9"),
    }


def test_sampler_has_groups_of_host_and_gpus(importer: Importer, recording: RecordingFile) -> None:
    """A sampler has a group for its host and one for each GPU."""
    engine = recording.process(5, role="engine", rank=1, device={"host": "node", "uuid": "GPU-a"})
    engine.thread().span("rollout.generate", 1, 2)
    samples = recording.process(6, role="sampler").thread()
    for name in ("host.cpu_percent", "gpu.used_bytes/GPU-a", "gpu.used_bytes/GPU-b", "gpu.power_watts/GPU-b"):
        samples.counter(name, 3, 7)
    samples.counter(f"gpu.process_bytes/GPU-a/{engine.folder.name}", 3, 7)
    samples.counter(f"process.pss_bytes/{engine.folder.name}", 3, 7)
    trace = load(importer, recording)
    trace.check_clean(slices=1, counters=6)
    rows = """
        select above.name as above, t.name, c.unit from track t join counter_track c on c.id = t.id
        join track above on above.id = t.parent_id
    """
    assert sorted(trace.query(rows)) == [
        ("GPU GPU-a", "gpu.process rank 1 engine", "GiB"),
        ("GPU GPU-a", "gpu.used", "GiB"),
        ("GPU GPU-b", "gpu.power_watts", "W"),
        ("GPU GPU-b", "gpu.used", "GiB"),
        ("host node", "host.cpu_percent", "%"),
        ("processes on node", "process.pss rank 1 engine", "GiB"),
    ]


def test_own_name_does_not_hide_rank(importer: Importer, recording: RecordingFile) -> None:
    """The name that a process gave itself does not hide its role and rank."""
    recording.process(5, role="worker", rank=1, name="Worker").thread().span("actor.update", 1, 2)
    trace = load(importer, recording)
    assert [(s["process"], s["track"]) for s in trace.slices()] == [("rank 1 worker · node", "Phases · rank 1 worker")]


# ---------------------------------------------------------------- flows


def test_arrows_point_from_sender_to_receiver(importer: Importer, recording: RecordingFile) -> None:
    driver = recording.process(1, role="driver").thread()
    driver.begin("ray.dispatch", 10)
    driver.flow("call-1", 11, "out")
    driver.flow("call-2", 12, "out")
    driver.end(10, 20)
    for rank in (0, 1):
        worker = recording.process(2 + rank, rank=rank).thread()
        worker.begin("receive", 10 + rank)
        worker.flow(f"call-{rank + 1}", 30, "in")
        worker.end(10 + rank, 40)
    trace = load(importer, recording)
    trace.check_clean(slices=3, counters=0, flows=2)
    arrows = trace.query("""
        select a.name as source, b.name as target, b.ts as ts from flow
        join slice a on a.id = slice_out join slice b on b.id = slice_in order by 3
    """)
    assert arrows == [("ray.dispatch", "receive", REALTIME_NS + 10), ("ray.dispatch", "receive", REALTIME_NS + 11)]


def test_server_requests_point_to_engines(importer: Importer, recording: RecordingFile) -> None:
    """Arrows lead from a server's requests to the engine's by their ids, to which newer vLLM appends something.

    Two requests of one task each have their own arrow, and so do two of one id; other requests have none.
    """
    server = recording.process(1, role="server", rank=0).thread()
    engine = recording.process(2, role="engine", name="EngineCore").thread()
    joined = ((10, "a-1", "a-1"), (30, "b", "b-9eb78f85"), (50, "b", "b-12345678"))
    for start, asked, known in (*joined, (70, "nobody", "0-aa"), (90, "somebody", "0-bb")):
        server.span("server.request", start, start + 10, task=7, request_id=asked)
        engine.span_at("rollout.request", start + 2, start + 8, lane=1, request_id=known)
    trace = load(importer, recording)
    trace.check_clean(slices=10, counters=0, flows=3)
    arrows = trace.query("""
        select a.name as source, a.ts as sent, b.name as target, b.ts as begun from flow
        join slice a on a.id = slice_out join slice b on b.id = slice_in order by a.ts
    """)
    assert arrows == [
        ("server.request", REALTIME_NS + start, "rollout.request", REALTIME_NS + start + 2) for start, *_ in joined
    ]


def test_half_an_arrow_is_no_error(importer: Importer, recording: RecordingFile) -> None:
    """An arrow without its other end is no error."""
    thread = recording.process().thread()
    for start, direction in ((10, "out"), (20, "in")):
        thread.begin("half", start)
        thread.flow(f"lost-{start}", start, direction)
        thread.end(start, start + 1)
    load(importer, recording).check_clean(slices=2, counters=0, flows=0)


def test_arrows_of_open_spans_arrive(importer: Importer, recording: RecordingFile) -> None:
    """Arrows from open spans and from instants arrive."""
    sender = recording.process(1, role="driver").thread()
    for start, key in ((10, "a"), (20, "b")):
        sender.begin("send", start)
        sender.flow(key, start, "out")
        sender.end(start, start + 1)
    receiver = recording.process(2, rank=0).thread()
    receiver.begin("instant", 30)
    receiver.flow("a", 30, "in")
    receiver.end(30, 30)
    receiver.begin("open", 40)
    receiver.flow("b", 41, "in")
    trace = load(importer, recording)
    trace.check_clean(slices=4, counters=0, flows=2)
    found = trace.query("select b.name as target from flow join slice b on b.id = slice_in order by b.ts")
    assert found == [("instant",), ("open",)]


# ---------------------------------------------------------------- clocks


def test_one_clock_keeps_exact_distances(importer: Importer, recording: RecordingFile) -> None:
    """Processes of one clock keep their exact distance in time."""
    recording.process(1, role="driver").thread().span("a", 100, 200)
    # The second's real-time clock was set back a second meanwhile; the monotonic clock they share knows better.
    recording.process(2, rank=0, start_ns=1000 * SECOND + 1, realtime_ns=REALTIME_NS - SECOND).thread().span(
        "b", 150, 160
    )
    trace = load(importer, recording)
    trace.check_clean(slices=2, counters=0)
    assert [(s["name"], s["ts"] - REALTIME_NS) for s in trace.slices()] == [("a", 100), ("b", 150)]


def test_unmeasured_clocks_align_by_real_time(importer: Importer, recording: RecordingFile) -> None:
    """Clocks of two hosts that were not measured are aligned by real time, and the trace says so."""
    recording.process(1, role="driver").thread().span("a", 0, 10)
    clock = {"monotonic_ns": 1005 * SECOND, "realtime_ns": REALTIME_NS + 7 * SECOND}
    far = recording.process(2, host="far", boot="other", rank=0, start_ns=1001 * SECOND, **clock)
    far.thread().span("b", 5 * SECOND, 6 * SECOND)
    trace = load(importer, recording)
    trace.check_clean(slices=2, counters=0)
    assert [(s["name"], s["ts"] - REALTIME_NS) for s in trace.slices()] == [("a", 0), ("b", 7 * SECOND)]
    assert _labels(trace) == [("another clock, aligned by real time, error unknown",)]
    if trace.version != "v52":  # older importers know no attributes of a trace
        assert (
            trace.one("select str_value from metadata where name = 'trace_attribute.rltrace.clock_error_bound'")
            == "unknown: aligned by real time"
        )


def test_phase_row_says_clock_is_not_aligned(importer: Importer, recording: RecordingFile) -> None:
    """A row of phases says that its clock is not aligned.

    It is pinned to the top of the timeline, away from its process and the label there.
    """
    recording.process(1, role="driver").thread().span("reward", 0, 10, phase=True)
    recording.process(2, host="far", boot="other", rank=0).thread().span("actor.update", 5, 6, phase=True)
    rows = [slice_["track"] for slice_ in load(importer, recording).slices()]
    assert rows == ["Phases · driver", "Phases · rank 0 worker · CLOCK NOT ALIGNED"]


def test_measured_clocks_align_within_bound(importer: Importer, recording: RecordingFile) -> None:
    """Clocks of two hosts that were measured are aligned, and the trace says within which bound."""
    recording.belongs_to("boot")
    recording.process(1, role="driver").thread().span("a", 0, 10)
    far = recording.process(2, host="far", boot="other", rank=0, start_ns=1000 * SECOND, realtime_ns=REALTIME_NS + 7)
    far.thread().span("actor.update", 5 * SECOND, 6 * SECOND, phase=True)
    # The process began 5 s before the first exchange: 30 ppm of that, twice NTP's PHI.
    recording.exchanges("boot", "other", (1_005 * SECOND, 1_005 * SECOND, 1_005 * SECOND + 200))
    recording.exchanges("boot", "other", (1_405 * SECOND, 1_405 * SECOND + 400_000, 1_405 * SECOND + 200))
    trace = load(importer, recording)
    trace.check_clean(slices=2, counters=0)
    shown = [(s["name"], s["track"], s["ts"] - REALTIME_NS, s["dur"]) for s in trace.slices()]
    assert shown == [
        ("a", "MainThread", 0, 10),
        ("actor.update", "Phases · rank 0 worker", 5 * SECOND + 100, SECOND - 1000),
    ]
    assert _labels(trace) == [("another clock, aligned within 0.150 ms",)]
    if trace.version != "v52":
        name = "trace_attribute.rltrace.clock_error_bound"
        assert trace.one(f"select str_value from metadata where name = '{name}'") == "0.150 ms"


def _labels(trace: Trace) -> list[Any]:
    return trace.query(
        "select string_value as label from args join process using (arg_set_id) where key like '%label%'"
    )


def test_the_trace_knows_when_it_began(importer: Importer, recording: RecordingFile) -> None:
    recording.process().thread().span("a", 5, 10)
    trace = load(importer, recording)
    assert trace.one("select max(ts) from slice") == REALTIME_NS + 5
    assert trace.one("select distinct clock_value - ts from clock_snapshot where clock_name = 'REALTIME'") == 0


def test_seconds_count_from_first_process(importer: Importer, recording: RecordingFile) -> None:
    """Seconds count from the start of the first process, as in `rltrace summary`, and not from the first event."""
    recording.process(1, role="driver", start_ns=1002 * SECOND).thread().span("a", 7 * SECOND, 8 * SECOND)
    recording.process(2, rank=0, start_ns=1001 * SECOND).thread().span("b", 6 * SECOND, 7 * SECOND)
    far = {"host": "far", "boot": "other", "monotonic_ns": 1, "realtime_ns": REALTIME_NS + 3 * SECOND}
    recording.process(3, rank=1, start_ns=1, **far)
    recording.process(4, role="helper").folder.joinpath("process.jsonl").write_text("damaged")
    trace = load(importer, recording)
    trace.check_clean(slices=2, counters=0)
    assert trace.one("select trace_start() as start") == REALTIME_NS + SECOND
    (mark,) = trace.query("select name, dur from slice order by ts limit 1")
    assert mark == ("recording starts", 0)


def test_exports_are_reproducible(importer: Importer, recording: RecordingFile) -> None:
    """Two exports of one Recording are the same, and an export with more events is another trace."""
    thread = recording.process(rank=0).thread()
    recording.process(101, rank=0, role="engine").thread(7, "reader").span("b", 1, 2, bytes=1)
    identity = "select str_value from metadata where name = 'trace_uuid'"
    identities = []
    for index in range(2):
        thread.span("a", 10 * index, 10 * index + 5)
        once, again = export(recording.path), export(recording.path)
        assert once == again
        trace = importer.load(once)
        trace.check_clean(slices=2 + index, counters=0)
        identities.append(trace.one(identity))
    assert identities[0] != identities[1]


# ---------------------------------------------------------------- bounds


def test_many_names_arrive(importer: Importer, recording: RecordingFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name arrives, even if there are more than one sequence may number."""
    monkeypatch.setattr(perfetto_process, "MOST_NAMES", 50)
    monkeypatch.setattr(columns, "ROWS", 60)
    process = recording.process()
    for index in range(1000):
        if index % 100 == 0:
            thread = process.thread()
        thread.span(f"name {index}", 10 * index, 10 * index + 5, **{f"key {index}": f"value {index}"})
    trace = load(importer, recording)
    trace.check_clean(slices=1000, counters=0)
    for index, found in enumerate(trace.slices()):
        assert (found["name"], found["args"]) == (f"name {index}", {f"key {index}": f"value {index}"})


def test_memory_does_not_grow_with_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "ROWS", 2_000)
    peaks = []
    for spans in (10_000, 60_000):
        recording = RecordingFile(tmp_path / str(spans))
        process = recording.process()
        for segment in range(spans // 2_000):
            thread = process.thread()
            for index in range(2_000):
                start = segment * 1_000_000 + 100 * index
                thread.span(f"span {index % 100}", start, start + 50, index=index)
        tracemalloc.start()
        with (tmp_path / "out").open("wb") as out:
            Perfetto().write(Recording.open(recording.path), out)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def test_perfettos_classes_read_every_packet(recording: RecordingFile) -> None:
    """Perfetto's own classes read every packet, and know every field of it."""
    thread = recording.process().thread()
    thread.span("a", 1, 2, x=1, y="z", w=2.5)
    thread.counter("n", 3, 1)
    trace = TraceProto()
    for block in _blocks(export(recording.path)):
        trace.MergeFromString(zlib.decompress(block))
    assert not any(len(UnknownFieldSet(packet)) for packet in trace.packet)
    events = [packet for packet in trace.packet if packet.HasField("track_event")]
    assert [event.track_event.type for event in events] == [3, 1, 2, 4]
    assert [event.timestamp - REALTIME_NS for event in events] == [0, 1, 2, 3]
    assert [sorted(a.WhichOneof("value") for a in events[1].track_event.debug_annotations)] == [
        ["double_value", "int_value", "string_value"]
    ]


def test_pause_breaks_counters(importer: Importer, recording: RecordingFile) -> None:
    """Nobody knows the value of a counter while recording is paused; one that comes later has no break."""
    process = recording.process(100)
    process.pauses(20, 40)
    thread = process.thread()
    thread.span("step", 5, 70)
    for ts, value in ((10, 3), (50, 4)):
        thread.counter("queue_length", ts, value)
    thread.counter("late", 60, 1)
    trace = load(importer, recording)
    shown = trace.query("select name, ts, value from counter join counter_track t on t.id = track_id order by ts")
    assert [(name, ts - REALTIME_NS, value) for name, ts, value in shown] == [
        ("queue_length", 10, 3), ("queue_length", 20, None), ("queue_length", 50, 4), ("late", 60, 1),
    ]  # fmt: skip


def test_pause(importer: Importer, recording: RecordingFile) -> None:
    """A pause is a slice of its own, and calls that it cut off end there: those behind it do not nest in them."""
    process = recording.process(100)
    process.pauses(20, 40)
    thread = process.thread()
    thread.begin("ray.call", 10)
    thread.begin("work", 12)
    for ts in (50, 60):
        thread.span("ray.call", ts, ts + 5)
    thread.span("step", 5, 70)
    trace = load(importer, recording)
    trace.check_clean(slices=6, counters=0)
    shown = trace.query("select name, ts, dur, depth from slice where name not like 'recording starts' order by ts")
    assert [(name, ts - REALTIME_NS, dur, depth) for name, ts, dur, depth in shown if name != "step"] == [
        ("ray.call", 10, 10, 0),
        ("work", 12, 8, 1),
        ("recording paused", 20, 20, 0),
        ("ray.call", 50, 5, 0),
        ("ray.call", 60, 5, 0),
    ]
