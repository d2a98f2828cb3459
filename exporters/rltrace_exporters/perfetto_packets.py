"""Encodes rows of columns as packets: natively where the library is there, and otherwise in Python, byte by byte alike.

A packet that begins a span is known but for its time, its arguments and its arrows once it is known on which row of the
timeline the span is, and what it is called there; that is its *beginning*. A caller numbers rows by what they have in
some columns, so that it looks at each kind of span once, places what may overlap, and gives each row its beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgpack
import numpy as np
from numpy.typing import NDArray

from rltrace.events import Args
from rltrace.read import native
from rltrace.read.columns import OPEN, Columns, Encoded
from rltrace.read.gate import plain
from rltrace.read.native.packets import ODD, Arrows, Blobs, Packets, Rows, Spans
from rltrace.read.recording import Process
from rltrace_exporters import rows as timeline
from rltrace_exporters.protobuf import PAIRS, SHORT, SMALL, data, double, integer, rest_of_nine, text, varint
from rltrace_exporters.rows import FlatRow, NestedRow

BLOCK_BYTES = 1 << 19
"""About so many bytes of packets are encoded, and compressed, at a time."""

EVENT_NAMES, ARG_NAMES = 2, 3
CLEARED, NEEDS_NAMES = 1, 2
TYPE_BEGIN, TYPE_END, TYPE_INSTANT, TYPE_COUNTER = (integer(9, kind) for kind in (1, 2, 3, 4))

BARE_NAME_NUMBER = 1
"""The number of the one name of an argument that beginnings have; those of arguments of rows follow."""

PHASE = "phase"

Arrowed = Mapping[int, tuple[bytes, bytes]]
"""By row, the encoded arrows that leave it and that arrive there."""


class Chosen(NamedTuple):
    """The rows of some columns from one on."""

    columns: Columns
    first: int
    blobs: Blobs | None = None
    """Their arguments, as the native encoder reads them."""

    def __len__(self) -> int:
        return len(self.columns) - self.first

    def args(self, row: int) -> Args:
        """Return the arguments of one of the rows."""
        return self.columns.args(self.first + row)

    def all_args(self, rows: NDArray[np.int64]) -> Iterator[Args]:
        """Yield the arguments of some of the rows."""
        return self.columns.all_args(self.first + rows)


class Encoder(Protocol):
    """Encodes the packets of one process."""

    @property
    def names(self) -> int:
        """How many names of arguments, and bytes of arguments, are kept."""

    def restart(self) -> None:
        """Forget beginnings, names of arguments, and the second kind of groups."""

    def beginning(self, event: bytes, row_bytes: int, *, drops_phase: bool) -> None:
        """Add a beginning; the next one has the next number.

        Args:
            event: Its TrackEvent: the type, the row, the name, what else is alike.
            row_bytes: Bytes of the row in it.
            drops_phase: The argument that says that it is a phase is not shown.
        """

    def group(self, kind: int, columns: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Number rows by what they have in some columns, and return for each new number the first row that has it."""

    def place(
        self, place: int, starts: NDArray[np.int64], ends: NDArray[np.int64], *, is_flat: bool
    ) -> NDArray[np.int32]:
        """Put spans onto the rows of a place, and return the index of each one's; a new place has the next number."""

    def chosen(self, columns: Columns, first: int) -> Chosen:
        """Return the rows from one on, ready to be encoded."""

    def shown(self, chosen: Chosen, key: str, rows: NDArray[np.int64]) -> tuple[NDArray[np.int32], Sequence[str]]:
        """Return the texts of an argument of some rows, as places in a sequence; -1: there is none, or it is None."""

    def encode(self, chosen: Chosen, beginnings: NDArray[np.int32], offset_ns: int, arrows: Arrowed) -> Iterator[bytes]:
        """Yield the packets of rows."""


def encoder(process: Process, sequence: bytes) -> Encoder:
    """Return the encoder of one process.

    Args:
        process: What it has declared is known.
        sequence: The fields of each packet that say to which sequence it belongs, and that it needs names.
    """
    library = native.library()
    if library is None:
        return PythonPackets(sequence)
    return NativePackets(
        Packets(library, sequence, [type_.fields for type_ in process.types.values()], timeline.REMEMBERED)
    )


# ---- natively -----------------------------------------------------------------------------------------------------


class NativePackets:
    """By the library; what only Python knows how to read is given anew."""

    def __init__(self, packets: Packets) -> None:
        self._packets = packets
        self.restart = packets.restart
        self.beginning = packets.beginning
        self.group = packets.group
        self.place = packets.place
        self._shown = _Shown(packets)

    @property
    def names(self) -> int:
        return self._packets.names

    def chosen(self, columns: Columns, first: int) -> Chosen:
        return Chosen(columns, first, _blobs(columns, first))

    def shown(self, chosen: Chosen, key: str, rows: NDArray[np.int64]) -> tuple[NDArray[np.int32], Sequence[str]]:
        found = self._packets.texts(Rows(_spans(chosen), 0), key, rows)
        for place in np.flatnonzero(found == ODD).tolist():
            value = chosen.args(int(rows[place])).get(key)
            found[place] = -1 if value is None else self._shown.odd_place(str(value))
        return found, self._shown

    def encode(self, chosen: Chosen, beginnings: NDArray[np.int32], offset_ns: int, arrows: Arrowed) -> Iterator[bytes]:
        spans = _spans(chosen)._replace(beginnings=beginnings, arrows=_arrows(arrows))
        rows, row = Rows(spans, offset_ns), 0
        while row < len(beginnings):
            packets, row, is_odd = self._packets.encode(rows, row, BLOCK_BYTES)
            if is_odd:
                spans.blobs.give_anew(row, _blob(chosen.args(row)))
            yield packets


class _Shown(Sequence[str]):
    """Texts by their places: those that the library knows, and behind a large number those that it does not."""

    _ODD = 1 << 30

    def __init__(self, packets: Packets) -> None:
        self._packets = packets
        self._odd: list[str] = []
        self._places: dict[str, int] = {}

    def odd_place(self, shown: str) -> int:
        found = self._places.setdefault(shown, self._ODD + len(self._odd))
        if found == self._ODD + len(self._odd):
            self._odd.append(shown)
        return found

    def __getitem__(self, place: Any) -> Any:
        return self._odd[place - self._ODD] if place >= self._ODD else self._packets.shown(place)

    def __len__(self) -> int:
        return self._ODD + len(self._odd)


_NO_ROWS = np.empty(0, np.int64)
_NO_ARROWS = Arrows(_NO_ROWS, _NO_ROWS, _NO_ROWS, b"")


def _spans(chosen: Chosen) -> Spans:
    columns, first, blobs = chosen
    assert blobs is not None
    nothing = np.zeros(len(chosen), np.int32)
    return Spans(nothing, columns.start_ns[first:], columns.end_ns[first:], blobs, _NO_ARROWS)


def _arrows(arrows: Arrowed) -> Arrows:
    if not arrows:
        return _NO_ARROWS
    in_order = sorted(arrows.items())
    sizes = [len(piece) for _, pieces in in_order for piece in pieces]
    ends = np.cumsum(sizes, dtype=np.int64)
    encoded = b"".join(piece for _, pieces in in_order for piece in pieces)
    return Arrows(np.array([row for row, _ in in_order], np.int64), ends[::2], ends[1::2], encoded)


def _blobs(columns: Columns, first: int) -> Blobs:
    args = columns.args
    if isinstance(args, Encoded):
        raw = args.raw
        at, begin_bytes, late_bytes, types = (
            raw[name][first:] for name in ("args_at", "begin_bytes", "late_bytes", "type")
        )
        found = Blobs(at, begin_bytes, late_bytes, types, raw["blobs"])
        anew = [row for row in args.decoded if row >= first]
    else:
        nothing = np.zeros(len(columns) - first, np.int32)
        found = Blobs(nothing.astype(np.int64), nothing, nothing, nothing, np.empty(0, np.uint8))
        anew = [*range(first, len(columns))]
    for row in anew:
        found.give_anew(row - first, _blob(args(row)))
    return found


_pack = msgpack.Packer(unicode_errors="replace", use_bin_type=True).pack


def _blob(args: Args) -> bytes:
    """Return arguments as the library knows them."""
    if not args:
        return b""
    encoded: bytes = _pack({str(key): _packable(plain(value)) for key, value in args.items()})
    return encoded


def _packable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _packable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_packable(item) for item in value]
    is_beyond = isinstance(value, int) and not -(1 << 63) <= value < 1 << 64
    return str(value) if is_beyond else value


# ---- in Python ----------------------------------------------------------------------------------------------------


class _Beginning(NamedTuple):
    """The bytes of a packet that begins a span of one name on one row."""

    event: bytes
    row: bytes
    drops_phase: bool


class PythonPackets:
    """The same bytes, more slowly."""

    def __init__(self, sequence: bytes) -> None:
        self._sequence = sequence
        self._beginnings: list[_Beginning] = []
        self._arguments = _Arguments(sequence)
        self._groups: tuple[dict[tuple[int, ...], int], dict[tuple[int, ...], int]] = {}, {}
        self._places: list[timeline.Rows] = []
        self._shown: dict[str, int] = {}
        self._texts: list[str] = []

    @property
    def names(self) -> int:
        return self._arguments.kept

    def restart(self) -> None:
        self._beginnings.clear()
        self._groups[1].clear()
        self._arguments.forget()

    def beginning(self, event: bytes, row_bytes: int, *, drops_phase: bool) -> None:
        self._beginnings.append(_Beginning(event, event[2 : 2 + row_bytes], drops_phase))

    def group(self, kind: int, columns: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        groups, first_rows = self._groups[kind], []
        numbers = np.empty(len(columns[0]), np.int32)
        for row, values in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            known = len(groups)
            numbers[row] = groups.setdefault(values, known)
            if len(groups) > known:
                first_rows.append(row)
        return numbers, np.array(first_rows, np.int64)

    def place(
        self, place: int, starts: NDArray[np.int64], ends: NDArray[np.int64], *, is_flat: bool
    ) -> NDArray[np.int32]:
        if place == len(self._places):
            self._places.append(timeline.Rows(FlatRow if is_flat else NestedRow))
        rows = self._places[place]
        return np.array([rows.place(*span) for span in zip(starts.tolist(), ends.tolist(), strict=True)], np.int32)

    def chosen(self, columns: Columns, first: int) -> Chosen:
        return Chosen(columns, first)

    def shown(self, chosen: Chosen, key: str, rows: NDArray[np.int64]) -> tuple[NDArray[np.int32], Sequence[str]]:
        values = [args.get(key) for args in chosen.all_args(rows)]
        return np.array([-1 if value is None else self._place(str(value)) for value in values], np.int32), self._texts

    def _place(self, shown: str) -> int:
        found = self._shown.setdefault(shown, len(self._texts))
        if found == len(self._texts):
            self._texts.append(shown)
        return found

    def encode(self, chosen: Chosen, beginnings: NDArray[np.int32], offset_ns: int, arrows: Arrowed) -> Iterator[bytes]:
        columns, first, _ = chosen
        starts, ends = columns.start_ns[first:].tolist(), columns.end_ns[first:].tolist()
        pieces: list[bytes] = []
        size = 0
        all_args = chosen.all_args(np.arange(len(chosen)))
        rows = zip(beginnings.tolist(), starts, ends, all_args, strict=True)
        for row, (number, start_ns, end_ns, args) in enumerate(rows):
            event, of_row, drops_phase = self._beginnings[number]
            leaving, arriving = arrows.get(row, (b"", b""))
            drops = drops_phase and PHASE in args
            kept = {key: value for key, value in args.items() if key != PHASE} if drops else args
            said, annotations = self._arguments.encode(kept)
            pieces += said
            event += leaving + annotations
            if end_ns == OPEN:
                pieces.append(self._packet(start_ns + offset_ns, event + arriving))
            elif end_ns == start_ns:
                pieces.append(self._packet(start_ns + offset_ns, TYPE_INSTANT + event[2:] + arriving))
            else:
                pieces.append(self._packet(start_ns + offset_ns, event))
                pieces.append(self._packet(end_ns + offset_ns, TYPE_END + of_row + arriving))
            size += len(event) + len(arriving)
            if size > BLOCK_BYTES:
                yield b"".join(pieces)
                pieces.clear()
                size = 0
        yield b"".join(pieces)

    def _packet(self, time: int, event: bytes) -> bytes:
        return packet(time, self._sequence, event)


def packet(time: int, sequence: bytes, event: bytes) -> bytes:
    """Return a packet with a time and a TrackEvent.

    Args:
        time: In nanoseconds since 1970.
        sequence: The fields that say to which sequence it belongs.
        event: The TrackEvent.
    """
    tail = sequence + data(11, event)
    times = PAIRS[time & 0x3FFF] + PAIRS[time >> 14 & 0x3FFF] + rest_of_nine(time >> 28)
    return b"\x0a" + varint(10 + len(tail)) + b"\x40" + times + tail


class _Arguments:
    """Span arguments as debug annotations, which the UI shows under a selected span."""

    def __init__(self, sequence: bytes) -> None:
        self._sequence = sequence
        self._numbers: dict[str, bytes] = {}
        self._said: list[bytes] = []
        """Packets that say the numbers of new names."""
        self._integers: dict[str, list[bytes]] = {}
        """By name, the bytes before an integer of so many varint bytes."""
        self._strings: dict[tuple[str, str], bytes] = {}

    @property
    def kept(self) -> int:
        return len(self._numbers) + len(self._strings)

    def forget(self) -> None:
        """Forget the numbers of names, which start again."""
        self._numbers.clear()
        self._integers.clear()
        self._strings.clear()

    def encode(self, args: Args) -> tuple[list[bytes], bytes]:
        """Return packets that say the numbers of new names, and the annotations of one span."""
        self._said = []
        pieces = []
        for key, value in args.items():
            if value.__class__ is str:
                pieces.append(self._strings.get((key, value)) or self._string(key, value))
            elif value.__class__ is int and 0 <= value < 1 << 63:
                number = SHORT[value] if value < SMALL else varint(value)
                heads = self._integers.get(key) or self._integer(key)
                pieces += (heads[len(number)], number)
            else:
                pieces.append(self._annotation(key, _annotation_value(plain(value))))
        return self._said, b"".join(pieces)

    def _number(self, name: str) -> bytes:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = varint(len(self._numbers) + BARE_NAME_NUMBER + 1)
            self._said.append(name_packet(self._sequence, ARG_NAMES, number, name))
        return number

    def _annotation(self, key: str, value: bytes) -> bytes:
        name, *inner = str(key).split(".", _MOST_DOTS)
        return data(4, b"\x08" + self._number(name) + _nested(inner, value))

    def _integer(self, key: str) -> list[bytes]:
        heads = self._integers[key] = []
        for size in range(10):  # the lengths in an annotation depend on that of its value, which is cut off here
            whole = self._annotation(key, b"\x20" + bytes(size))
            heads.append(whole[: len(whole) - size])
        return heads

    def _string(self, key: str, value: str) -> bytes:
        annotation = self._annotation(key, text(6, value))
        if len(value) < 100:
            self._strings[key, value] = annotation
        return annotation


def name_packet(sequence: bytes, kind: int, number: bytes, name: str) -> bytes:
    """Return a packet that says the number of a name; `kind` is its field in InternedData."""
    return data(1, sequence + data(12, data(kind, b"\x08" + number + text(2, name))))


def bare_name(value: str) -> bytes:
    """Return the annotation that says what a span is called whose slice is called otherwise."""
    return data(4, integer(1, BARE_NAME_NUMBER) + text(6, value))


_MOST_DOTS = 32
"""Dots in a key that make names nested: the importer writes `_` for a dot in a name, and joins the names of nested ones
by dots."""


def _nested(names: Iterable[str], value: bytes) -> bytes:
    """Return a value below the names of entries, the outermost first."""
    for name in reversed([*names]):
        value = data(11, text(10, name) + value)
    return value


def _annotation_value(value: Any) -> bytes:
    """Return a DebugAnnotation without its name."""
    if isinstance(value, bool):
        return integer(2, value)
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 64:
        return integer(4 if value < 1 << 63 else 3, value)
    if isinstance(value, float):
        return double(5, value)
    if isinstance(value, dict) and value:
        return b"".join(_nested(key.split(".", _MOST_DOTS), _annotation_value(inner)) for key, inner in value.items())
    if isinstance(value, list) and value:
        return b"".join(data(12, _annotation_value(inner)) for inner in value)
    return text(6, str(value))
