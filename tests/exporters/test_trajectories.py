"""Each trajectory has a row with its turns and tools in Perfetto's own importer, whatever tasks these ran in."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from recording_file import REALTIME_NS, SECOND, RecordingFile
from rltrace_exporters.perfetto import Perfetto
from shipped import VERL, opened
from trace_processor import Importer, Trace

from rltrace.read.recording import Recording


@pytest.fixture
def recording(tmp_path: Path) -> RecordingFile:
    return RecordingFile(tmp_path / "run")


def exported(recording: Recording) -> bytes:
    out = io.BytesIO()
    Perfetto().write(recording, out)
    return out.getvalue()


def load(importer: Importer, path: Path) -> Trace:
    return importer.load(exported(Recording.open(path)))


def drawn(trace: Trace) -> list[tuple[Any, ...]]:
    """Slices on the rows of trajectories: row, name, begin and length in seconds, what is around each."""
    rows = trace.query(
        "select t.name as row, s.name as name, s.ts as ts, s.dur as dur, above.name as around from slice s"
        " join track t on t.id = s.track_id left join slice above on above.id = s.parent_id"
        " where t.name like 'trajectory %' order by t.name, s.ts, s.depth"
    )
    return [
        (row, name, (ts - REALTIME_NS) / SECOND, dur if dur < 0 else dur / SECOND, around)
        for row, name, ts, dur, around in rows
    ]


def test_turns_and_tools_are_inside(importer: Importer, recording: RecordingFile) -> None:
    """Tools of tasks of their own are too; those that overlap are one below the other."""
    thread = recording.process().thread()
    thread.span("trajectory", 0, 9 * SECOND, 1, trajectory="a", prompt="p")
    thread.span("agent_loop.request", 0, 2 * SECOND, 1, request_id="r", prompt_tokens=7, tokens=3)
    thread.span("tool", 2 * SECOND, 4 * SECOND, 2, tool="search", trajectory="a")
    thread.span("tool", 3 * SECOND, 5 * SECOND, 3, tool="python", trajectory="a")
    thread.span("agent_loop.request", 5 * SECOND, 9 * SECOND, 1, request_id="r")
    trace = load(importer, recording.path)
    assert drawn(trace) == [
        ("trajectory 1", "prompt p", 0, 9, None),
        ("trajectory 1", "turn 1", 0, 2, "prompt p"),
        ("trajectory 1", "search", 2, 2, "prompt p"),
        ("trajectory 1", "python", 3, 2, None),
        ("trajectory 1", "turn 2", 5, 4, "prompt p"),
    ]
    trace.check_clean(slices=2 * 5, counters=0)
    (turn,) = [one for one in trace.slices() if one["name"] == "turn 1"]
    said = {key.removeprefix("debug."): value for key, value in turn["args"].items()}
    assert said == {"prompt_tokens": 7, "tokens": 3, "rltrace_name": "agent_loop.request"}


def test_rows_are_used_again(importer: Importer, recording: RecordingFile) -> None:
    """There are as many rows as trajectories are in flight, in order; also of several processes."""
    for pid, spans in ((100, ((0, 4), (1, 9), (4, 6))), (101, ((2, 3), (6, 7)))):
        thread = recording.process(pid).thread()
        for number, (begin, end) in enumerate(spans):
            thread.span("trajectory", begin * SECOND, end * SECOND, number + 1, trajectory=f"{pid}.{number}")
    trace = load(importer, recording.path)
    assert [(row, name) for row, name, *_ in drawn(trace)] == [
        ("trajectory 1", "trajectory 100.0"),
        ("trajectory 1", "trajectory 100.2"),
        ("trajectory 1", "trajectory 101.1"),
        ("trajectory 2", "trajectory 100.1"),
        ("trajectory 3", "trajectory 101.0"),
    ]
    trace.check_clean(slices=2 * 5, counters=0)


def test_open_trajectories_stay_open(importer: Importer, recording: RecordingFile) -> None:
    """With an open tool; a tool that outlasts its trajectory has a row below it."""
    thread = recording.process().thread()
    thread.begin("trajectory", 0, 1)
    thread.begin("tool", SECOND, 1)
    thread.span("trajectory", 2 * SECOND, 4 * SECOND, 2, trajectory="b")
    thread.span("tool", 3 * SECOND, 5 * SECOND, 3, trajectory="b")
    trace = load(importer, recording.path)
    assert drawn(trace) == [
        ("trajectory 1", "trajectory", 0, -1, None),
        ("trajectory 1", "tool", 1, -1, "trajectory"),
        ("trajectory 2", "trajectory b", 2, 2, None),
        ("trajectory 2", "tool", 3, 2, None),
    ]
    assert trace.problems() == []


def test_moments_are_instants(importer: Importer, recording: RecordingFile) -> None:
    thread = recording.process().thread()
    thread.span("trajectory", 0, SECOND, 1)
    thread.span("tool", 0, 0, 1)
    trace = load(importer, recording.path)
    assert drawn(trace) == [
        ("trajectory 1", "trajectory", 0, 1, None),
        ("trajectory 1", "tool", 0, 0, "trajectory"),
    ]
    trace.check_clean(slices=4, counters=0)


def test_without_trajectories_there_are_no_rows(importer: Importer, recording: RecordingFile) -> None:
    thread = recording.process().thread()
    thread.span("tool", 0, SECOND)
    thread.span("agent_loop.request", 0, SECOND, 1, request_id="a")
    trace = load(importer, recording.path)
    assert trace.one("select count(*) from track where name = 'trajectories'") == 0
    trace.check_clean(slices=2, counters=0)


@pytest.fixture(scope="module")
def verl() -> bytes:
    return exported(opened(VERL))


def test_shipped_run_has_a_row_for_each(importer: Importer, verl: bytes) -> None:
    """Of 256 trajectories 64 are in flight at a time, each with one turn."""
    trace = importer.load(verl)
    slices = drawn(trace)
    outer = [one for one in slices if one[-1] is None]
    assert len(outer) == 256 and len({row for row, *_ in slices}) == 64
    assert all(name.startswith("prompt ") for _, name, *_ in outer)
    assert [name for _, name, *_, around in slices if around is not None] == ["turn 1"] * 256
    assert trace.problems() == []
    named = trace.query(
        "select s.name as name, s.dur as dur from slice s join track t on t.id = s.track_id"
        " where s.name = 'agent_loop.trajectory' order by s.ts, s.dur"
    )
    assert sorted(dur for _, dur in named) == sorted(round(one[3] * SECOND) for one in outer)
