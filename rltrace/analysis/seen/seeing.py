"""Keeps what counts of the rows of a process, some of them at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from rltrace.analysis import growth
from rltrace.analysis.clocks import TimeLine
from rltrace.analysis.growth import Growth
from rltrace.analysis.lanes import Lane
from rltrace.analysis.seen.names import kind_of
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.sample_rows import see_samples
from rltrace.analysis.seen.span_rows import see_spans
from rltrace.read import columns
from rltrace.read.columns import OPEN, Columns
from rltrace.read.recording import Process


def see(process: Process, lane: Lane, time_line: TimeLine, before: Growth | None = None) -> Seen:
    """Return what counts of a process; what an earlier reading saw of one that goes on is taken from there."""
    shift_ns = time_line.shift_ns(process)
    if before is not None and not shift_ns:
        seeing = Seeing(process, lane, shift_ns)
        if before.see(process, seeing):
            return seeing.seen()
    return columns.fold(process, lambda: Seeing(process, lane, shift_ns), Seeing.add).seen()


OF_READING = ("process", "lane")
"""What `Seen` has beside what it keeps."""


class Seeing:
    """Keeps what counts of the rows of a process, some of them at a time."""

    def __init__(self, process: Process, lane: Lane, shift_ns: int) -> None:
        self._seen = Seen(process, lane)
        self._shift_ns = shift_ns
        self._kinds = np.empty(0, np.uint16)
        """Of each text, as a name."""
        self._last_ns = self._last_span_ns = process.start_ns

    def add(self, rows: Columns) -> None:
        """Keep what counts of more rows."""
        kinds = [kind_of(name) for name in rows.texts[len(self._kinds) :]]
        self._kinds = np.append(self._kinds, np.array(kinds, np.uint16))
        self._seen.spans += len(rows)
        if len(rows):
            ends_ns = np.where(rows.end_ns == OPEN, rows.start_ns, rows.end_ns)
            self._last_span_ns = max(self._last_span_ns, int(ends_ns.max()))
            see_spans(self._seen, rows, self._kinds.take(rows.name), self._shift_ns)
        self._seen.samples += len(rows.samples.name)
        if len(rows.samples.name):
            self._last_ns = max(self._last_ns, int(rows.samples.ts_ns.max()))
            see_samples(self._seen, rows, self._shift_ns)

    def said(self) -> Any:
        """Return all that was kept so far as numbers, texts and bytes."""
        kept = {name: growth.value_of(value) for name, value in vars(self._seen).items() if name not in OF_READING}
        return [self._last_ns, self._last_span_ns, kept]

    def put(self, said: Any) -> None:
        """Take what another one said, before the first row."""
        self._last_ns, self._last_span_ns, kept = said
        for name, value in kept.items():
            setattr(self._seen, name, growth.put(getattr(self._seen, name), value))

    def seen(self) -> Seen:
        """Return what was kept, when there are no more rows."""
        seen, shift_ns = self._seen, self._shift_ns
        if shift_ns:
            shift(seen, shift_ns)
        seen.finish()
        seen.first_ns = seen.process.start_ns + shift_ns
        seen.last_span_ns = self._last_span_ns + shift_ns
        seen.last_ns = max(self._last_ns, self._last_span_ns, seen.process.end_ns or 0) + shift_ns
        return seen


def shift(seen: Seen, shift_ns: int) -> None:
    """Put the spans that are kept as they are on the time line."""
    kept = (*seen.steps, *seen.open_spans, *seen.allocations_kept, *seen.moves, *seen.out_of_memory)
    for span in {id(span): span for span in kept}.values():
        span.start_ns += shift_ns
        if span.end_ns is not None:
            span.end_ns += shift_ns
