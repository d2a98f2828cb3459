"""Finds the steps in segments by the bytes that begin and end them; everything else is skipped without decoding it."""

from __future__ import annotations

import re
from typing import Any

import msgpack

from rltrace.events import STEP, Span

_BEGIN = re.compile(re.escape(msgpack.packb(STEP)))
_LONGEST_RECORD_BYTES = 1 << 20


class StepRecords:
    """The steps of one process; a step that is a typed span is not found."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._open: dict[int, Span] = {}

    def through(self, content: bytes) -> None:
        """Go through one more segment, the next of its process."""
        for found in _BEGIN.finditer(content):
            match _record(content, found.start() - 1):
                case [_, int(), int(start_ns), dict() | None as args, True]:
                    self._open[start_ns] = span = Span(STEP, 0, 0, start_ns, None, args or {})
                    self.spans.append(span)
                case [_, int(), int(start_ns), int(end_ns), dict() | None as args, True]:
                    self.spans.append(Span(STEP, 0, 0, start_ns, end_ns, args or {}))
        for start_ns, span in list(self._open.items()):
            at = content.find(b"\x94" + msgpack.packb(start_ns))
            match _record(content, at):
                case [_, int(end_ns), dict() | None as late, True]:
                    span.end_ns = end_ns
                    span.args |= late or {}
                    del self._open[start_ns]


def _record(content: bytes, at: int) -> list[Any] | None:
    """Return the record that begins at a place; None if there is none."""
    if at < 0 or content[at] not in b"\x94\x95\x96":
        return None
    unpacker = msgpack.Unpacker(None, unicode_errors="replace", timestamp=1, max_buffer_size=_LONGEST_RECORD_BYTES)
    unpacker.feed(content[at : at + _LONGEST_RECORD_BYTES])
    try:
        found = unpacker.unpack()
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    return found if isinstance(found, list) else None
