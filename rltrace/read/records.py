"""Reads the records of one segment: msgpack arrays that end in `true`, one after another, with zeros after the last.

A damaged record costs itself and, if its end is damaged, the next one: reading continues at the next place where two
records in a row make sense.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgpack

Check = Callable[[Any], bool]
"""Tells whether a value can be a record of the process that wrote the segment."""

MOST_GAPS = 256
"""Damaged places in a segment after which reading continues."""

TRIED_BYTES = 8 * 1024
"""The two records that show where reading can continue are not longer than this."""

BYTES_PER_TRY = 256
"""Bytes of a segment per try: this bounds the number of tries, whatever a stranger wrote into it."""

LEAST_TRIES = 256
"""Tries in a segment, however short it is."""

_TRUE = b"\xc3"

_MOST_LOOKED = 64

_BOUNDARY = re.compile(rb"\xc3(?=[\x93-\x9f\xdc])")
"""The `true` that ends a record, before the array that begins the next one."""


def _text_keys(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    return {key if isinstance(key, str) else str(key): value for key, value in pairs}


_USUAL: dict[str, Any] = {}
_ODD_KEYS: dict[str, Any] = {"object_pairs_hook": _text_keys, "strict_map_key": False}
"""Unpacks a segment with a map whose keys are not text: slower, and every reader gets text."""


def records(data: bytes, makes_sense: Check, report_damage: Callable[[], None], *, may_grow: bool) -> Iterator[Any]:
    """Yield the whole records of a segment.

    Args:
        data: Content of its file.
        makes_sense: Asked only about records after a damaged one.
        report_damage: Called once for each damaged place.
        may_grow: Its process may be writing while it is read, so that zeros before other bytes are no damage.
    """
    at, tries = 0, LEAST_TRIES + len(data) // BYTES_PER_TRY
    for _ in range(MOST_GAPS):
        read, last = 0, None
        for options in (_USUAL, _ODD_KEYS):
            unpacker = _unpacker(len(data) + 1, **options)
            unpacker.feed(data[at:] if at else data)
            unpacker.feed(b"\0")  # a sound segment ends in a zero; a file cut inside a record swallows it
            try:
                for _ in range(read):
                    unpacker.skip()
                for record in unpacker:
                    if record.__class__ is not list or len(record) < 3 or record[-1] is not True:
                        last = record
                        break
                    read += 1
                    yield record
                break
            except (ValueError, TypeError, msgpack.UnpackException):
                continue
        if last == 0 and may_grow:
            return
        end = at + _size_bytes(data[at:], read)
        if not data[end:].strip(b"\0"):
            return
        report_damage()
        for found in itertools.islice(_BOUNDARY.finditer(data, end), tries):
            tries -= 1
            if _is_start(data[found.end() : found.end() + TRIED_BYTES], makes_sense):
                at = found.end()
                break
        else:
            return


def whole_bytes(data: bytes) -> int:
    """Return how many bytes the whole records at the beginning of `data` take.

    What follows them is damaged, or being written. It may be whole too, behind one that is not: the file was read
    while its writer went on.
    """
    from rltrace.read import native  # here, because it imports numpy, which only some commands need

    size_bytes = native.whole_bytes(data)
    if size_bytes == len(data):
        return size_bytes
    rest = data[size_bytes:]
    unpacker = _unpacker(len(rest) + 1)
    unpacker.feed(rest)
    end = 0
    try:
        while True:
            unpacker.skip()
            if not rest.endswith(_TRUE, 0, unpacker.tell()):
                return size_bytes + end
            end = int(unpacker.tell())
    except (ValueError, TypeError, msgpack.UnpackException):  # there is no more, or it is damaged
        return size_bytes + end


def last_record(data: bytes) -> list[Any] | None:
    """Return the last of whole records; None if it is hard to find."""
    at = len(data) - 1
    for _ in range(_MOST_LOOKED):
        at = data.rfind(_TRUE, 0, max(at, 0))
        try:
            found = msgpack.unpackb(data[at + 1 :], unicode_errors="replace", timestamp=1, strict_map_key=False)
        except (ValueError, TypeError, msgpack.UnpackException):
            found = None
        if isinstance(found, list) and len(found) > 2:
            return found
        if at < 0:
            break
    return None


def _size_bytes(data: bytes, many: int) -> int:
    """Return the size of so many whole records at the beginning of `data`."""
    unpacker = _unpacker(len(data) + 1)
    unpacker.feed(data)
    for _ in range(many):
        unpacker.skip()
    return int(unpacker.tell())


def _is_start(data: bytes, makes_sense: Check) -> bool:
    """Return whether two records that make sense are at the beginning of `data`."""
    unpacker = _unpacker(len(data) + 1, **_ODD_KEYS)
    unpacker.feed(data)
    try:
        return [makes_sense(record) for record in itertools.islice(unpacker, 2)] == [True, True]
    except (ValueError, TypeError, msgpack.UnpackException):
        return False


def _unpacker(size_bytes: int, **options: Any) -> Any:
    """Make an unpacker: dates become seconds since 1970, as in the manifest, and no size beyond the segment's is
    believed."""
    return msgpack.Unpacker(None, unicode_errors="replace", timestamp=1, max_buffer_size=size_bytes, **options)
