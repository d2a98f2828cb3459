"""The native encoder of Perfetto's packets: `packets.c`, as the exporter calls it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.read import native

ODD = -2
"""Of a text: only Python knows it."""

_I64, _I32, _POINTER = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p


class Blobs:
    """The encoded arguments of rows.

    Args:
        at: Where those of each row begin in `content`.
        begin_bytes: Bytes of what a row has of its beginning.
        late_bytes: Bytes of what it got later, which are behind these.
        types: The typed span that a row is, as its place among all that its process has declared; -1 if it is none.
        content: As it was written.
    """

    def __init__(
        self,
        at: NDArray[np.int64],
        begin_bytes: NDArray[np.int32],
        late_bytes: NDArray[np.int32],
        types: NDArray[np.int32],
        content: NDArray[np.uint8],
    ) -> None:
        self.at, self.begin_bytes = at.astype(np.int64), begin_bytes.astype(np.int32)
        self.late_bytes, self.types = np.ascontiguousarray(late_bytes), np.ascontiguousarray(types)
        self.content = content
        self.anew = bytearray()
        """Arguments that were given anew: no key is there twice, and all texts are UTF-8."""

    def give_anew(self, row: int, args: bytes) -> None:
        """Give the arguments of a row anew."""
        self.at[row], self.begin_bytes[row] = len(self.anew), -1 - len(args)
        self.anew += args


class Arrows(NamedTuple):
    """What rows have of arrows, encoded: first what leaves a row, and behind it what arrives there."""

    rows: NDArray[np.int64]
    """In order."""
    out_ends: NDArray[np.int64]
    """Where in `bytes` what leaves each row ends."""
    in_ends: NDArray[np.int64]
    bytes: bytes


class Spans(NamedTuple):
    """Rows to encode."""

    beginnings: NDArray[np.int32]
    """The number of each row's beginning."""
    starts_ns: NDArray[np.int64]
    ends_ns: NDArray[np.int64]
    blobs: Blobs
    arrows: Arrows


class _Rows(ctypes.Structure):
    _fields_ = (
        ("many", _I64), ("beginnings", _POINTER), ("starts_ns", _POINTER), ("ends_ns", _POINTER), ("offset_ns", _I64),
        ("args_at", _POINTER), ("begin_bytes", _POINTER), ("late_bytes", _POINTER), ("types", _POINTER),
        ("blobs", _POINTER), ("blobs_size", _I64), ("anew", _POINTER), ("anew_size", _I64), ("many_arrows", _I64),
        ("arrow_rows", _POINTER), ("out_ends", _POINTER), ("in_ends", _POINTER), ("arrows", ctypes.c_char_p),
    )  # fmt: skip


class Rows:
    """Rows as the library reads them."""

    def __init__(self, spans: Spans, offset_ns: int) -> None:
        blobs, arrows = spans.blobs, spans.arrows
        self._kept: list[NDArray[Any]] = []
        self.blobs = blobs
        self.raw = _Rows(
            len(spans.beginnings),
            self._at(spans.beginnings, np.int32), self._at(spans.starts_ns, np.int64),
            self._at(spans.ends_ns, np.int64), offset_ns,
            self._at(blobs.at, np.int64), self._at(blobs.begin_bytes, np.int32), self._at(blobs.late_bytes, np.int32),
            self._at(blobs.types, np.int32), self._at(blobs.content, np.uint8), len(blobs.content), None, 0,
            len(arrows.rows), self._at(arrows.rows, np.int64), self._at(arrows.out_ends, np.int64),
            self._at(arrows.in_ends, np.int64), arrows.bytes,
        )  # fmt: skip

    def _at(self, array: NDArray[Any], dtype: type[np.generic]) -> int:
        self._kept.append(np.ascontiguousarray(array, dtype))
        return self._kept[-1].ctypes.data

    def call(self, function: Any, packets: int | None, *arguments: Any) -> int:
        """Call a function of the library with these rows."""
        size = len(self.blobs.anew)
        anew = (ctypes.c_char * size).from_buffer(self.blobs.anew)
        self.raw.anew, self.raw.anew_size = ctypes.addressof(anew), size
        return int(function(packets, ctypes.byref(self.raw), *arguments))


class Packets:
    """Encodes the packets of one process."""

    def __init__(
        self, library: ctypes.CDLL, sequence: bytes, types: Sequence[Sequence[str]], remembered_spans: int
    ) -> None:
        """Prepare for the first row.

        Args:
            library: As `native.library` returns it.
            sequence: The fields of a packet that say to which sequence it belongs.
            types: Names of the fields of each typed span that the process has declared.
            remembered_spans: How many a row of the timeline remembers.
        """
        self._library = _declared(library)
        self._packets: int | None = self._library.rltrace_packets_new(sequence, len(sequence), remembered_spans)
        if not self._packets:
            raise MemoryError
        for fields in types:
            encoded = [field.encode("utf-8", "replace") for field in fields]
            ends = np.cumsum([len(field) for field in encoded], dtype=np.int64)
            letters = b"".join(encoded)
            _check(self._library.rltrace_packets_type(self._packets, len(encoded), letters, ends.ctypes.data))
        self._shown: list[str] = []

    def __del__(self) -> None:
        if getattr(self, "_packets", None):
            self._library.rltrace_packets_delete(self._packets)
            self._packets = None

    def restart(self) -> None:
        """Forget beginnings, names of arguments, and the second kind of groups."""
        self._library.rltrace_packets_restart(self._packets)

    @property
    def names(self) -> int:
        """How many names of arguments are known."""
        return int(self._library.rltrace_packets_names(self._packets))

    def beginning(self, event: bytes, row_bytes: int, *, drops_phase: bool) -> None:
        """Say how spans of one name on one row begin; the next one has the next number."""
        _check(self._library.rltrace_packets_beginning(self._packets, event, len(event), row_bytes, drops_phase))

    def encode(self, rows: Rows, row: int, enough_bytes: int) -> tuple[bytes, int, bool]:
        """Return packets of rows from one on, the row to go on with, and whether its arguments must be given anew."""
        at, data = _I64(row), _POINTER()
        state = rows.call(
            self._library.rltrace_packets_encode, self._packets, ctypes.byref(at), ctypes.c_uint64(enough_bytes)
        )
        if state != ODD:
            _check(state)
        size = self._library.rltrace_packets_take(self._packets, ctypes.byref(data))
        return ctypes.string_at(data.value or 0, size) if size else b"", at.value, state == ODD

    def group(self, kind: int, columns: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Number rows by what they have in some columns, and return for each new number the first row that has it.

        Args:
            kind: 0 for groups that are kept, 1 for those that `restart` forgets; each always with as many columns.
            columns: Columns of the rows.
        """
        kept = [np.ascontiguousarray(column, np.int64) for column in columns]
        many = len(kept[0])
        values = (_POINTER * len(kept))(*(column.ctypes.data for column in kept))
        numbers, first_rows = np.empty(many, np.int32), np.empty(many, np.int64)
        before = self._library.rltrace_packets_group(self._packets, kind, len(kept), values, 0, None, None)
        now = self._library.rltrace_packets_group(
            self._packets, kind, len(kept), values, many, numbers.ctypes.data, first_rows.ctypes.data
        )
        if now < 0:
            raise MemoryError
        return numbers, first_rows[: now - before]

    def place(
        self, place: int, starts: NDArray[np.int64], ends: NDArray[np.int64], *, is_flat: bool
    ) -> NDArray[np.int32]:
        """Put spans onto the rows of a place, as `Rows` of the exporters does, and return the index of each one's."""
        starts, ends = np.ascontiguousarray(starts), np.ascontiguousarray(ends)
        found = np.empty(len(starts), np.int32)
        _check(
            self._library.rltrace_packets_place(
                self._packets, place, is_flat, starts.ctypes.data, ends.ctypes.data, len(starts), found.ctypes.data
            )
        )
        return found

    def texts(self, rows: Rows, key: str, chosen: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the places in `shown` of the texts that some rows have as an argument; -1: there is none, -2: ODD."""
        encoded, chosen = key.encode(), np.ascontiguousarray(chosen, np.int64)
        found = np.empty(len(chosen), np.int32)
        state = rows.call(
            self._library.rltrace_packets_texts, self._packets, encoded, len(encoded), chosen.ctypes.data, len(chosen),
            found.ctypes.data,
        )  # fmt: skip
        _check(state)
        return found

    def shown(self, place: int) -> str:
        """Return a text by its place."""
        if place >= len(self._shown):
            letters, ends = _POINTER(), _POINTER()
            many = self._library.rltrace_packets_shown(self._packets, ctypes.byref(letters), ctypes.byref(ends))
            all_ends = (_I64 * many).from_address(ends.value or 0)[:]
            known = len(self._shown)
            begin = all_ends[known - 1] if known else 0
            for end in all_ends[known:]:
                self._shown.append(ctypes.string_at((letters.value or 0) + begin, end - begin).decode())
                begin = end
        return self._shown[place]


def _check(state: int) -> None:
    if state == 1:
        raise ValueError("the encoder was called with what it does not know")
    if state:
        raise MemoryError


@functools.cache
def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointers = ctypes.POINTER(_POINTER)
    library.rltrace_packets_new.restype = _POINTER
    library.rltrace_packets_new.argtypes = [ctypes.c_char_p, ctypes.c_uint32, _I32]
    library.rltrace_packets_delete.argtypes = library.rltrace_packets_restart.argtypes = [_POINTER]
    library.rltrace_packets_type.argtypes = [_POINTER, _I32, ctypes.c_char_p, _POINTER]
    library.rltrace_packets_beginning.argtypes = [_POINTER, ctypes.c_char_p, _I64, _I64, _I32]
    library.rltrace_packets_encode.argtypes = [
        _POINTER, ctypes.POINTER(_Rows), ctypes.POINTER(_I64), ctypes.c_uint64,
    ]  # fmt: skip
    library.rltrace_packets_take.restype = ctypes.c_uint64
    library.rltrace_packets_take.argtypes = [_POINTER, pointers]
    library.rltrace_packets_names.restype = _I64
    library.rltrace_packets_names.argtypes = [_POINTER]
    library.rltrace_packets_group.restype = _I64
    library.rltrace_packets_group.argtypes = [_POINTER, _I32, _I32, pointers, _I64, _POINTER, _POINTER]
    library.rltrace_packets_place.argtypes = [_POINTER, _I32, _I32, _POINTER, _POINTER, _I64, _POINTER]
    library.rltrace_packets_texts.argtypes = [
        _POINTER, ctypes.POINTER(_Rows), ctypes.c_char_p, ctypes.c_uint32, _POINTER, _I64, _POINTER,
    ]  # fmt: skip
    library.rltrace_packets_shown.restype = _I64
    library.rltrace_packets_shown.argtypes = [_POINTER, pointers, pointers]
    return library


def library() -> ctypes.CDLL | None:
    """Return the library; None if it was not built here."""
    return native.library()
