"""Makes a segment brief: what figures need of each step stays, and of all other spans the totals by name.

A span goes only with both of its records in one segment, so that a segment is whole by itself, whatever becomes of
those beside it.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import msgpack

from rltrace.events import (
    AGENT_REQUEST,
    ALLOCATIONS,
    ALLOCATIONS_KEPT,
    MEMORY_EDGE,
    MEMORY_MOVES,
    OUT_OF_MEMORY,
    PHASES,
    RAY_CALL,
    RAY_SUBMIT,
    REQUEST,
    SERVER_REQUEST,
    STEP,
    SYNC_STAGES,
    is_of_bytes,
)
from rltrace.read.order import unmarked
from rltrace.read.recording import TypedSpan
from rltrace.read.removed import Group, Total, Totals
from rltrace.read.window import Windows

STAYING = frozenset(
    {
        STEP,
        *PHASES,
        *MEMORY_MOVES,
        *SYNC_STAGES,
        MEMORY_EDGE,
        OUT_OF_MEMORY,
        ALLOCATIONS_KEPT,
        AGENT_REQUEST,
        SERVER_REQUEST,
        REQUEST,
    }
)
"""Names of spans that figures of a step are made of."""

SERVED = "generate"
"""Calls of this method belong to a request's way."""


class Form(enum.Enum):
    """What stays of a segment."""

    PROGRAM = "what figures of a step are made of, and all samples of bytes"
    SAMPLER = "of each counter a step's last sample"
    TOTALS = "spans that began or ended in another segment"


class Steps(NamedTuple):
    """The steps of a run, in order."""

    starts_ns: list[int]
    ends_ns: list[int]
    numbers: list[int]

    def at(self, at_ns: int) -> int | None:
        """Return the number of the step that an instant is in, or that is the last before it."""
        place = bisect.bisect_right(self.starts_ns, at_ns)
        return self.numbers[place - 1] if place else None


class Brief(NamedTuple):
    """What is left of a segment, and what went."""

    content: bytes
    totals: Totals
    samples: int
    flows: int
    first_ns: int
    last_ns: int
    """From when to when the spans were that the segment had."""


class DamagedError(ValueError):
    """A segment that has something else than whole records and zeros behind them."""


class _Begun(NamedTuple):
    """The record of a beginning."""

    place: int
    name: str
    args: Mapping[str, Any]
    is_automatic: bool


class _Pass:
    """One pass over the records of a segment."""

    def __init__(
        self, types: Mapping[int, TypedSpan], steps: Steps, until_ns: int, form: Form, whole: Windows = ()
    ) -> None:
        self.types, self.steps, self.until_ns, self.form = types, steps, until_ns, form
        self.whole = whole
        self.gone: set[int] = set()
        """Places of records that go."""
        self.totals: Totals = {}
        self.samples = self.flows = 0
        self.first_ns, self.last_ns = 1 << 62, 0
        self.begun: dict[int, _Begun | None] = {}
        """Beginnings by their times; None for several at one time, which stay."""
        self.last_samples: dict[tuple[int | None, str], int] = {}

    def take(self, place: int, record: list[Any]) -> None:
        plain = unmarked(record)
        first, size, is_automatic = plain[0], len(plain), plain is not record
        if first.__class__ is str:
            if size == 5 and plain[4] is True and plain[3].__class__ is str:
                self._flow(place, plain[2])
            elif size == 5:
                self._begin(plain[2], _Begun(place, first, plain[3] or {}, is_automatic))
            elif size == 6:
                self._finished(place, plain, is_automatic=is_automatic)
            elif size == 4:
                self._sample(place, first, plain[1])
        elif size == 4:
            self._end(place, plain)
        elif size > 4:
            self._typed(place, plain)

    def _is_brief(self, start_ns: int, end_ns: int) -> bool:
        """Return whether what was then is made brief: it is no part of a window that stays whole."""
        place = bisect.bisect_right(self.whole, end_ns, key=_begin_ns) - 1
        return end_ns <= self.until_ns and (place < 0 or self.whole[place][1] <= start_ns)

    def _saw(self, *times_ns: int) -> None:
        self.first_ns, self.last_ns = min(self.first_ns, *times_ns), max(self.last_ns, *times_ns)

    def _begin(self, start_ns: int, begun: _Begun) -> None:
        self._saw(start_ns, start_ns)
        self.begun[start_ns] = None if start_ns in self.begun else begun

    def _typed(self, place: int, plain: list[Any]) -> None:
        declared = self.types.get(plain[0])
        if declared is not None:
            args = dict(zip(declared.fields, plain[1:-4], strict=False))
            self._begin(plain[-3], _Begun(place, declared.name, args, declared.is_automatic))

    def _end(self, place: int, plain: list[Any]) -> None:
        start_ns, end_ns, late = plain[0], plain[1], plain[2]
        self._saw(start_ns, end_ns)
        begun = self.begun.pop(start_ns, None)
        if not self._is_brief(start_ns, end_ns):
            return
        if begun is not None and not self._stays(begun.name, {**begun.args, **(late or {})}):
            self._count(begun.name, {**begun.args, **(late or {})}, begun.is_automatic, start_ns, end_ns)
            self.gone |= {begun.place, place}

    def _finished(self, place: int, plain: list[Any], *, is_automatic: bool) -> None:
        name, _, start_ns, end_ns, args, _ = plain
        self._saw(start_ns, end_ns)
        if self._is_brief(start_ns, end_ns) and not self._stays(name, args or {}):
            self._count(name, args or {}, is_automatic, start_ns, end_ns)
            self.gone.add(place)

    def _count(self, name: str, args: Mapping[str, Any], is_automatic: bool, start_ns: int, end_ns: int) -> None:
        step = self.steps.at(start_ns)
        method = str(args["method"]) if name == RAY_CALL and "method" in args else None
        error = str(args["error"]) if "error" in args else None
        group, one = (
            Group(step, step, name, method, is_automatic, error),
            Total(1, end_ns - start_ns, end_ns - start_ns),
        )
        known = self.totals.get(group)
        self.totals[group] = one if known is None else known + one

    def _flow(self, place: int, at_ns: int) -> None:
        if self._is_brief(at_ns, at_ns):
            self.gone.add(place)
            self.flows += 1

    def _sample(self, place: int, name: str, at_ns: int) -> None:
        if not self._is_brief(at_ns, at_ns):
            return
        if self.form is Form.TOTALS:
            self.gone.add(place)
            self.samples += 1
        if self.form is Form.PROGRAM and (is_of_bytes(name) or name.startswith(ALLOCATIONS)):
            return
        key = self.steps.at(at_ns), name
        if key in self.last_samples and self.form is not Form.TOTALS:
            self.gone.add(self.last_samples[key])
            self.samples += 1
        self.last_samples[key] = place

    def _stays(self, name: str, args: Mapping[str, Any]) -> bool:
        if self.form is Form.TOTALS:
            return False
        if name in STAYING or args.get("phase") is True or "error" in args:
            return True
        return name in (RAY_CALL, RAY_SUBMIT) and str(args.get("method")).rpartition(".")[2] == SERVED


_begin_ns = itemgetter(0)


def brief(
    content: bytes,
    types: Mapping[int, TypedSpan],
    steps: Steps,
    until_ns: int,
    form: Form,
    whole: Windows = (),
    *,
    is_closed: bool = True,
) -> Brief:
    """Return what is left of a segment without the spans that ended until a time, and without most samples and arrows.

    Args:
        content: Of the segment.
        types: Typed spans of its process.
        steps: Of the run, by the clock of its process.
        until_ns: The last instant that is made brief.
        form: What stays.
        whole: Windows of which everything stays, in order.
        is_closed: Whether it ends in a whole record; otherwise what is behind the last one stays as it is.

    Raises:
        DamagedError: it is not sound, so that nobody can say what would go.
    """
    made = _Pass(types, steps, until_ns, form, whole)
    ends, damage = _places(content, made)
    rest = content[ends[-1] if ends else 0 :].rstrip(b"\0")  # a record never ends in a zero
    if is_closed and (damage or rest):
        raise DamagedError(damage or "there is something behind the last record")
    kept = [content[begin:end] for place, (begin, end) in enumerate(pairwise([0, *ends])) if place not in made.gone]
    kept.append(rest)
    return Brief(b"".join(kept), made.totals, made.samples, made.flows, made.first_ns, made.last_ns)


def _places(content: bytes, made: _Pass) -> tuple[Sequence[int], str | None]:
    """Take every record until the first damaged one, and return where each ends, and what the damage is."""
    unpacker = msgpack.Unpacker(
        None, unicode_errors="replace", timestamp=1, strict_map_key=False, max_buffer_size=len(content) + 1
    )
    unpacker.feed(content)
    ends: list[int] = []
    try:
        for record in unpacker:
            if record.__class__ is not list or len(record) < 3 or record[-1] is not True:
                break
            made.take(len(ends), record)
            ends.append(unpacker.tell())
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
        return ends, str(error) or type(error).__name__
    return ends, None
