"""Spans of a Recording as trees, each with totals of what is too deep or too frequent to be sent by itself.

What is sent of a step: the step, its phases, the calls directly inside of a phase or a step, and whatever has a meaning
of its own wherever it is, such as a request, a tool or an error. Of calls with one name below one parent at most
`MOST_ALIKE` are sent. The parent of those that are not has their number and seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from rltrace.analysis.errors import NO_ERRORS
from rltrace.events import (
    AGENT_REQUEST,
    COLLECTION,
    GENERATE,
    MEMORY_EDGE,
    OUT_OF_MEMORY,
    REQUEST,
    SERVER_REQUEST,
    STEP,
    TOOLS,
    TRAJECTORIES,
    TURN,
    Args,
    Span,
)

MOST_ALIKE = 16
"""How many calls of one name are sent as spans of their own below one parent."""

MOST_LOOSE = 2_000
"""How many calls of one name, nested in nothing, a process holds until their step is over."""

MOST_IN_A_ROW = 4_000
"""How many calls a thread or task holds that nothing encloses yet. Of more, the older half of those whose names are too
frequent to be sent becomes one sum."""

SUM = ""
"""Name of what stands for many calls and was none itself."""

TOTALS_ONLY = frozenset({MEMORY_EDGE, COLLECTION, SUM})
"""Names that are never sent: what measuring costs, and garbage collection, which is everywhere."""

REQUESTS = (AGENT_REQUEST, SERVER_REQUEST, REQUEST)
"""A request where it is sent, where it is served and where it is computed, from the outside in."""

GENERATION = frozenset({*TRAJECTORIES, TURN, GENERATE, *TOOLS, *REQUESTS})
"""Names to which the conventions for generative AI apply."""

Totals = dict[str, list[int]]
"""For each name, how many calls there were and how many nanoseconds they took."""


class Call:
    """One span, in nanoseconds since 1970, with what it encloses."""

    __slots__ = (
        "args",
        "end_ns",
        "flows_in",
        "flows_out",
        "inside",
        "into",
        "is_phase",
        "key_ns",
        "lane",
        "name",
        "parent",
        "source",
        "start_ns",
        "task",
        "thread",
        "totals",
        "was_open",
    )

    def __init__(self, source: str, span: Span, end_ns: int, offset_ns: int) -> None:
        self.source = source
        """The process's folder in the Recording."""
        self.name = span.name
        self.thread = span.thread
        self.task = span.task
        self.lane = span.lane
        self.key_ns = span.start_ns
        self.start_ns = span.start_ns + offset_ns
        self.end_ns = end_ns + offset_ns
        self.args: Args = span.args
        self.was_open = span.end_ns is None
        self.is_phase = span.is_phase
        self.flows_out = list(span.flows_out)
        self.flows_in = list(span.flows_in)
        self.inside: list[Call] = []
        self.totals: Totals = {}
        self.parent: Call | None = None
        self.into: Call | None = None
        """The call whose totals it is part of, if it is not sent itself."""

    @property
    def is_anchor(self) -> bool:
        """Whether the calls directly inside of it are sent."""
        return self.is_phase or self.name == STEP

    @property
    def has_failed(self) -> bool:
        """Whether an exception left it, or memory ran out in it."""
        error = self.args.get("error")
        return (error is not None and error not in NO_ERRORS) or self.name == OUT_OF_MEMORY

    @property
    def is_special(self) -> bool:
        """Whether it is sent wherever it is."""
        return self.is_phase or self.name == STEP or self.name in GENERATION or self.has_failed

    def enclose(self, calls: list[Call]) -> None:
        """Take what is directly inside; plain calls count in the totals unless they may be sent."""
        for call in calls:
            if self.is_anchor or call.is_special:
                self.adopt(call)
            else:
                self.fold(call)
        if self.is_anchor:
            self.fold_frequent()

    def adopt(self, call: Call) -> None:
        """Make a call one that is directly inside of this."""
        call.parent = self
        self.inside.append(call)

    def fold(self, call: Call) -> None:
        """Count a call in the totals, in place of sending it, and take over what it encloses."""
        call.into = self
        if call.name != SUM:
            _add(self.totals, call.name, 1, call.end_ns - call.start_ns)
        for name, (count, taken_ns) in call.totals.items():
            _add(self.totals, name, count, taken_ns)
        self.flows_out += call.flows_out
        self.flows_in += call.flows_in
        for inner in call.inside:
            self.adopt(inner)
        call.inside, call.totals = [], {}

    def fold_frequent(self) -> None:
        """Count calls in the totals whose name is too frequent here."""
        while frequent := _frequent(self.inside):
            calls, self.inside = self.inside, []
            for call in calls:
                if _kind(call) in frequent:
                    self.fold(call)
                else:
                    self.inside.append(call)

    def walk(self) -> Iterator[Call]:
        """Yield it and all calls below it, each before what it encloses."""
        waiting = [self]
        while waiting:
            call = waiting.pop()
            yield call
            waiting.extend(reversed(call.inside))

    def is_below(self, other: Call) -> bool:
        """Return whether it is another call, or inside of it."""
        above: Call | None = self
        while above is not None and above is not other:
            above = above.parent
        return above is other

    @property
    def sent_as(self) -> Call:
        """The call whose span has it."""
        call = self
        while call.into is not None:
            call = call.into
        return call


def _add(totals: Totals, name: str, count: int, taken_ns: int) -> None:
    known = totals.get(name)
    if known is None:
        totals[name] = [count, taken_ns]
    else:
        known[0] += count
        known[1] += taken_ns


def _kind(call: Call) -> tuple[str, bool] | None:
    """Return what a call is counted by; None if it is sent whatever there is of its kind."""
    if call.has_failed and not call.is_anchor and call.name not in GENERATION:
        return call.name, True
    return None if call.is_special else (call.name, False)


def _frequent(calls: list[Call]) -> set[tuple[str, bool]]:
    counts: dict[tuple[str, bool], int] = {}
    for call in calls:
        kind = _kind(call)
        if kind is not None:
            counts[kind] = counts.get(kind, 0) + 1
    return {kind for kind, count in counts.items() if count > MOST_ALIKE or kind[0] in TOTALS_ONLY}


NOTHING_OPEN: Mapping[tuple[int, int], int] = MappingProxyType({})


class Tree:
    """The calls of one process, nested as they ran, until somebody takes them."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.steps: list[Call] = []
        """Steps that it recorded itself and that nobody has taken yet."""
        self.left_over: Totals = {}
        """Loose calls that were too many to be kept."""
        self._rows: dict[tuple[int, int, int], list[Call]] = {}
        self._limits: dict[tuple[int, int, int], int] = {}
        self._loose: list[Call] = []
        self._counts: dict[str, int] = {}

    def add(self, call: Call) -> None:
        """Add a call that has ended, after everything that it encloses."""
        if call.lane is None:
            if call.name == STEP:
                self.steps.append(call)
            else:
                self._add_loose(call)
            return
        key = (call.thread, call.task, call.lane)
        row = self._rows.setdefault(key, [])
        if row and row[-1].start_ns > call.end_ns:  # what still held when a part of a run begins comes late
            row.insert(bisect_left(row, call.start_ns, key=_start_ns), call)
            return
        begin = len(row)
        while begin and row[begin - 1].start_ns >= call.start_ns:
            begin -= 1
        call.enclose(row[begin:])
        del row[begin:]
        if call.name == STEP:
            self.steps.append(call)  # whatever encloses it, such as one call that runs all steps
        else:
            row.append(call)
            if len(row) > self._limits.get(key, MOST_IN_A_ROW):
                shorter = self._rows[key] = _shortened(row)
                self._limits[key] = MOST_IN_A_ROW if 4 * len(shorter) <= 3 * MOST_IN_A_ROW else 2 * len(shorter)

    def take(self, begin_ns: int, end_ns: int) -> list[Call]:
        """Take the outermost calls that began in `[begin_ns, end_ns)`, in the order in which they began.

        What is inside of a call that goes on after that is taken by itself.
        """
        taken: list[Call] = []
        for key, row in list(self._rows.items()):
            first = bisect_left(row, begin_ns, key=_start_ns)
            last = bisect_left(row, end_ns, key=_start_ns)
            taken += row[first:last]
            for call in row[:first]:
                taken += _released_from(call, begin_ns, end_ns)
            del row[first:last]
            if not row:
                del self._rows[key]
        kept: list[Call] = []
        for call in self._loose:
            (taken if begin_ns <= call.start_ns < end_ns else kept).append(call)
        self._loose = kept
        self._counts.clear()
        for call in kept:
            self._counts[call.name] = self._counts.get(call.name, 0) + 1
        return sorted(_released(taken, end_ns), key=_start_ns)

    def take_special(self, end_ns: int, open_since: Mapping[tuple[int, int], int] = NOTHING_OPEN) -> list[Call]:
        """Take the calls with a meaning of their own that began before a time, from wherever they are nested.

        Args:
            end_ns: The time.
            open_since: For each thread and task since when something is open that they are to stay in.
        """
        taken: list[Call] = []
        for key, row in list(self._rows.items()):
            last_ns = min(end_ns, open_since.get(key[:2], end_ns))
            taken += [call for call in row if call.is_special and call.start_ns < last_ns]
            for call in row:
                if not call.is_special:
                    taken += _released_from(call, 0, last_ns)
            row[:] = [call for call in row if not (call.is_special and call.start_ns < last_ns)]
            if not row:
                del self._rows[key]
        taken += [call for call in self._loose if call.is_special and call.start_ns < end_ns]
        self._loose = [call for call in self._loose if not (call.is_special and call.start_ns < end_ns)]
        return sorted(taken, key=_start_ns)

    def _add_loose(self, call: Call) -> None:
        count = self._counts[call.name] = self._counts.get(call.name, 0) + 1
        if count > MOST_LOOSE and not call.is_special:
            _add(self.left_over, call.name, 1, call.end_ns - call.start_ns)
        else:
            self._loose.append(call)


def _shortened(row: list[Call]) -> list[Call]:
    """Return a row with one sum in place of the older half of what is too frequent in it, and is plain."""
    frequent = _frequent(row)
    older, newer = row[: len(row) // 2], row[len(row) // 2 :]
    is_summed = [_kind(call) in frequent and not (call.inside or call.flows_in or call.flows_out) for call in older]
    summed = [call for call, is_so in zip(older, is_summed, strict=True) if is_so]
    if not summed:
        return row
    whole, first = summed[0], summed[0]
    if whole.name != SUM:
        whole = Call(first.source, Span(SUM, first.thread, first.task, first.key_ns, None, {}), first.key_ns, 0)
        whole.lane, whole.start_ns = first.lane, first.start_ns
        whole.fold(first)
    for call in summed[1:]:
        whole.fold(call)
    whole.end_ns = max(call.end_ns for call in summed)
    kept = [call for call, is_so in zip(older, is_summed, strict=True) if not is_so]
    return sorted([whole, *kept], key=_start_ns) + newer


def _released(calls: list[Call], end_ns: int) -> Iterator[Call]:
    for call in calls:
        if call.end_ns > end_ns:
            yield from _released_from(call, 0, end_ns)
        yield call


def _released_from(call: Call, begin_ns: int, end_ns: int) -> list[Call]:
    """Return what began in `[begin_ns, end_ns)` inside of a call that is no phase, and take it out of it."""
    if call.is_special or not call.inside or call.end_ns <= begin_ns:
        return []
    released = [inner for inner in call.inside if begin_ns <= inner.start_ns < end_ns]
    call.inside = [inner for inner in call.inside if not begin_ns <= inner.start_ns < end_ns]
    for inner in released:
        inner.parent = None
    return released


def _start_ns(call: Call) -> int:
    return call.start_ns
