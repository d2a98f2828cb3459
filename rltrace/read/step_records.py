"""Finds the steps in segments by the bytes that begin and end them; everything else is skipped without decoding it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from rltrace.events import AUTOMATIC, STEP, Span

_NAME = msgpack.packb(STEP)
_MARK = msgpack.packb(AUTOMATIC)
_LONGEST_RECORD_BYTES = 1 << 20


class StepRecords:
    """The steps of one process.

    Args:
        typed: The fields of each typed span that it declared as a step, by its number.
    """

    def __init__(self, typed: Mapping[int, Sequence[str]]) -> None:
        self.spans: list[Span] = []
        self._open: dict[int, Span] = {}
        self._typed = typed
        heads = [_array(5 + len(fields)) + msgpack.packb(number) for number, fields in typed.items()]
        self._begin = re.compile(b"|".join(re.escape(part) for part in (_NAME, *heads)))

    def through(self, content: bytes) -> None:
        """Go through one more segment, the next of its process."""
        for found in self._begin.finditer(content):
            if (span := self._span(content, found)) is not None:
                self.spans.append(span)
                if span.end_ns is None:
                    self._open[span.start_ns] = span
        for start_ns, span in list(self._open.items()):
            at = content.find(b"\x94" + msgpack.packb(start_ns))
            match _record(content, at, b"\x94"):
                case [_, int(end_ns), dict() | None as late, True]:
                    span.end_ns = end_ns
                    span.args |= late or {}
                    del self._open[start_ns]

    def _span(self, content: bytes, found: re.Match[bytes]) -> Span | None:
        """The step whose record has the name or the number that was found; None if it is no step's."""
        if found.group() != _NAME:
            record = _record(content, found.start(), found.group()[:1])
        elif content.startswith(_MARK, found.start() - 1):
            record = (_record(content, found.start() - 2, b"\x96\x97") or [])[1:]
        else:
            record = _record(content, found.start() - 1, b"\x95\x96")
        match record:
            case [str(), int(), int(start_ns), dict() | None as args, True]:
                return Span(STEP, 0, 0, start_ns, None, args or {})
            case [str(), int(), int(start_ns), int(end_ns), dict() | None as args, True]:
                return Span(STEP, 0, 0, start_ns, end_ns, args or {})
            case [int(number), *values, int(), int(start_ns), dict() | None, True]:
                return Span(STEP, 0, 0, start_ns, None, dict(zip(self._typed[number], values, strict=False)))
        return None


def _array(length: int) -> bytes:
    return bytes(msgpack.Packer().pack_array_header(length))


def _record(content: bytes, at: int, heads: bytes) -> list[Any] | None:
    """Return the record that begins at a place with one of these bytes; None if that is none."""
    if at < 0 or content[at] not in heads:
        return None
    unpacker = msgpack.Unpacker(None, unicode_errors="replace", timestamp=1, max_buffer_size=_LONGEST_RECORD_BYTES)
    unpacker.feed(content[at : at + _LONGEST_RECORD_BYTES])
    try:
        found = unpacker.unpack()
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    return found if isinstance(found, list) else None
