"""Columns of what a process wrote: its spans, samples and arrows as numpy arrays, some ten thousand rows at a time.

A row of spans has what every figure needs; arguments that figures are made of have columns of their own. All other
arguments stay encoded until somebody asks for those of a row. The native decoder makes the columns where it is there
and the segments are sound; the events of the Python reader make the same ones everywhere else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import msgpack
import numpy as np
from numpy.typing import NDArray

from rltrace.events import AUTOMATIC, Args, Counter, Span, is_of_bytes
from rltrace.read import gate, native
from rltrace.read.alignment import Alignment
from rltrace.read.native import Argument, Decoder, UnsoundError
from rltrace.read.recording import Event, Process, Segment

OPEN = -1
"""The end of a span that has none."""
NO_LANE = -1
"""The lane of a span that was recorded when it was over."""
NO_TEXT = native.NO_TEXT
"""In a column of texts: there is none."""
MISSING = native.MISSING
"""In a column of whole numbers: there is none. A column of decimals has NaN."""

ROWS = 1 << 18
"""About so many rows are made at a time."""
EVENTS = 1 << 14
"""So many, if they are made of events."""
AT_ONCE = 1 << 12
"""Of so many rows the arguments are unpacked at a time."""

_BYTES = (-gate.MOST_BYTES, gate.MOST_BYTES)
_NUMBER = Argument(native.WHOLE_NUMBER, *_BYTES)
_COUNT = Argument(native.WHOLE_NUMBER, -1, 2**31 - 1)

ARGUMENTS: dict[str, Argument] = {
    "step": Argument(native.WHOLE_NUMBER, -(2**63), 2**63 - 1),
    "bytes": _NUMBER,
    "tensors": _NUMBER,
    "ranks": _NUMBER,
    "queued_ns": _NUMBER,
    "error_ns": _NUMBER,
    "behind_host_ns": _NUMBER,
    "tokens": _NUMBER,
    "prompt_tokens": _NUMBER,
    "cached_tokens": _NUMBER,
    "first_token_ns": _NUMBER,
    "drafted": _COUNT,
    "accepted": _COUNT,
    "running": _COUNT,
    "waiting": _COUNT,
    "preempted": _COUNT,
    "rows": _NUMBER,
    "columns": _NUMBER,
    "kv_usage": Argument(native.DECIMAL, *_BYTES),
    "error": Argument(native.ONLY_TEXT),
    "method": Argument(native.AS_TEXT),
    "request_id": Argument(native.AS_TEXT),
    "trajectory": Argument(native.AS_TEXT),
    "turn": Argument(native.ONLY_TEXT),
    "tool": Argument(native.AS_TEXT),
    "phase": Argument(native.IS_TRUE),
    "inferred": Argument(native.IS_TRUE),
    "module": Argument(native.IS_TRUTHY),
}
"""Arguments that have a column. A number in one is whole, as `int` makes it; a text is its place in `texts`: that of
`error` and `turn` only if it is one, that of the others as `str` makes it. `phase` and `inferred` are whether it is
True itself, `module` is whether it is true."""

_SIZE, _SIZES = (Argument(kind, 0, gate.MOST_BYTES) for kind in (native.RARE_NUMBER, native.NUMBERS))
NUMBERS: dict[str, Argument] = {
    "totals": _SIZES,
    "held_bytes": _SIZES,
    "cpu_ns": _SIZES,
    "free_bytes": _SIZE,
    "others_bytes": _SIZE,
    "age_ns": _SIZE,
    "unchanged_ns": Argument(native.RARE_NUMBER, 0, 2**63 - 1),
}
"""Arguments of few rows: one number each, or numbers by name. They have rows of their own."""
NUMBER_PLACES = {key: place for place, key in enumerate(NUMBERS)}

_TEXTS = [key for key, argument in ARGUMENTS.items() if argument.kind in (native.ONLY_TEXT, native.AS_TEXT)]

Kept = TypeVar("Kept")


class Texts:
    """Names and other texts of a process, each once."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        """Return where a text is; a new one comes last."""
        found = self._places.setdefault(text, len(self.all))
        if found == len(self.all):
            self.all.append(text)
        return found


class Samples(NamedTuple):
    """Samples, in the order in which each thread took them."""

    name: NDArray[np.int32]
    thread: NDArray[np.int64]
    ts_ns: NDArray[np.int64]
    value: NDArray[np.float64]
    is_whole: NDArray[np.bool_]
    """Whether the value was written as a whole number; beyond 2**53 it is rounded."""

    def without(self, rows: list[int]) -> Samples:
        """Return all but some rows."""
        columns: Iterable[Any] = self
        return Samples(*(np.delete(column, rows) for column in columns))


class Flows(NamedTuple):
    """Ends of arrows, by the row of their span."""

    row: NDArray[np.int64]
    key: NDArray[np.int32]
    is_out: NDArray[np.bool_]
    keys: Callable[[NDArray[np.int32]], Sequence[str]]
    """Gives what some cells of the column of keys are the places of: hardly anybody asks."""


class Numbers(NamedTuple):
    """The numbers of `NUMBERS`, by the row of their span, and in the order in which it has them."""

    row: NDArray[np.int64]
    of: NDArray[np.uint8]
    """The place in `NUMBERS` of the argument that has it."""
    name: NDArray[np.int32]
    """Its name there; `NO_TEXT` if the argument is the number itself."""
    value: NDArray[np.float64]
    """NaN for what is none."""


class Columns:
    """Some rows of a process, in the order of its events."""

    def __init__(
        self,
        texts: Sequence[str],
        spans: Mapping[str, NDArray[Any]],
        arguments: dict[str, NDArray[Any]],
        samples: Samples,
        flows: Flows,
        numbers: Numbers,
        args: Callable[[int], Args],
    ) -> None:
        self.texts = texts
        """What the columns of names and texts have the places of; those of a process share it."""
        self.name: NDArray[np.int32] = spans["name"]
        self.thread: NDArray[np.int64] = spans["thread"]
        self.task: NDArray[np.int64] = spans["task"]
        self.lane: NDArray[np.int32] = spans["lane"]
        self.start_ns: NDArray[np.int64] = spans["start_ns"]
        self.end_ns: NDArray[np.int64] = spans["end_ns"]
        self.is_automatic: NDArray[np.bool_] = spans["is_automatic"]
        self.arguments = arguments
        """The columns of `ARGUMENTS`; only `add_argument` may change them."""
        self.samples = samples
        self.flows = flows
        self.numbers = numbers
        self.args = args
        """Gives the arguments of a row."""

    def __len__(self) -> int:
        return len(self.name)

    def flows_of(self, row: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the keys of the arrows that leave a row, and of those that arrive there."""
        places = self._flows_of.get(row)
        if places is None:
            return (), ()
        found = [*zip(self.flows.is_out[places].tolist(), self.flows.keys(self.flows.key[places]), strict=True)]
        return tuple(key for is_out, key in found if is_out), tuple(key for is_out, key in found if not is_out)

    def first_keys(self, rows: NDArray[np.intp], *, is_out: bool) -> list[str | None]:
        """Return for each of some rows the key of the first arrow that leaves it, or arrives there; None without."""
        own = np.flatnonzero(self.flows.is_out == is_out)
        having, first = np.unique(self.flows.row[own], return_index=True)
        if not len(having):
            return [None] * len(rows)
        at = np.minimum(np.searchsorted(having, rows), len(having) - 1)
        has_any = having[at] == rows
        keys = iter(self.flows.keys(self.flows.key[own[first[at[has_any]]]]))
        return [next(keys) if has else None for has in has_any.tolist()]

    def chosen(self, rows: NDArray[np.intp], samples: NDArray[np.intp]) -> Columns:
        """Return some rows, in their order, and some samples."""
        at, is_there = places_among(rows, self.flows.row)
        flows = Flows(at[is_there], self.flows.key[is_there], self.flows.is_out[is_there], self.flows.keys)
        at, is_there = places_among(rows, self.numbers.row)
        columns: Iterable[Any] = self.numbers[1:]
        numbers = Numbers(at[is_there], *(column[is_there] for column in columns))
        spans = {name: getattr(self, name)[rows] for name in _OF_SPANS}
        arguments = {key: column[rows] for key, column in self.arguments.items()}
        taken: Iterable[Any] = self.samples
        args = self.args.chosen(rows, arguments) if isinstance(self.args, Encoded) else _ChosenArgs(self.args, rows)
        chosen = Samples(*(column[samples] for column in taken))
        return Columns(self.texts, spans, arguments, chosen, flows, numbers, args)

    def only(self, samples: Samples) -> Columns:
        """Return no row, and other samples."""
        found = self.chosen(np.empty(0, np.intp), np.empty(0, np.intp))
        found.samples = samples
        return found

    def add_argument(self, row: int, key: str, value: int) -> None:
        """Give a row an argument that it was not written with; it has a column of whole numbers."""
        _writable(self.arguments, key)[row] = value
        if isinstance(self.args, Encoded):
            self.args.decoded[row] = self.args(row) | {key: value}

    @functools.cached_property
    def _flows_of(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for place, row in enumerate(self.flows.row.tolist()):
            found.setdefault(row, []).append(place)
        return found

    def counters(self) -> list[Counter]:
        """Return the samples as the events that they are."""
        name, thread, ts_ns, value, is_whole = (column.tolist() for column in _columns_of(self.samples))
        return [
            Counter(self.texts[name], thread, ts_ns, int(value) if is_whole else value)
            for name, thread, ts_ns, value, is_whole in zip(name, thread, ts_ns, value, is_whole, strict=True)
        ]

    def samples_by_name(self) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.float64]]]:
        """Yield each counter, with the times of its samples in order, and their values."""
        samples = self.samples
        if not len(samples.name):
            return
        in_order = np.lexsort((samples.ts_ns, samples.name))
        places, begins = np.unique(samples.name[in_order], return_index=True)
        for place, rows in zip(places.tolist(), np.split(in_order, begins[1:]), strict=True):
            yield self.texts[place], samples.ts_ns[rows], samples.value[rows]

    def all_args(self, rows: NDArray[np.intp]) -> Iterator[Args]:
        """Yield the arguments of some rows."""
        return self.args.of(rows) if isinstance(self.args, Encoded) else map(self.args, rows.tolist())

    def spans(self, rows: NDArray[np.intp]) -> Iterator[Span]:
        """Yield some rows as the events that they are."""
        columns = (self.name, self.thread, self.task, self.start_ns, self.end_ns, self.lane, self.is_automatic)
        names, threads, tasks, starts_ns, ends_ns, lanes, are_automatic = (column[rows].tolist() for column in columns)
        has_arrows = np.isin(rows, self.flows.row).tolist()
        flows = [self.flows_of(row) if has else _NO_FLOWS for row, has in zip(rows.tolist(), has_arrows, strict=True)]
        return map(  # without a loop in Python: a long run has a hundred thousand of them
            Span,
            map(self.texts.__getitem__, names),
            threads,
            tasks,
            starts_ns,
            [None if end_ns == OPEN else end_ns for end_ns in ends_ns],
            self.all_args(rows),
            map(itemgetter(0), flows),
            map(itemgetter(1), flows),
            [None if lane == NO_LANE else lane for lane in lanes],
            are_automatic,
        )


_NO_FLOWS: tuple[tuple[str, ...], tuple[str, ...]] = (), ()


def places_among(rows: NDArray[np.intp], wanted: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Return the place of each wanted row among some, which are in order, and whether it is there at all."""
    at = np.searchsorted(rows, wanted)
    return at, rows[np.minimum(at, len(rows) - 1)] == wanted if len(rows) else np.zeros(len(at), np.bool_)


def _writable(arguments: dict[str, NDArray[Any]], key: str) -> NDArray[Any]:
    """Return the column of an argument, with memory for each row."""
    if not arguments[key].flags.writeable:
        arguments[key] = arguments[key].copy()
    return arguments[key]


def _columns_of(samples: Samples) -> Iterator[NDArray[Any]]:
    columns: Iterable[Any] = samples
    yield from columns


_OF_SPANS = ("name", "thread", "task", "lane", "start_ns", "end_ns", "is_automatic")


class _ChosenArgs:
    """The arguments of some rows."""

    def __init__(self, args: Callable[[int], Args], rows: NDArray[np.intp]) -> None:
        self._args, self._rows = args, rows

    def __call__(self, row: int) -> Args:
        return self._args(int(self._rows[row]))


def read(process: Process) -> list[Columns]:
    """Return all that a process wrote."""
    return fold(process, list, lambda rows, more: rows.append(more))


def fold(process: Process, begin: Callable[[], Kept], add: Callable[[Kept, Columns], None]) -> Kept:
    """Go through the columns of a process, without holding more than some of them.

    Args:
        process: What it lost is counted at its own attributes, as when its events are read.
        begin: Makes what is kept. It is made anew if the native decoder comes upon damage.
        add: Adds the next rows to it.
    """
    library = native.library()
    if library is not None and not process.infers:
        kept = begin()
        try:
            for columns in _decoded(process, library):
                add(kept, columns)
            return kept
        except UnsoundError:
            pass
    kept = begin()
    for columns in of_events(process.events()):
        add(kept, columns)
    return kept


# ---- by the native decoder --------------------------------------------------------------------------------------


def _decoded(process: Process, library: Any) -> Iterator[Columns]:
    if not process.is_cut:
        return _Decoding(process, library).columns()
    from rltrace.read.cut_columns import inside, look  # which choose of columns

    # All are looked at before one is given: a part gives its rows in another order than its events.
    looked = [look(columns, process.cut) for columns in _Decoding(process, library).columns()]
    return inside(_Decoding(process, library).columns(), process.cut, looked)


class _Decoding:
    """Makes the columns of one process."""

    def __init__(self, process: Process, library: Any) -> None:
        self.process = process
        self.types = [native.Type(number, *declared) for number, declared in process.types.items()]
        self.decoder = Decoder(library, NUMBERS | ARGUMENTS, self.types)
        self.texts = Texts()
        self._place_of = np.empty(0, np.int32)
        """The place in `texts` of each text of the decoder: texts that are damaged may read alike."""
        self._is_same = True
        """Whether the decoder has every text at the same place."""
        self.are_checked_whole = np.empty(0, np.bool_)
        """Of each text, as a name of spans: whether there is more to check of them than numbers in columns."""
        self._is_marked = np.empty(0, np.bool_)
        """Of each text, as a name of spans: whether hooks make them, where records do not say so."""

    def columns(self) -> Iterator[Columns]:
        """Decode all segments."""
        for segment in self.process.segments():
            self._decode(segment)
            if self.decoder.rows >= ROWS:
                yield self._taken()
        yield self._finished()

    def _decode(self, segment: Segment) -> None:
        content, first_ns, last_ns, sound, _ = segment
        if sound is not None:
            raise UnsoundError
        self.decoder.decode(content, first_ns, last_ns, may_grow=self.process.is_alive)

    def _finished(self) -> Columns:
        """Return the last rows, and count what was lost."""
        self.decoder.finish()
        rows = self._taken()
        torn, orphans, strays = self.decoder.losses()
        self.process.torn += torn
        self.process.orphans += orphans
        self.process.stray_flows += strays
        return rows

    def _taken(self, *, are_open: bool = False) -> Columns:
        raw, arguments = self.decoder.take()
        self.process.threads.update(self.decoder.threads())
        self._learn()
        if not self._is_same:
            raw |= {name: self._placed(raw[name]) for name in ("name", "sample_name", "number_name")}
            arguments |= {key: self._placed(arguments[key]) for key in _TEXTS}
        args = Encoded(self, raw, arguments)
        args.check()
        if not are_open:
            self._end_in_pauses(raw)
        on_time_line = _time_line(self.process.alignment)
        ends_ns = raw["end_ns"]
        if self.process.alignment is not None and not are_open:
            raw["start_ns"] = on_time_line(raw["start_ns"])
            raw["end_ns"] = np.where(ends_ns == OPEN, OPEN, on_time_line(ends_ns))
        raw["is_automatic"] = (raw["flags"] & native.AUTOMATIC).astype(np.bool_)
        if self.process.mark is not None:
            raw["is_automatic"] |= self._is_marked[raw["name"]]
        flows = Flows(raw["flow_row"], raw["flow_key"], raw["flow_is_out"].view(np.bool_), self.decoder.keys)
        numbers = Numbers(*(raw[f"number_{name}"] for name in Numbers._fields))
        return Columns(self.texts.all, raw, arguments, self._samples(raw, on_time_line), flows, numbers, args)

    def _placed(self, places: NDArray[np.int32]) -> NDArray[np.int32]:
        if not len(self._place_of):
            return places
        return np.where(places == NO_TEXT, NO_TEXT, self._place_of[places]).astype(np.int32)

    def _learn(self) -> None:
        """Learn what there is to know of new texts."""
        known = len(self._place_of)
        if self.decoder.many_texts == known:
            return
        new = [self.texts.place(text) for text in self.decoder.texts()[known:]]
        self._place_of = np.append(self._place_of, np.array(new, np.int32))
        self._is_same = self._is_same and new == [*range(known, known + len(new))]
        names = self.texts.all[len(self.are_checked_whole) :]
        self.are_checked_whole = np.append(self.are_checked_whole, np.array([*map(_is_checked_whole, names)], np.bool_))
        if self.process.mark is not None:
            self._is_marked = np.append(self._is_marked, np.array([*map(self._marked, names)], np.bool_))

    def _marked(self, name: str) -> bool:
        event = Span(name, 0, 0, 0, None, {})
        if self.process.mark is not None:
            self.process.mark(event)
        return event.is_automatic

    def _end_in_pauses(self, raw: Mapping[str, NDArray[Any]]) -> None:
        """End the spans that a pause cut off where it began."""
        for row in np.flatnonzero(raw["end_ns"] == OPEN).tolist():
            paused_ns = self.process.paused_after_ns(int(raw["start_ns"][row]))
            raw["end_ns"][row] = OPEN if paused_ns is None else paused_ns

    def _samples(self, raw: Mapping[str, NDArray[Any]], on_time_line: _TimeLine) -> Samples:
        flags = raw["sample_flags"]
        found = Samples(
            raw["sample_name"],
            raw["sample_thread"],
            on_time_line(raw["sample_ns"]),
            raw["sample_value"],
            (flags & native.WHOLE_SAMPLE).astype(np.bool_),
        )
        beyond = np.flatnonzero(flags & native.BEYOND_BYTES)
        unfit = [row for row in beyond.tolist() if is_of_bytes(self.texts.all[found.name[row]])]
        self.process.unfit += len(unfit)
        return found.without(unfit) if unfit else found


class Before(NamedTuple):
    """What was read of a process before it went on: some closed segments, and what was open behind them."""

    segments: frozenset[str] = frozenset()
    """Their names."""
    open: Sequence[Span] = ()
    losses: tuple[int, int, int] = (0, 0, 0)
    """Damaged records, ends and flows without a beginning, and the flows among these."""
    unfit_arguments: int = 0
    threads: Mapping[int, str] = {}


class Growing(_Decoding):
    """Makes the columns of a process while its segments grow."""

    MOST_TEXTS = 1 << 18
    """How many names, texts and keys of arrows are remembered: every arrow has a key of its own."""

    def __init__(self, process: Process) -> None:
        """Begin before the first record.

        Raises:
            UnsoundError: there is no native decoder.
        """
        library = native.library()
        if library is None:
            raise UnsoundError
        super().__init__(process, library)

    def declare(self) -> None:
        """Learn of the typed spans that the process has declared since."""
        for number, declared in [*self.process.types.items()][len(self.types) :]:
            self.types.append(native.Type(number, *declared))
            self.decoder.declare(self.types[-1])

    def add(self, content: bytes, life_ns: tuple[int, int], thread: int) -> int:
        """Decode more of a segment, and return of which thread the last record is.

        Args:
            content: Whole records.
            life_ns: From when to when they can have been written.
            thread: Whose the record before them is.

        Raises:
            UnsoundError: they have something that only the Python reader knows.
        """
        return self.decoder.decode_more(content, *life_ns, thread)

    def since(self, before: Before, at_rest: Callable[[Before], None]) -> Iterator[Columns]:
        """Decode all segments but those that were read before.

        Args:
            before: What was read then.
            at_rest: Gets what has been read when all closed segments are decoded, and all their rows taken.

        Raises:
            UnsoundError: there is something that only the Python reader knows.
        """
        process, names = self.process, set(before.segments)
        segments = process.segments(before.segments, closed_first=True)
        process.torn, process.orphans, process.stray_flows = before.losses
        process.unfit += before.unfit_arguments
        process.threads.update(before.threads)
        self.resume(before.open)
        self.decoder.take()
        has_rested = False
        for segment in segments:
            is_closed = process.seal(segment.name) is not None
            if not is_closed and not has_rested:
                has_rested = True
                yield self._taken()
                self._rest(names, at_rest)
            self._decode(segment)
            if is_closed:
                names.add(segment.name)
            if self.decoder.rows >= ROWS:
                yield self._taken()
        if not has_rested:
            yield self._taken()
            self._rest(names, at_rest)
        yield self._finished()

    def _rest(self, names: set[str], at_rest: Callable[[Before], None]) -> None:
        process, unfit = self.process, self.process.unfit
        if self.decoder.many_early or process.damaged_segments:
            return  # what comes next may depend on more than on what is open
        spans = self.open()
        is_fit, process.unfit = process.unfit == unfit, unfit
        if is_fit:
            torn, orphans, strays = self.decoder.losses()
            losses = (process.torn + torn, process.orphans + orphans, process.stray_flows + strays)
            at_rest(Before(frozenset(names), spans, losses, unfit - process.unfit_fields, {**process.threads}))

    def ended(self) -> Columns:
        """Return what has ended since this was asked last, and the samples."""
        return self._taken()

    def open(self) -> list[Span]:
        """Return the spans that are open now, on the process's own clock."""
        self.decoder.show_open()
        columns = self._taken(are_open=True)
        return [*columns.spans(np.arange(len(columns)))]

    def resume(self, spans: Iterable[Span]) -> None:
        """Begin where these spans are open, by when they began.

        Raises:
            UnsoundError: one of them has something that only the Python reader knows.
        """
        for span in spans:
            mark = [AUTOMATIC] if span.is_automatic else []
            records: list[list[Any]] = [[*mark, span.name, span.task, span.start_ns, span.args, True]]
            for keys, direction in ((span.flows_out, "out"), (span.flows_in, "in")):
                records += [[key, span.task, span.start_ns, direction, True] for key in keys]
            try:
                content = b"".join(map(msgpack.packb, records))
            except (ValueError, TypeError, OverflowError):  # such as text that is none
                raise UnsoundError from None
            self.add(content, (0, gate.MOST_NS), span.thread)

    def finish(self) -> None:
        """Count the ends that lost their beginning; nothing may be added any more."""
        self.decoder.finish()
        self.decoder.take()

    def is_full(self, most_early: int) -> bool:
        """Return whether it remembers so many texts, or early ends, that it is better made anew."""
        return (
            self.decoder.many_texts + self.decoder.many_keys > self.MOST_TEXTS or self.decoder.many_early > most_early
        )

    @property
    def losses(self) -> tuple[int, int, int]:
        """Damaged records, ends and flows without a beginning, and the flows among these."""
        return self.decoder.losses()


class Encoded:
    """The arguments of rows as they were written."""

    def __init__(self, source: _Decoding, raw: dict[str, NDArray[Any]], arguments: dict[str, NDArray[Any]]) -> None:
        self.source = source
        self.raw = raw
        self.arguments = arguments
        self.decoded: dict[int, Args] = {}
        """Of rows that were checked one by one."""

    def __call__(self, row: int) -> Args:
        return next(self.of(np.array([row])))

    def of(self, rows: NDArray[np.intp]) -> Iterator[Args]:
        """Yield the arguments of some rows."""
        parts = (rows[at : at + AT_ONCE] for at in range(0, len(rows), AT_ONCE))
        written = (begun | late if late else begun for part in parts for begun, late in self._all_written(part))
        if not self.decoded:
            yield from written
            return
        for row, args in zip(rows.tolist(), written, strict=True):
            yield self.decoded.get(row, args)

    def chosen(self, rows: NDArray[np.intp], arguments: dict[str, NDArray[Any]]) -> Encoded:
        """Return the arguments of some rows, in their order."""
        raw = {name: self.raw[name][rows] for name in ("args_at", "begin_bytes", "late_bytes", "type")}
        found = Encoded(self.source, {**raw, "blobs": self.raw["blobs"]}, arguments)
        if self.decoded:
            found.decoded = {at: self.decoded[row] for at, row in enumerate(rows.tolist()) if row in self.decoded}
        return found

    def check(self) -> None:
        """Leave out of the rows that the decoder could not judge what cannot be right, and count it."""
        raw, texts = self.raw, self.source.texts
        has_args = (raw["begin_bytes"] | raw["late_bytes"]) != 0
        is_odd = (raw["flags"] & native.ODD).astype(np.bool_)
        is_checked = has_args & self.source.are_checked_whole[raw["name"]]
        rows = np.flatnonzero(is_odd | (is_checked & ~self._are_usual(is_checked & ~is_odd)))
        numbers: list[_Numbered] = []
        names = raw["name"][rows].tolist()
        checks_of = {name: gate.arguments_of(texts.all[name]) for name in {*names}}
        for row, name, odd, (begun, late) in zip(
            rows.tolist(), names, is_odd[rows].tolist(), self._all_written(rows), strict=True
        ):
            checks = checks_of[name]
            unfit = sum(gate.leave_out_unfit(args, checks) for args in (begun, late) if args) if checks else 0
            self.source.process.unfit += unfit
            args = self.decoded[row] = begun | late if late else begun
            if unfit or odd:
                for key, column in self.arguments.items():
                    cell = _cell(ARGUMENTS[key].kind, args.get(key), texts.place)
                    if column.flags.writeable or key in args:
                        _writable(self.arguments, key)[row] = cell
            numbers += ((row, *one) for one in numbers_of(args, texts.place))
        if len(rows):
            self._number_anew(rows, numbers)

    def _number_anew(self, rows: NDArray[np.intp], numbers: Sequence[_Numbered]) -> None:
        """Put other numbers into the place of those that some rows have."""
        raw, new = self.raw, _numbers(numbers)
        stays = ~places_among(rows, raw["number_row"])[1]
        order = np.argsort(np.concatenate([raw["number_row"][stays], new.row]), kind="stable")
        for name, column in new._asdict().items():
            raw[f"number_{name}"] = np.concatenate([raw[f"number_{name}"][stays], column])[order]

    def _are_usual(self, is_one: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which rows have nothing but usual arguments, as far as many can be judged at once."""
        names, found = self.raw["name"], np.zeros(len(is_one), np.bool_)
        for name in np.unique(names[is_one]).tolist():
            rows, maps = self._maps(np.flatnonzero(is_one & (names == name)))
            found[rows] = gate.are_usual(self.source.texts.all[name], maps)
        return found

    def _maps(self, rows: NDArray[np.intp]) -> tuple[NDArray[np.intp], list[memoryview]]:
        """Return those of some rows whose arguments were written as one map, and these."""
        raw = self.raw
        has_begun, has_late = raw["begin_bytes"][rows] != 0, raw["late_bytes"][rows] != 0
        rows = rows[has_begun != has_late]
        rows = rows[_begins_map(raw["blobs"][raw["args_at"][rows]])]
        at = raw["args_at"][rows]
        ends = at + raw["begin_bytes"][rows] + raw["late_bytes"][rows]
        parts = map(slice, at.tolist(), ends.tolist())
        return rows, [*map(raw["blobs"].data.__getitem__, parts)]

    def _all_written(self, rows: NDArray[np.intp]) -> Iterator[tuple[Args, Args]]:
        """Yield what some rows have of their beginning, and what came late."""
        raw, types = self.raw, self.source.types
        at, begin_bytes, late_bytes = (raw[name][rows] for name in ("args_at", "begin_bytes", "late_bytes"))
        ends = at + begin_bytes
        begun = self._unpacked(at, ends)
        late = self._unpacked(ends, ends + late_bytes)
        for written, more, declared in zip(begun, late, raw["type"][rows].tolist(), strict=True):
            if isinstance(written, list):  # of a typed span
                *values, others = written
                yield dict(zip(types[declared].fields, values, strict=False)) | (others or {}), more
            else:
                yield written, more

    def _unpacked(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> list[Any]:
        """Return what is encoded from each place to another; nothing between two that are one."""
        is_there = begins != ends
        parts = map(slice, begins[is_there].tolist(), ends[is_there].tolist())
        found = _all_unpacked([*map(self.raw["blobs"].data.__getitem__, parts)])
        if len(found) == len(begins):
            return found
        of_all: list[Any] = [{} for _ in begins]
        for place, one in zip(np.flatnonzero(is_there).tolist(), found, strict=True):
            of_all[place] = one
        return of_all


def _begins_map(first_bytes: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which of some values in MessagePack are maps, by the first byte of each."""
    found: NDArray[np.bool_] = ((first_bytes & 0xF0) == 0x80) | (first_bytes == 0xDE) | (first_bytes == 0xDF)
    return found


def _all_unpacked(encoded: Sequence[memoryview]) -> list[Any]:
    """Return what was encoded in each of some parts."""
    found = gate.unpacked_together(encoded)
    if found is None:
        return [msgpack.unpackb(one, unicode_errors="replace", timestamp=1) for one in encoded]
    return found


def _is_checked_whole(name: str) -> bool:
    checks = gate.arguments_of(name)
    return bool(checks) and any(
        key not in NUMBERS and (key not in ARGUMENTS or gate.RANGES.get(check) != ARGUMENTS[key][1:])
        for key, check in checks.items()
    )


_TimeLine = Callable[[NDArray[np.int64]], NDArray[np.int64]]

_EXACT_NS = 1 << 53
"""Differences of times below this are exact as decimals."""


def _time_line(alignment: Alignment | None) -> _TimeLine:
    """Return what maps times to another clock, each as `Alignment.shift_ns` does."""
    if alignment is None:
        return lambda times_ns: times_ns
    at_ns = np.array([reading.at_ns for reading in alignment.readings], np.int64)
    shifts_ns = np.array([reading.shift_ns for reading in alignment.readings], np.int64)
    # By how many readings lie before a time: from which of them on it is counted, and what is added to its shift.
    before = np.concatenate([[0], np.arange(len(at_ns))])
    from_ns, shift_ns = at_ns[before], shifts_ns[before]
    length_ns = np.concatenate([[1], np.diff(at_ns), [1]])  # outside of all readings, the drift is all that there is
    growth = np.concatenate([[alignment.drift], np.diff(shifts_ns), [alignment.drift]])
    is_exact = int(np.abs(shifts_ns - shifts_ns[0]).max()) < _EXACT_NS

    def map_times(times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(times_ns):
            return times_ns
        reach_ns = max(int(times_ns.max()) - int(at_ns[0]), int(at_ns[-1]) - int(times_ns.min()))
        if reach_ns >= _EXACT_NS or not is_exact:
            mapped = [time_ns + alignment.shift_ns(time_ns) for time_ns in times_ns.tolist()]
            return np.array(mapped, np.int64)
        behind = np.searchsorted(at_ns, times_ns, side="right")
        grown_ns = growth[behind] * ((times_ns - from_ns[behind]) / length_ns[behind])
        mapped_ns: NDArray[np.int64] = times_ns + shift_ns[behind] + np.rint(grown_ns).astype(np.int64)
        return mapped_ns

    return map_times


# ---- from events ------------------------------------------------------------------------------------------------


def _cell(kind: int, value: Any, place: Callable[[str], int]) -> Any:
    """Return what a column has of an argument's value; one that no figure could be made of is missing there."""
    if kind == native.WHOLE_NUMBER:
        if isinstance(value, float) and not math.isfinite(value):
            return MISSING
        return int(value) if isinstance(value, (int, float)) and -(2**63) < value < 2**63 else MISSING
    if kind == native.DECIMAL:
        return float(value) if isinstance(value, (int, float)) and -(2.0**63) < value < 2.0**63 else math.nan
    if kind == native.ONLY_TEXT:
        return place(value) if isinstance(value, str) else NO_TEXT
    if kind == native.AS_TEXT:
        return NO_TEXT if value is None else place(str(value))
    return value is True if kind == native.IS_TRUE else bool(value)


_Numbered = tuple[int, int, int, float]
"""A row of `Numbers`."""


def numbers_of(args: Mapping[str, Any], place: Callable[[str], int]) -> Iterator[tuple[int, int, float]]:
    """Yield the numbers of a span with these arguments, as rows of `Numbers` without its own."""
    for key, value in args.items():
        if key not in NUMBERS:
            continue
        if NUMBERS[key].kind == native.RARE_NUMBER:
            if isinstance(value, (int, float)):
                yield NUMBER_PLACES[key], NO_TEXT, _cell(native.DECIMAL, value, place)
        elif isinstance(value, dict):
            for name, number in value.items():
                if isinstance(name, str):
                    yield NUMBER_PLACES[key], place(name), _cell(native.DECIMAL, number, place)


def _numbers(rows: Sequence[_Numbered]) -> Numbers:
    columns = zip(*rows, strict=True) if rows else ((), (), (), ())
    dtypes = (np.int64, np.uint8, np.int32, np.float64)
    return Numbers(*(np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)))


def _signed(number: int) -> int:
    """Return a native id or a task as 64 bits with a sign; no two of 64 bits become one."""
    return (number + 2**63) % 2**64 - 2**63


class _OfEvents(Columns):
    """Rows that were made of events."""

    def __init__(self, events: Sequence[Event], texts: Texts) -> None:
        self._spans = [event for event in events if isinstance(event, Span)]
        arguments = _arguments(self._spans, texts)
        counters = [event for event in events if isinstance(event, Counter)]
        flows = _flows(self._spans, texts)
        rows = enumerate(self._spans)
        numbers = _numbers([(row, *one) for row, span in rows for one in numbers_of(span.args, texts.place)])
        spans, samples = _spans(self._spans, texts), _samples(counters, texts)
        super().__init__(texts.all, spans, arguments, samples, flows, numbers, self._args)

    def _args(self, row: int) -> Args:
        return self._spans[row].args

    def spans(self, rows: NDArray[np.intp]) -> Iterator[Span]:
        return (self._spans[row] for row in rows.tolist())


def _arguments(spans: Sequence[Span], texts: Texts) -> dict[str, NDArray[Any]]:
    rows_of: dict[str, list[int]] = {key: [] for key in ARGUMENTS}
    for row, span in enumerate(spans):
        for key in span.args.keys() & rows_of.keys() if span.args else ():
            rows_of[key].append(row)
    return {key: _argument(key, spans, rows, texts) for key, rows in rows_of.items()}


def _argument(key: str, spans: Sequence[Span], rows: Sequence[int], texts: Texts) -> NDArray[Any]:
    """Return the column of an argument that some rows have."""
    kind = ARGUMENTS[key].kind
    found = np.full(len(spans), _cell(kind, None, texts.place), native.DTYPES[kind])
    found[rows] = [_cell(kind, spans[row].args[key], texts.place) for row in rows]
    return found


def from_events(events: Sequence[Event]) -> Columns:
    """Return events as columns."""
    return _OfEvents(events, Texts())


def of_events(events: Iterable[Event]) -> Iterator[Columns]:
    """Yield the same columns, made of a process's events."""
    texts = Texts()
    rest = iter(events)
    while some := list(islice(rest, EVENTS)):
        yield _OfEvents(some, texts)


def _spans(spans: Sequence[Span], texts: Texts) -> dict[str, NDArray[Any]]:
    return {
        "name": np.array([texts.place(span.name) for span in spans], np.int32),
        "thread": np.array([_signed(span.thread) for span in spans], np.int64),
        "task": np.array([_signed(span.task) for span in spans], np.int64),
        "lane": np.array([NO_LANE if span.lane is None else span.lane for span in spans], np.int32),
        "start_ns": np.array([span.start_ns for span in spans], np.int64),
        "end_ns": np.array([OPEN if span.end_ns is None else span.end_ns for span in spans], np.int64),
        "is_automatic": np.array([span.is_automatic for span in spans], np.bool_),
    }


def _samples(counters: Sequence[Counter], texts: Texts) -> Samples:
    return Samples(
        np.array([texts.place(counter.name) for counter in counters], np.int32),
        np.array([_signed(counter.thread) for counter in counters], np.int64),
        np.array([counter.ts_ns for counter in counters], np.int64),
        np.array([float(counter.value) for counter in counters], np.float64),
        np.array([isinstance(counter.value, int) for counter in counters], np.bool_),
    )


def _flows(spans: Sequence[Span], texts: Texts) -> Flows:
    ends = [
        (row, texts.place(key), is_out)
        for row, span in enumerate(spans)
        for keys, is_out in ((span.flows_out, True), (span.flows_in, False))
        for key in keys
    ]
    return Flows(
        np.array([row for row, _, _ in ends], np.int64),
        np.array([key for _, key, _ in ends], np.int32),
        np.array([is_out for _, _, is_out in ends], np.bool_),
        lambda places: [texts.all[place] for place in places.tolist()],
    )
