"""Segments of a process as compressed columns: what `rltrace collect --compact` leaves in their place.

A segment is cut behind each code of an eight-byte number. What lies between is mostly the same few texts, so that a
column has only their places in a list; the numbers are mostly times, of which each is near the one before it, or has
been there already as the beginning of the span that ends. What is restored is the segment, byte for byte: so all
readers show what they showed before.

A file of columns has some segments. Its first line says which, and bears its checksum; each segment's own tells whether
it was restored as it was.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rltrace.host import regular_file
from rltrace.limits import LIMITS, Limits
from rltrace.read import gate
from rltrace.record import checksum
from rltrace.record.checksum import Sum

SUFFIX = ".columns"
UNFINISHED = ".unfinished-columns"
"""Of a file that is being written; one that stays is of a process that was killed."""
KIND = "rltrace columns"
FORMAT = 1

_NUMBER = re.compile(rb"(?<=[\xcb\xcf\xd3])(.{8})", re.DOTALL)
"""What follows the code of a decimal, of a whole number and of one with a sign, of 64 bits. That such a byte may mean
something else in a text costs some bytes, and nothing more."""
_DECIMAL = 0xCB
_NUMBER_BYTES = 8
_HEAD = struct.Struct("<5I")
"""How many texts there are, how long they are together, how many cuts, decimals and new times."""


class DamagedError(OSError):
    """Columns that are not as they were written."""


def sum_of(content: bytes) -> Sum:
    """Return size and checksum of a segment; natively if it will be decoded natively, which takes numpy."""
    native = sys.modules.get("rltrace.read.native")
    return checksum.of_bytes(content) if native is None else Sum(len(content), native.crc32(content))


# ---- one segment ------------------------------------------------------------------------------------------------


def pack(content: bytes) -> bytes:
    """Return the columns of a segment."""
    import numpy as np

    parts = _NUMBER.split(content)
    places: dict[bytes, int] = {}
    cuts = np.array([places.setdefault(text, len(places)) for text in parts[::2]], "<u4")
    texts = [*places]
    numbers = np.frombuffer(b"".join(parts[1::2]), ">i8").astype("<i8")
    is_decimal = _are_decimals(texts)[cuts[:-1]]
    times = numbers[~is_decimal]
    _, first, of = np.unique(times, return_index=True, return_inverse=True)
    back = np.arange(len(times)) - first[of]
    new = np.diff(times[back == 0], prepend=np.int64(0))
    columns = [
        np.array([len(text) for text in texts], "<u4"), cuts, back.astype("<u4"), (new << 1) ^ (new >> 63),
        numbers[is_decimal],
    ]  # fmt: skip
    head = _HEAD.pack(len(texts), sum(map(len, texts)), len(cuts), int(is_decimal.sum()), len(new))
    return head + zlib.compress(b"".join([*texts, *map(_planes, columns)]))


def unpack(packed: bytes, size_bytes: int) -> bytes:
    """Return the segment that columns were made of.

    Args:
        packed: Its columns.
        size_bytes: How long it is.

    Raises:
        DamagedError: these are no columns of such a segment.
    """
    import numpy as np

    try:
        many_texts, texts_bytes, many_cuts, many_decimals, many_new = _HEAD.unpack_from(packed)
        many_times = many_cuts - 1 - many_decimals
        wanted = [
            (many_texts, "<u4"),
            (many_cuts, "<u4"),
            (many_times, "<u4"),
            (many_new, "<u8"),
            (many_decimals, "<i8"),
        ]
        columns_bytes = texts_bytes + sum(many * int(code[2]) for many, code in wanted)
        if many_times < 0 or max(texts_bytes + many_texts, _NUMBER_BYTES * (many_cuts - 1)) > size_bytes + 1:
            raise DamagedError
        unpacker = zlib.decompressobj()
        columns = unpacker.decompress(packed[_HEAD.size :], columns_bytes)
        if len(columns) != columns_bytes or unpacker.decompress(unpacker.unconsumed_tail, 1) or not unpacker.eof:
            raise DamagedError
        at, found = texts_bytes, []
        for many, code in wanted:
            found.append(_of_planes(columns, at, many, code))
            at += many * int(code[2])
        lengths, cuts, back, new, decimals = found
        ends = np.cumsum(lengths, dtype=np.int64)
        if (ends[-1] if len(ends) else 0) != texts_bytes:
            raise DamagedError
        texts = [columns[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]
        lasts = lengths[cuts]
        if int(lasts.sum(dtype=np.int64)) + _NUMBER_BYTES * (many_cuts - 1) != size_bytes:
            raise DamagedError
        is_decimal = _are_decimals(texts)[cuts[:-1]]
        numbers = np.empty(many_cuts - 1, ">i8")
        numbers[is_decimal] = decimals
        numbers[~is_decimal] = _times(back, new)
        behind = [text + bytes(_NUMBER_BYTES) for text in texts]
        content = bytearray(b"".join(map(behind.__getitem__, cuts.tolist())))
        del content[size_bytes:]
        holes = np.cumsum(lasts[:-1].astype(np.int64) + _NUMBER_BYTES) - _NUMBER_BYTES
        into = np.frombuffer(content, np.uint8)
        into[holes[:, None] + np.arange(_NUMBER_BYTES)] = numbers.view(np.uint8).reshape(-1, _NUMBER_BYTES)
    except (ValueError, IndexError, OverflowError, struct.error, zlib.error):
        raise DamagedError from None
    return bytes(content)


def _are_decimals(texts: Sequence[bytes]) -> Any:
    import numpy as np

    return np.array([text[-1:] == bytes([_DECIMAL]) for text in texts], np.bool_)


def _times(back: Any, new: Any) -> Any:
    """Return times of which each is new, or was there so many times before."""
    import numpy as np

    is_new = back == 0
    deltas = (new >> np.uint64(1)).astype(np.int64) ^ -(new & np.uint64(1)).astype(np.int64)
    times = np.empty(len(back), np.int64)
    times[is_new] = np.cumsum(deltas)
    earlier = np.arange(len(back)) - back
    if (earlier < 0).any():
        raise DamagedError
    return times[np.where(is_new, np.arange(len(back)), earlier)]


def _planes(column: Any) -> bytes:
    """Return the first bytes of all numbers, then the second ones, and so on: those that hardly differ lie together."""
    import numpy as np

    return np.ascontiguousarray(column.view(np.uint8).reshape(len(column), column.itemsize).T).tobytes()


def _of_planes(content: bytes, at: int, many: int, code: str) -> Any:
    import numpy as np

    size = int(code[2])
    planes = np.frombuffer(content, np.uint8, many * size, at).reshape(size, many)
    return np.ascontiguousarray(planes.T).view(code).reshape(many)


# ---- a file of them ---------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where the columns of a segment are."""

    file: Path
    at: int
    packed_bytes: int
    sum: Sum
    """Of the segment."""
    lacks: Mapping[str, Any]
    """What it does not have of the segment that its process wrote, as a line of `removed.jsonl` says it; empty if that
    is nothing."""


class Packed(NamedTuple):
    """A segment that goes into a file."""

    name: str
    content: bytes
    lacks: Mapping[str, Any] = {}


def made(segments: Sequence[Packed]) -> bytes:
    """Return the content of a file with the columns of some segments."""
    blocks = [pack(segment.content) for segment in segments]
    said, at = [], 0
    for segment, block in zip(segments, blocks, strict=True):
        size_bytes, crc32 = sum_of(segment.content)
        lacks = {"lacks": segment.lacks} if segment.lacks else {}
        place = {"segment": segment.name, "bytes": size_bytes, "crc32": crc32, "at": at, "packed": len(block)}
        said.append({**place, **lacks})
        at += len(block)
    head = checksum.signed(json.dumps({"kind": KIND, "format": FORMAT, "segments": said}))
    return head.encode() + b"\n" + b"".join(blocks)


class Store:
    """The segments of a process that are columns."""

    def __init__(self, folder: Path, limits: Limits = LIMITS) -> None:
        self._folder, self._limits = folder, limits
        self._places: dict[str, Place] = {}
        self.damaged: list[Path] = []
        """Files whose first line cannot be read, so that nobody knows which segments they had."""

    def look(self) -> dict[str, Place]:
        """Return where each segment is, by its name, as it is now: of two forms, the one that lacks less."""
        self._places, self.damaged = {}, []
        for file in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                for name, place in _places(file, self._limits):
                    known = self._places.get(name)
                    if known is None or known.sum.size_bytes < place.sum.size_bytes:
                        self._places[name] = place
            except FileNotFoundError:
                continue
            except (OSError, ValueError, RecursionError):
                self.damaged.append(file)
        return self._places

    def has(self, name: str) -> bool:
        """Return whether a segment was among them at the last look."""
        return name in self._places

    def read(self, name: str) -> bytes:
        """Return a segment.

        Raises:
            FileNotFoundError: it is not there.
            DamagedError: its columns are damaged.
        """
        place = self._places.get(name) or self.look().get(name)
        if place is None:  # nobody has replaced it by columns
            raise FileNotFoundError(str(self._folder / name))
        size_bytes = place.sum.size_bytes
        if size_bytes > self._limits.segment_bytes:
            raise DamagedError(0, "larger than any segment", str(place.file))
        packed = regular_file.part(place.file, place.at, place.packed_bytes, self._limits)
        content = unpack(packed, size_bytes)
        if sum_of(content) != place.sum:
            raise DamagedError(0, "not as it was written", str(place.file))
        return content


def _places(file: Path, limits: Limits) -> Iterator[tuple[str, Place]]:
    """Yield where the segments are in a file.

    Raises:
        DamagedError: its first line is damaged, or of a newer format.
        OSError: it cannot be read.
    """
    line = regular_file.first_line(file, limits)
    if not checksum.is_intact(line):
        raise DamagedError(0, "its first line is damaged", str(file))
    said = gate.COLUMNS(json.loads(line))
    if said["kind"] != KIND or said["format"] > FORMAT:
        raise DamagedError(0, "of a format that this rltrace does not read", str(file))
    for one in said["segments"]:
        total = Sum(one["bytes"], one["crc32"])
        yield one["segment"], Place(file, len(line) + one["at"], one["packed"], total, one.get("lacks", {}))


def write(folder: Path, segments: Sequence[Packed], stem: str | None = None) -> Path:
    """Add a file to a folder, whole or not at all, and return it.

    Args:
        folder: The process's.
        segments: What the file has.
        stem: What its name begins with; by default as that of the first segment does.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = folder / f"{os.getpid()}{UNFINISHED}"
    try:
        with open(unfinished, "wb") as file:
            file.write(made(segments))
            file.flush()
            os.fsync(file.fileno())
        for number in range(1, 1 << 30):
            again = "" if number == 1 else f"-{number}"
            path = folder / f"{segments[0].name.removesuffix('.seg') if stem is None else stem}{again}{SUFFIX}"
            try:
                os.link(unfinished, path)
            except FileExistsError:  # it has other segments, or is damaged: nothing replaces it
                continue
            _sync(folder)
            return path
    finally:
        unfinished.unlink(missing_ok=True)
    raise AssertionError("there is always another name")


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk before anything is removed that they stand for."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
