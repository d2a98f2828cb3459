"""Feeds mutated segments to the native decoder and the checksum, mutated arguments to the encoder, intervals in any
order to their arithmetic, and keys to their grouping, built with AddressSanitizer and UndefinedBehaviorSanitizer.

Each segment lies in memory of exactly its size, so that a read beyond its end is seen. The first wrong access ends the
process with a report. What the decoder returns is compared with the Python reader in `test_columns.py`.
"""

from __future__ import annotations

import ctypes
import random
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgpack
import numpy as np
import sanitized
from shipped import VERL

from rltrace.host.native_library import DECODER
from rltrace.read import native
from rltrace.read.columns import ARGUMENTS, NUMBERS
from rltrace.read.native import groups, intervals, packets
from rltrace.read.recording import Recording

PIECE_BYTES = 2000
TYPES = [native.Type(-1, "typed", ["bytes", "bytes", "error"], True), native.Type(-2, "other", [], False)]
SPECIAL = [*range(0xC0, 0xE0), 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0x7F, 0x00, 0xFF]
"""First bytes of values that say a size or a kind."""


def _seeds() -> list[bytes]:
    """Pieces of real segments, and records of the kinds that these lack."""
    processes = Recording.open(VERL).processes
    contents = [segment.content for process in processes for segment in process.segments()]
    rare = [
        [-1, 5, 6, 0, 1, None, True], [-1, "x", [1, {"a": 2}], 0, 2, {"error": "E"}, True], [1, 9, {"bytes": 1}, True],
        [-2, 0, 3, None, True], ["k", 0, 4, "out", True], ["k", 0, 4, "in", True], ["c", 5, 2**64 - 1, True],
        ["c", 5, float("nan"), True], [0, "step", 7, 6, {"step": -(2**63), "kv_usage": 1.5, "module": []}, True],
        ["a", 1, 7, {"request_id": b"x" * 300, "method": "y" * 70000}, True], [2, 9, None, True],
        [99, 100, {"x": 1}, True],
    ]  # fmt: skip
    pieces = [piece for content in contents for piece in islice(_pieces(content), 8)]
    return [*pieces, *(b"".join(map(msgpack.packb, chosen)) for chosen in (rare, rare[::-1], rare * 3))]


def _pieces(content: bytes) -> Iterator[bytes]:
    """Yield whole records, some at a time."""
    unpacker = msgpack.Unpacker(None, max_buffer_size=len(content) + 1)
    unpacker.feed(content)
    begin = 0
    for record in unpacker:
        if record == 0 or unpacker.tell() - begin > PIECE_BYTES:
            yield content[begin : unpacker.tell()]
            begin = unpacker.tell()
        if record == 0:
            return


def _mutated(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice([0, 1, 1, 2, 5, 30])):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(5):
            case 0 if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            case 1 if at < len(changed):
                changed[at] = chance.choice(SPECIAL)
            case 2:
                changed[at : at + chance.randrange(9)] = chance.randbytes(chance.randrange(9))
            case 3:
                changed[at : at + 4] = chance.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0"])
            case _:
                other = chance.randrange(len(changed) + 1)
                changed[at:at] = changed[other : other + chance.randrange(80)]
    return bytes(changed[: chance.randrange(len(changed) + 1)] if chance.random() < 0.2 else changed)


def _feed(path: Path, segments: int, seed: int) -> Counter[str]:
    library = native.load(path)
    assert library is not None, path
    chance, seeds, said = random.Random(seed), _seeds(), Counter[str]()
    while said["segments"] < segments:
        decoder = native.Decoder(library, NUMBERS | ARGUMENTS, TYPES)
        try:
            for _ in range(chance.randrange(1, 5)):
                said["segments"] += 1
                content = _mutated(chance.choice(seeds), chance)
                exact = (ctypes.c_char * len(content)).from_buffer_copy(content)
                _sum_up(library, content, exact)
                _look_for_end(library, content, exact)
                _encode(library, chance, said)
                _compute(library, chance, said)
                _group(library, chance, said)
                if chance.random() < 0.3:
                    decoder.decode_more(exact, 0, 1 << 59, 7)  # type: ignore[arg-type]
                    decoder.show_open()
                else:
                    decoder.decode(exact, 0, 1 << 59, may_grow=chance.random() < 0.3)  # type: ignore[arg-type]
                said["sound"] += 1
                if chance.random() < 0.3:
                    said["rows"] += sum(map(len, decoder.take()[0].values()))
            decoder.finish()
            columns, arguments = decoder.take()
            said["rows"] += len(columns["name"]) + sum(len(column) for column in arguments.values())
            decoder.threads()
        except native.UnsoundError:
            said["given up"] += 1
    return said


def _sum_up(library: ctypes.CDLL, content: bytes, exact: ctypes.Array[ctypes.c_char]) -> None:
    """Compute the checksum of a segment, where this processor can."""
    found = ctypes.c_uint32()
    if library.rltrace_crc32(exact, len(content), ctypes.byref(found)):
        assert found.value == zlib.crc32(content)


def _look_for_end(library: ctypes.CDLL, content: bytes, exact: ctypes.Array[ctypes.c_char]) -> None:
    """Find how much of a segment is whole records: they end in `true`."""
    size_bytes = library.rltrace_whole_bytes(exact, len(content))
    assert size_bytes <= len(content) and content[:size_bytes].endswith(b"\xc3") == bool(size_bytes)


ARGS = (
    {}, {"bytes": 1}, {"module": "model.layers.7", "bytes": 2**40}, {"a": {"b": [1, 2.5, None, True]}, "a.b..c": -1},
    {"module": "grüße", "x": [[], {}, [{"y": {"z": "w"}}]]}, {"k" * 300: "v" * 70}, {"phase": True, "error": "E" * 200},
    [5, "x", "y", {"module": "m"}], [1, 2, 3, None], {"big": 2**64 - 1, "small": -(2**63), "bin": b"bytes"},
)  # fmt: skip
"""Arguments as they are written: maps, and what typed spans have."""


def _encode(library: ctypes.CDLL, chance: random.Random, said: Counter[str]) -> None:
    """Encode rows of which some have arguments that were changed, or lie beyond the end of all."""
    encoder = packets.Packets(library, b"\x50\x02", [type_.fields for type_ in TYPES], 8)
    for drops_phase in (False, True):
        encoder.beginning(b"\x48\x01\x58\x05\x50\x01", 2, drops_phase=drops_phase)
    many = chance.randrange(1, 30)
    encoded = [msgpack.packb(chance.choice(ARGS)) for _ in range(2 * many)]
    sizes = np.array([len(one) for one in encoded], np.int64)
    content = bytearray(b"".join(encoded))
    for _ in range(chance.choice([0, 1, 3, 20])):
        content[chance.randrange(len(content))] = chance.choice([chance.randrange(256), *SPECIAL])
    at = (np.cumsum(sizes) - sizes)[::2]
    begin_bytes, late_bytes = sizes[::2].astype(np.int32), sizes[1::2].astype(np.int32)
    for column in (at, begin_bytes, late_bytes):
        if chance.random() < 0.1:
            column[chance.randrange(many)] += chance.randrange(-400, 400)
    exact = np.frombuffer(bytes(content), np.uint8).copy()
    starts = np.array([chance.randrange(100) for _ in range(many)], np.int64)
    ends = starts + np.array([chance.randrange(-1, 40) for _ in range(many)], np.int64)
    types = np.array([chance.choice([-1, 0, 0, 1, 2]) for _ in range(many)], np.int32)
    blobs = packets.Blobs(at, begin_bytes, late_bytes, types, exact)
    for row in range(0, many, 5):
        blobs.give_anew(row, bytes(content[: chance.randrange(len(content) + 1)]))
    arrows = packets.Arrows(np.array([many // 2]), np.array([3]), np.array([5]), b"12345")
    beginnings = np.array([chance.randrange(2) if chance.random() < 0.99 else 2 for _ in range(many)], np.int32)
    rows = packets.Rows(packets.Spans(beginnings, starts, ends, blobs, arrows), 7)
    row = 0
    while row < many:
        try:
            made, row, is_odd = encoder.encode(rows, row, 1 << 20)
            said["bytes"] += len(made)
            said["odd"] += is_odd
        except ValueError:
            said["refused"] += 1
            is_odd = True
        row += is_odd
    for key in ("bytes", "module"):
        try:
            found = encoder.texts(rows, key, np.arange(many))
            said["texts"] += len({encoder.shown(place) for place in found.tolist() if place >= 0})
        except ValueError:
            said["refused"] += 1
    numbers, _ = encoder.group(0, [starts, ends, types.astype(np.int64)])
    said["groups"] += int(numbers.max()) + 1
    for is_flat in (False, True):
        said["rows"] += int(encoder.place(int(is_flat), starts, ends, is_flat=is_flat).max()) + 1


def _compute(library: ctypes.CDLL, chance: random.Random, said: Counter[str]) -> None:
    """Join, cut and add up intervals, of which some are empty or end before they begin, and windows that overlap."""
    rows, windows = (_intervals(chance) for _ in range(2))
    said["joined"] += len(intervals.union(library, rows))
    # Each piece is asked for; the room that is first made for them holds those of disjoint rows only.
    said["pieces"] += len(intervals.cut(library, rows, windows)[0])
    many_groups, kinds = chance.randrange(1, 5), chance.randrange(1, 5)
    group_of = np.array([chance.randrange(-1, many_groups + 1) for _ in rows], np.int64)
    kind_of = np.array([chance.randrange(-1, kinds + 1) for _ in windows], np.int64)
    sums = intervals.added_up(library, rows, group_of, windows, kind_of, (many_groups, kinds))
    said["added up"] += int((sums != 0).sum())


def _group(library: ctypes.CDLL, chance: random.Random, said: Counter[str]) -> None:
    """Group keys, of which some are not in the range that is said."""
    most = chance.choice([0, 3, 70])
    keys = np.array([chance.randrange(most + 1) for _ in range(chance.randrange(1, 30))])
    if chance.random() < 0.2:
        keys[chance.randrange(len(keys))] = chance.choice([-1, most + 1, -(1 << 31), (1 << 31) - 1])
    try:
        found = groups.groups(library, keys, most)
    except ValueError:
        said["keys out of range"] += 1
    else:
        assert sorted(place for places in found for place in places) == [*range(len(keys))]


def _intervals(chance: random.Random) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    reach_ns = chance.choice([5, 100, 1 << 59])
    rows = [sorted(chance.randrange(reach_ns) for _ in range(2)) for _ in range(chance.randrange(30))]
    if chance.random() < 0.7:
        rows.sort()
    for row in rows:
        if chance.random() < 0.05:
            row.reverse()
    return np.array(rows, np.int64).reshape(-1, 2)


if __name__ == "__main__":
    sys.exit(sanitized.main(DECODER, __doc__, "segments", _feed))
