"""Compares the columns of a process with its events, and with the columns that are made of its events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rltrace.events import Counter, Span
from rltrace.read import columns, native
from rltrace.read.columns import ARGUMENTS, Columns
from rltrace.read.recording import Process

LOSSES = ("torn", "orphans", "stray_flows", "misfits", "unfit", "damaged_segments", "unsealed", "threads")
TEXTS = {key for key, argument in ARGUMENTS.items() if argument.kind in (native.ONLY_TEXT, native.AS_TEXT)}


def same_columns(process: Process) -> None:
    """Fail if the columns of a process differ in anything from its events."""
    process.threads.clear()
    events = [*process.events()]
    losses = _losses(process)
    process.threads.clear()
    found = columns.read(process)
    assert _losses(process) == losses
    assert [_said(span) for rows in found for span in rows.spans(np.arange(len(rows)))] == [
        _said(event) for event in events if isinstance(event, Span)
    ]
    assert [sample for rows in found for sample in _samples(rows)] == [
        (event.name, columns._signed(event.thread), event.ts_ns, repr(float(event.value)), isinstance(event.value, int))
        for event in events
        if isinstance(event, Counter)
    ]
    of_events = [*columns.of_events(process.events())]
    for key in ARGUMENTS:
        assert _cells(found, key) == _cells(of_events, key), key
    assert _numbers(found) == _numbers(of_events)


def decoded_natively(process: Process, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many rows the native decoder gives of a process, and fail if it gives up."""
    with monkeypatch.context() as patch:
        patch.setattr(Process, "events", lambda _: pytest.fail("it was read in Python"))
        return sum(len(rows) + len(rows.samples.name) for rows in columns.read(process))


def _losses(process: Process) -> dict[str, Any]:
    return {name: repr(getattr(process, name)) for name in LOSSES}


def _said(span: Span) -> tuple[Any, ...]:
    """All that a span says; what is not a number is equal to itself here."""
    ids = (columns._signed(span.thread), columns._signed(span.task))
    flows = (span.flows_out, span.flows_in)
    times = (span.start_ns, span.end_ns)
    return span.name, *ids, *times, repr(span.args), *flows, span.lane, span.is_automatic


def _samples(rows: Columns) -> list[tuple[Any, ...]]:
    name, thread, ts_ns, value, is_whole = (column.tolist() for column in rows.samples)
    values = map(repr, value)
    return [*zip([rows.texts[place] for place in name], thread, ts_ns, values, is_whole, strict=True)]


def _numbers(all_rows: list[Columns]) -> list[tuple[Any, ...]]:
    """The numbers of few rows, by the row of all rows together."""
    found, behind = [], 0
    for rows in all_rows:
        for row, of, name, value in zip(*(column.tolist() for column in rows.numbers), strict=True):
            found.append((behind + row, of, None if name == columns.NO_TEXT else rows.texts[name], repr(value)))
        behind += len(rows)
    return found


def _cells(all_rows: list[Columns], key: str) -> list[str]:
    cells = [(rows, cell) for rows in all_rows for cell in rows.arguments[key].tolist()]
    return [repr(rows.texts[cell] if key in TEXTS and cell != columns.NO_TEXT else cell) for rows, cell in cells]
