"""The columns of a part of a process have the rows that its events are, natively decoded."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from same_columns import _said, decoded_natively
from shipped import SHIPPED, opened
from written_segments import process_of_segments, segments

from rltrace.analysis.selected import selected
from rltrace.events import Counter, Span
from rltrace.read import columns
from rltrace.read.recording import Process
from rltrace.read.selection import Seconds, Selection, numbers
from rltrace.read.window import Cut

ways = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


def same_part(process: Process) -> None:
    """Fail if columns and events of a part differ in anything but their order."""
    events = [*process.events()]
    found = columns.read(process)
    spans = [_said(span) for rows in found for span in rows.spans(np.arange(len(rows)))]
    assert sorted(spans, key=repr) == sorted((_said(event) for event in events if isinstance(event, Span)), key=repr)
    samples = [
        (rows.texts[name], thread, ts_ns, repr(value))
        for rows in found
        for name, thread, ts_ns, value in zip(*(column.tolist() for column in rows.samples[:4]), strict=True)
    ]
    expected = [
        (event.name, columns._signed(event.thread), event.ts_ns, repr(float(event.value)))
        for event in events
        if isinstance(event, Counter)
    ]
    assert sorted(samples) == sorted(expected)
    steps = [rows.arguments["step"][row] for rows in found for row in range(len(rows))]
    of_events = [rows.arguments["step"][row] for rows in columns.of_events(events) for row in range(len(rows))]
    assert sorted(steps) == sorted(of_events)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
@pytest.mark.parametrize(
    "selection",
    [
        Selection(steps=numbers("2")),
        Selection(steps=numbers("1"), ranks=numbers("1")),
        Selection(time=Seconds(70.0, 71.5)),
    ],
    ids=str,
)
def test_parts_of_shipped_recordings(file: Path, selection: Selection, monkeypatch: pytest.MonkeyPatch) -> None:
    part = selected(opened(file), selection)
    assert part.processes
    for process in part.processes:
        same_part(process)
        decoded_natively(process, monkeypatch)


windows = st.lists(st.integers(0, 60), min_size=2, max_size=6, unique=True).map(
    lambda times: tuple(zip(sorted(times)[::2], sorted(times)[1::2], strict=False))
)


@settings(ways, max_examples=60)
@given(segments(), windows, st.integers(1, 20))
def test_parts_of_anything(contents: list[bytes], cut: tuple[tuple[int, int], ...], rows: int) -> None:
    """However few rows are made at a time, what holds when a window begins is there."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "ROWS", rows)
        process = process_of_segments(Path(folder) / "run", contents)
        starts = [event.start_ns for event in process.events() if isinstance(event, Span)]
        numbers_of_steps = {start_ns: at for at, start_ns in enumerate(starts)}
        for depth in (None, 1, 2):
            same_part(process.part(Cut(cut, numbers_of_steps, depth)))
        same_part(process.part(Cut(depth=1)))
