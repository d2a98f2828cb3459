"""Selects the rows of columns that lie in time windows, as `window.inside` selects events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.events import MEMORY_EDGE, STEP
from rltrace.read.columns import OPEN, Columns, Samples
from rltrace.read.depth import ALWAYS, depths
from rltrace.read.window import ALWAYS as EVERYTHING
from rltrace.read.window import Cut, Windows

_NEVER = (1 << 63) - 1

_Key = tuple[str, int]
"""The name of a counter, or of measurements of memory, and the thread that took them."""


class _Held(NamedTuple):
    """What was taken last, and holds until the next one is."""

    begin_ns: int
    of: Any


class Look(NamedTuple):
    """What says how deep some rows are."""

    rows: tuple[NDArray[np.int64], ...]
    starts_ns: NDArray[np.int64]
    ends_ns: NDArray[np.int64]
    always: NDArray[np.bool_]
    """Whether a row is there however deep it is."""


def look(rows: Columns, cut: Cut) -> Look | None:
    """Return what is needed of some rows before any of their process is chosen; nothing if they may be of any depth."""
    if cut.depth is None:
        return None
    always = np.array([text in ALWAYS for text in rows.texts], np.bool_)[rows.name] | rows.arguments["phase"]
    return Look((rows.thread, rows.task, rows.lane.astype(np.int64)), rows.start_ns, rows.end_ns, always)


def _shallow(looked: Sequence[Look | None], depth: int) -> NDArray[np.bool_]:
    """Return which rows of a process are not too deep."""
    known = [one for one in looked if one is not None]
    rows = tuple(np.concatenate(column) for column in zip(*(one.rows for one in known), strict=True))
    starts_ns, ends_ns, always = (
        np.concatenate(column)
        for column in zip(*((one.starts_ns, one.ends_ns, one.always) for one in known), strict=True)
    )
    found: NDArray[np.bool_] = always | (depths(rows, starts_ns, ends_ns) <= depth)
    return found


def inside(all_rows: Iterable[Columns], cut: Cut, looked: Sequence[Look | None]) -> Iterator[Columns]:
    """Yield the rows that say something about the windows of a cut.

    Args:
        all_rows: All rows of a process.
        cut: Its windows, the numbers of its steps, and how deep spans may be.
        looked: What `look` said of all rows.

    Yields:
        Spans that overlap a window, samples in it, and of each counter the last sample before, which still holds when
        the window begins. Measurements of memory hold as samples do.
    """
    windows = EVERYTHING if cut.windows is None else cut.windows
    is_shallow = None if cut.depth is None else _shallow(looked, cut.depth)
    behind = 0
    spans: dict[_Key, _Held] = {}
    samples: dict[_Key, _Held] = {}
    last: Columns | None = None
    for rows in all_rows:
        last = rows
        edges = np.flatnonzero(np.array([text == MEMORY_EDGE for text in rows.texts], np.bool_)[rows.name])
        ends = np.where(rows.end_ns == OPEN, _NEVER, rows.end_ns)
        chosen = _overlap(rows.start_ns, ends, windows)
        chosen[edges], still = _holding(
            _keys(rows, rows.name[edges], rows.thread[edges]), rows.start_ns[edges], ends[edges], windows, spans,
            partial(_edge, rows, edges),
        )  # fmt: skip
        yield from (part.of for part in still)
        taken = rows.samples
        of_samples, still = _holding(
            _keys(rows, taken.name, taken.thread), taken.ts_ns, taken.ts_ns, windows, samples,
            partial(_sample, taken),
        )  # fmt: skip
        if still:
            yield rows.only(_together(still))
        if is_shallow is not None:
            chosen &= is_shallow[behind : behind + len(rows)]
            behind += len(rows)
        part = rows.chosen(np.flatnonzero(chosen), np.flatnonzero(of_samples))
        _number_steps(part, cut)
        yield part
    left = [[held for held in of.values() if held.begin_ns < windows[-1][1]] for of in (spans, samples)]
    yield from (held.of for held in left[0])
    if left[1] and last is not None:
        yield last.only(_together(left[1]))


def _overlap(begins: NDArray[np.int64], ends: NDArray[np.int64], windows: Windows) -> NDArray[np.bool_]:
    """Return which of some intervals overlap a window; an instant overlaps the window that it is in."""
    found = np.zeros(len(begins), np.bool_)
    for begin, end in windows:
        found |= (begins < end) & ((begin < ends) | (begin <= begins))
    return found


def _keys(rows: Columns, names: NDArray[np.int32], threads: NDArray[np.int64]) -> list[_Key]:
    texts = rows.texts
    return [(texts[name], thread) for name, thread in zip(names.tolist(), threads.tolist(), strict=True)]


def _holding(
    keys: list[_Key],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    windows: Windows,
    held: dict[_Key, _Held],
    take: Callable[[int], Any],
) -> tuple[NDArray[np.bool_], list[_Held]]:
    """Return which rows are in a window or hold until one begins, and what was held from earlier ones and does.

    Args:
        keys: What a row is the next of.
        begins: When each begins.
        ends: When each ends.
        windows: In which rows are chosen.
        held: By key, the last row before these that was in no window; then that of these.
        take: Takes a row out, to be held.
    """
    numbers: dict[_Key, int] = {}
    of_rows = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    order = np.argsort(of_rows, kind="stable")
    of, begins = of_rows[order], begins[order]
    are_inside = _overlap(begins, ends[order], windows)
    is_last = np.append(of[1:] != of[:-1], True)[: len(of)]
    followed = np.append(begins[1:], 0)[: len(of)]
    chosen = np.empty(len(of), np.bool_)
    chosen[order] = are_inside | (~is_last & _overlap(begins, followed, windows))
    is_first = np.append(True, of[1:] != of[:-1])[: len(of)]
    still = []
    firsts, lasts = np.flatnonzero(is_first).tolist(), np.flatnonzero(is_last).tolist()
    for key, first, last in zip(numbers, firsts, lasts, strict=True):
        before = held.pop(key, None)
        if before is not None and _overlap(np.array([before.begin_ns]), begins[first : first + 1], windows)[0]:
            still.append(before)
        if not are_inside[last]:
            held[key] = _Held(int(begins[last]), take(int(order[last])))
    return chosen, still


def _edge(rows: Columns, edges: NDArray[np.intp], at: int) -> Columns:
    return rows.chosen(edges[at : at + 1], np.empty(0, np.intp))


def _sample(samples: Samples, at: int) -> Samples:
    columns: Iterable[Any] = samples
    return Samples(*(column[at : at + 1].copy() for column in columns))


def _together(held: list[_Held]) -> Samples:
    return Samples(*map(np.concatenate, zip(*(one.of for one in held), strict=True)))


def _number_steps(rows: Columns, cut: Cut) -> None:
    """Give steps that have no number of their own the one that they have in the whole."""
    if not cut.step_numbers:
        return
    steps = np.flatnonzero(np.array([text == STEP for text in rows.texts], np.bool_)[rows.name])
    for row, start_ns in zip(steps.tolist(), rows.start_ns[steps].tolist(), strict=True):
        if start_ns in cut.step_numbers and "step" not in rows.args(row):
            rows.add_argument(row, "step", cut.step_numbers[start_ns])
