"""Reads the records of one process: its spans, with their ends matched to their beginnings, and its samples."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Set
from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

from rltrace.events import AUTOMATIC, Args, Counter, Span, is_of_bytes
from rltrace.host import regular_file
from rltrace.read import gate, order, packed
from rltrace.read.crossing import Crossing
from rltrace.read.records import records

if TYPE_CHECKING:
    from rltrace.read.process import Process

Event = Span | Counter

MOST_NAMES = 20_000
"""How many names of spans a reader remembers something about."""


class TypedSpan(NamedTuple):
    """What a process has declared."""

    name: str
    fields: list[str]
    is_automatic: bool


class Segment(NamedTuple):
    """What a process wrote into one file."""

    content: bytes
    first_ns: int
    last_ns: int
    """From when to when its records can have been written."""
    sound: list[list[Any]] | None = None
    """Its records in order, if some are not."""
    name: str = ""
    """Of the file."""


def _nothing() -> None: ...


class EventReader:
    """Matches the ends of one process's spans to their beginnings."""

    def __init__(self, process: Process, types: dict[int, TypedSpan]) -> None:
        self.process = process
        self.types = types
        self.thread = 0
        """The thread whose records are being read."""
        self.open: dict[int, list[Span]] = {}
        """Open spans by their start: two of one thread never share it, but two threads may."""
        self.stacks: dict[tuple[int, int], list[Span]] = {}
        """Open spans by thread and task, innermost last: a flow belongs to the innermost."""
        self.crossings: dict[tuple[int, int], Crossing] = {}
        """By thread and task, if an open span cannot be on every lane."""
        self.early_ends: dict[int, tuple[int, Args | None]] = {}
        """Ends that were read before their beginning: another thread ended the span, and its segment was read first."""
        self.nameless: set[int] = set()
        """Starts of spans that make no sense, whose ends are still to come."""
        self.may_grow: bool | None = None
        """Whether its process may be writing to it; None: ask the process."""
        self.first_ns, self.last_ns = 0, gate.MOST_NS
        """From when to when the segment that is being read can have been written."""
        self.checks: dict[str, dict[str, gate.Check]] = {}
        """Checks of arguments, by the name of their span; forgotten when there are `MOST_NAMES`."""
        # What a record is follows from the types of its elements; one that fits none is a typed span or damaged.
        self.readers: dict[tuple[type, ...], Callable[..., Event | None]] = {
            (int, str, bool): self._thread,
            (int, int, dict, bool): self._end,
            (int, int, NoneType, bool): self._end,
            (str, int, int, dict, bool): self._begin,
            (str, int, int, NoneType, bool): self._begin,
            (str, int, int, int, dict, bool): self._whole,
            (str, int, int, int, NoneType, bool): self._whole,
            (str, int, int, bool): self._counter,
            (str, int, float, bool): self._counter,
            (str, int, bool, bool): self._switch,
            (str, int, int, str, bool): self._flow,
        }

    def events(self) -> Iterator[Event]:
        for segment in self.segments():
            self.thread = 0
            yield from self._segment(segment)
        for span in [span for spans in self.open.values() for span in spans]:
            crossing = self.crossings.get((span.thread, span.task))
            span.lane = 0 if crossing is None else crossing.lane(span)
            span.end_ns = self.process.paused_after_ns(span.start_ns)  # if it ended in a pause, nobody wrote that down
            yield span
        self.process.orphans += len(self.early_ends)

    def segments(self, known: Set[str] = frozenset(), *, closed_first: bool = False) -> Iterator[Segment]:
        """Yield the segments that can be read, without those that are known."""
        names = self.process.segment_names
        order = sorted(names, key=lambda name: self.process.seal(name) is None) if closed_first else names
        for name in order:
            segment = self._content(name) if name not in known else None
            if segment is not None:
                yield segment._replace(name=name)
        self.process.check_all_there(names)

    def resume(self, spans: Iterable[Span]) -> None:
        """Go on where these spans are open, by when they began."""
        for span in spans:
            self.thread, self.first_ns = span.thread, 0
            self._begin(span.name, span.task, span.start_ns, span.args, span.is_automatic)
            begun = self.open[span.start_ns][-1]
            begun.flows_out, begun.flows_in = span.flows_out, span.flows_in

    def more(self, segment: Segment, thread: int) -> Iterator[Event]:
        """Yield the events of a part of a segment, whole records, the first of which are of this thread."""
        self.thread, self.may_grow = thread, False
        yield from self._segment(segment)

    def _segment(self, segment: Segment) -> Iterator[Event]:
        """Yield the events of one segment.

        Nearly every record begins a span that starts alone, or ends the innermost span of its thread and task. These
        two are handled right here, which halves the time per event; all others go to the readers by type.
        """
        open_spans, stacks, crossings = self.open, self.stacks, self.crossings
        leave_out_unfit = gate.leave_out_unfit
        data, first_ns, last_ns, sound, _ = segment
        self.first_ns, self.last_ns, checks = first_ns, last_ns, self.checks
        decoded = self._decoded(data, self._damaged)
        if sound is not None:
            for _ in decoded:  # which counts what is damaged besides
                pass
        for record in decoded if sound is None else sound:
            first, size = record[0], len(record)
            if size == 4 and first.__class__ is int:
                end_ns, late = record[1], record[2]
                spans = open_spans.get(first)
                if spans is not None and len(spans) == 1 and late.__class__ in _ARGS:
                    span = spans[0]
                    key = (span.thread, span.task)
                    stack = stacks[key]
                    innermost = stack[-1] is span and (not crossings or key not in crossings)
                    innermost = innermost and span.thread == self.thread
                    if innermost and end_ns.__class__ is int and first <= end_ns <= last_ns:
                        del open_spans[first]
                        if len(stack) == 1:
                            del stacks[key]
                        else:
                            del stack[-1]
                        span.end_ns = end_ns
                        if late:
                            known = checks.get(span.name)
                            if known:
                                self.process.unfit += leave_out_unfit(late, known)
                            elif known is None:
                                self._check(span.name, late)
                            span.args |= late
                        yield span
                        continue
            elif (size == 5 and first.__class__ is str) or (size == 6 and first == AUTOMATIC):
                if size == 5:
                    name, task, start_ns, args, _ = record
                else:
                    _, name, task, start_ns, args, _ = record
                if (
                    args.__class__ in _ARGS
                    and name.__class__ is str
                    and start_ns.__class__ is int
                    and first_ns <= start_ns <= last_ns
                    and task.__class__ is int
                    and start_ns not in open_spans
                    and not self.early_ends
                ):
                    if args and checks.get(name, _NEW):  # a name that is new, or whose arguments figures are made of
                        self._check(name, args)
                    span = Span(name, self.thread, task, start_ns, None, args or {}, (), (), 0, size == 6)
                    open_spans[start_ns] = [span]
                    siblings = stacks.get((self.thread, task))
                    if siblings is None:
                        stacks[self.thread, task] = [span]
                    else:
                        siblings.append(span)
                    continue
            event = self._event(record)
            if event is not None:
                yield event

    def _event(self, record: list[Any]) -> Event | None:
        """What a record makes; every reader takes, for the `true` at its end, whether a hook wrote it."""
        unmarked = order.unmarked(record)
        read = self.readers.get((*map(type, unmarked),))
        return self._typed(*record) if read is None else read(*unmarked[:-1], unmarked is not record)

    def _content(self, name: str) -> Segment | None:
        """Return a segment; None if it is refused, or gone, or its columns are damaged."""
        try:
            data = self.process.segment(name)
        except regular_file.RefusedError:
            self._damaged()
            return None
        except packed.DamagedError:
            self.process.damaged_segments += 1
            return None
        except OSError:  # dropped a moment ago
            return None
        if self.process.check_segment(name, data):
            return Segment(data, 0, gate.MOST_NS)
        return self._unvouched(data)

    def _unvouched(self, data: bytes) -> Segment:
        """Return a segment that no checksum vouches for: its records are of its process's life, and in order."""
        first_ns, last_ns = self.process.life_ns
        sound: list[list[Any]] | None = None
        if self.process.has_checksums:
            found = list(self._decoded(data, _nothing))
            if last_ns == gate.MOST_NS:
                last_ns = order.last_ns(found, gate.MOST_NS)
            sound = list(order.in_order(found))
            self.process.torn += len(found) - len(sound)
            sound = sound if len(sound) < len(found) else None
        first_ns, last_ns = max(0, first_ns - gate.SLACK_NS), min(last_ns + gate.SLACK_NS, gate.MOST_NS)
        return Segment(data, first_ns, last_ns, sound)

    def _decoded(self, data: bytes, report_damage: Callable[[], None]) -> Iterator[list[Any]]:
        may_grow = self.process.is_alive if self.may_grow is None else self.may_grow
        return records(data, self._makes_sense, report_damage, may_grow=may_grow)

    def _makes_sense(self, record: Any) -> bool:
        """Return whether a value after a damaged record is a record: its type exists, and its time is in its process's
        life."""
        if record.__class__ is not list or len(record) < 3 or record[-1] is not True:
            return False
        unmarked = order.unmarked(record)
        types = (*map(type, unmarked),)
        if types in self.readers:
            times_ns = unmarked[order.TIMES[types[0], len(types)]]
        elif record[0].__class__ is int and record[0] in self.types and types[-4:-1] in _TYPED:
            times_ns = record[-3:-2]
        else:
            return False
        first_ns, last_ns = self.process.life_ns
        return all(first_ns - gate.SLACK_NS <= at_ns <= last_ns + gate.SLACK_NS for at_ns in times_ns)

    def _damaged(self) -> None:
        self.process.torn += 1

    def _thread(self, thread: int, name: str, _: bool) -> None:
        self.thread = thread
        self.process.threads[thread] = name

    def _check(self, name: str, args: Args) -> None:
        """Remove the arguments that a span of this name cannot have."""
        checks = self.checks.get(name)
        if checks is None:
            if len(self.checks) >= MOST_NAMES:
                self.checks.clear()
            checks = self.checks[name] = gate.arguments_of(name)
        if checks:
            self.process.unfit += gate.leave_out_unfit(args, checks)

    def _add(self, span: Span, late: Args) -> None:
        self._check(span.name, late)
        span.args |= late

    def _counter(self, name: str, ts_ns: int, value: float, _: bool) -> Counter | None:
        if 0 <= ts_ns <= self.last_ns:
            if -_MOST <= value <= _MOST or value != value or not is_of_bytes(name):
                return Counter(name, self.thread, ts_ns, value)
            self.process.unfit += 1
        else:
            self._damaged()
        return None

    def _switch(self, name: str, ts_ns: int, value: bool, _: bool) -> Counter | None:
        return self._counter(name, ts_ns, int(value), True)

    def _whole(
        self, name: str, lane: int, start_ns: int, end_ns: int, args: Args | None, is_automatic: bool
    ) -> Span | None:
        if not 0 <= start_ns <= end_ns <= self.last_ns:
            self._damaged()
            return None
        if args and self.checks.get(name, _NEW):
            self._check(name, args)
        return Span(name, self.thread, lane, start_ns, end_ns, args or {}, lane=None, is_automatic=is_automatic)

    def _begin(self, name: str, task: int, start_ns: int, args: Args | None, is_automatic: bool) -> Span | None:
        if not self.first_ns <= start_ns <= self.last_ns:
            self._damaged()
            return None
        if args and self.checks.get(name, _NEW):
            self._check(name, args)
        span = Span(name, self.thread, task, start_ns, None, args or {}, is_automatic=is_automatic)
        if self.early_ends and start_ns in self.early_ends:
            span.lane = None
            return self._ended(span, *self.early_ends.pop(start_ns))
        self.open.setdefault(start_ns, []).append(span)
        self.stacks.setdefault((self.thread, task), []).append(span)
        return None

    def _typed(self, *record: Any) -> Span | None:
        """Read a typed span; one whose declaration was lost keeps its arguments, numbered."""
        number = record[0]
        sound = (*map(type, record[-4:-2]),) == (int, int) and type(record[-2]) in _ARGS
        if not sound or number.__class__ is not int or number >= 0:
            self._misfit(record[-3] if sound and len(record) == 5 else None)
            return None
        declared = self.types.get(number)
        if declared is None:
            declared = TypedSpan(f"type {number}", [f"arg{n}" for n in range(len(record) - 5)], is_automatic=False)
        args = dict(zip(declared.fields, record[1:-4], strict=False))
        if record[-2]:
            args |= record[-2]
        return self._begin(declared.name, record[-4], record[-3], args, declared.is_automatic)

    def _misfit(self, start_ns: int | None = None) -> None:
        """Count a whole record without use: the sample is no number, or the name of the span is no text."""
        self.process.misfits += 1
        if start_ns is not None and self.early_ends.pop(start_ns, None) is None:
            self.nameless.add(start_ns)

    def _end(self, start_ns: int, end_ns: int, late: Args | None, _: bool) -> Span | None:
        if not 0 <= start_ns <= end_ns <= self.last_ns:
            self._damaged()
            return None
        span = self._take(start_ns)
        if span is None and start_ns in self.nameless:
            self.nameless.discard(start_ns)
            return None
        if span is None:
            self.early_ends[start_ns] = (end_ns, late)
            return None
        return self._ended(span, end_ns, late)

    def _ended(self, span: Span, end_ns: int, late: Args | None) -> Span:
        span.end_ns = end_ns
        if late:
            self._add(span, late)
        return span

    def _take(self, start_ns: int) -> Span | None:
        spans = self.open.get(start_ns)
        if spans is None:
            return None
        span = spans[-1]
        if len(spans) == 1:  # begun in this thread or in another one
            del self.open[start_ns]
        else:
            span = next((s for s in spans if s.thread == self.thread), span)
            _remove(spans, span)
        self._leave(span)
        if span.thread != self.thread:  # the records of two threads are not in the order of their times
            span.lane = None
        return span

    def _leave(self, span: Span) -> None:
        """Take a span off its stack; those that began after it and are still open overlap it without nesting."""
        key = (span.thread, span.task)
        stack = self.stacks[key]
        if stack[-1] is span and key not in self.crossings:
            stack.pop()
        else:
            crossing = self.crossings.setdefault(key, Crossing())
            span.lane = crossing.lane(span)
            if not crossing.leave(stack, _index(stack, span), span.lane):
                del self.crossings[key]
        if not stack:
            del self.stacks[key]

    def _flow(self, key: str, task: int, _ts_ns: int, direction: str, _: bool) -> None:
        if direction not in ("out", "in"):
            self._misfit()
            return
        stack = self.stacks.get((self.thread, task))
        if not stack:
            self.process.orphans += 1
            self.process.stray_flows += 1
            return
        span = stack[-1]
        if direction == "out":
            span.flows_out = (*span.flows_out, key)
        else:
            span.flows_in = (*span.flows_in, key)


def _remove(spans: list[Span], span: Span) -> None:
    """Remove this very span."""
    spans[:] = [other for other in spans if other is not span]


def _index(stack: list[Span], span: Span) -> int:
    """Return where this very span is: spans are in the order in which they began, unless they are damaged."""
    at = bisect_left(stack, span.start_ns, key=_start_ns)
    if at < len(stack) and stack[at] is span:
        return at
    return next(at for at, other in enumerate(stack) if other is span)


_start_ns = attrgetter("start_ns")


_ARGS = (dict, NoneType)
_TYPED = ((int, int, dict), (int, int, NoneType))
"""What precedes the end of a typed span's beginning."""
_NEW: dict[str, gate.Check] = {"": gate.text}
"""Checks for a name of which nothing is known yet."""
_MOST = gate.MOST_BYTES
