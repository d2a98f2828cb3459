"""The native decoder of segments, where it was built: `decoder.c`, called through ctypes. Beside it are the encoder of
Perfetto's packets (`packets.py`), `intervals.c`, arithmetic for `rltrace/analysis/intervals.py`, `groups.c` and
`crc32.c`.

In: the segments of one process, one after another. Out: columns as numpy arrays, texts, threads and what was lost.

It gives up on whatever is damaged or odd (`UnsoundError`); `rltrace/read/columns.py` then reads the process in Python,
which gives the same columns, a hundred times slower. So does it where there is no library:
`rltrace/host/native_library.py` compiles one for the wheel, and `make native` in a working tree.

To add a column of an argument, see `ARGUMENTS` in `columns.py`; a kind of record is a case of `take` in `decoder.c`.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrace.host.native_library import DECODER

MOST_TYPES = 1024
"""Typed spans of a process that are looked for one by one."""

WHOLE_NUMBER, DECIMAL, ONLY_TEXT, AS_TEXT, IS_TRUE, IS_TRUTHY, RARE_NUMBER, NUMBERS = range(8)
"""Kinds of arguments, as in the source; the last two have no columns, their numbers are given one by one."""
AUTOMATIC, ODD, FINISHED = 1, 2, 4
"""Flags of a span: a hook made it; the columns of its arguments do not say all; it was recorded when it was over."""
WHOLE_SAMPLE, BEYOND_BYTES = 1, 2
"""Flags of a sample: it is a whole number; it is larger than any number of bytes."""

DTYPES: dict[int, np.dtype[Any]] = {
    WHOLE_NUMBER: np.dtype(np.int64),
    DECIMAL: np.dtype(np.float64),
    ONLY_TEXT: np.dtype(np.int32),
    AS_TEXT: np.dtype(np.int32),
    IS_TRUE: np.dtype(np.bool_),
    IS_TRUTHY: np.dtype(np.bool_),
}

MISSING = -(2**63)
"""In a column of whole numbers: there is none."""
NO_TEXT = -1
"""In a column of texts: there is none."""
_NOTHING = {
    kind: np.array(missing, DTYPES[kind]).tobytes()
    for kind, missing in (
        (WHOLE_NUMBER, MISSING), (DECIMAL, np.nan), (ONLY_TEXT, NO_TEXT), (AS_TEXT, NO_TEXT), (IS_TRUE, False),
        (IS_TRUTHY, False),
    )
}  # fmt: skip

_MOST_ARGUMENTS = 40
_SPANS = (
    ("name", "i4"), ("thread", "i8"), ("task", "i8"), ("lane", "i4"), ("start_ns", "i8"), ("end_ns", "i8"),
    ("flags", "u1"), ("type", "i4"), ("args_at", "i8"), ("begin_bytes", "i4"), ("late_bytes", "i4"),
)  # fmt: skip
_BEHIND = (
    ("blobs", "u1"), ("sample_name", "i4"), ("sample_thread", "i8"), ("sample_ns", "i8"), ("sample_value", "f8"),
    ("sample_flags", "u1"), ("flow_row", "i8"), ("flow_key", "i4"), ("flow_is_out", "u1"), ("number_row", "i8"),
    ("number_of", "u1"), ("number_name", "i4"), ("number_value", "f8"),
)  # fmt: skip
_COLUMNS = len(_SPANS) + _MOST_ARGUMENTS + len(_BEHIND)


class UnsoundError(Exception):
    """A segment has something that only the Python reader knows how to read."""


class Argument(NamedTuple):
    """An argument that figures are made of."""

    kind: int
    least: int = 0
    most: int = 0
    """From where to where a number lies that is right; one beyond makes its row odd."""


class Type(NamedTuple):
    """A typed span that a process has declared."""

    number: int
    name: str
    fields: Sequence[str]
    is_automatic: bool


def decoder() -> str:
    """Return in words what decodes segments here, and what to do if that is slow."""
    if library() is not None:
        return "natively"
    if DECODER.path.exists():
        return f"in Python, because {DECODER.path} is of another release; build it again: make native"
    return "in Python, because no native decoder was built; install a C compiler, then rltrace again"


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library; None if it was not built, or from another source than the one beside it."""
    return load(DECODER.path)


def load(path: Path) -> ctypes.CDLL | None:
    """Return a library that was built from the source here; None if it is none."""
    try:
        found = ctypes.CDLL(str(path))
        found.rltrace_source.restype = ctypes.c_uint32
        if found.rltrace_source() != DECODER.source_crc32():
            return None
        _declare(found)
    except (OSError, AttributeError):
        return None
    return found if found.rltrace_columns() == _COLUMNS else None


def _declare(found: ctypes.CDLL) -> None:
    pointer, pointers = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
    found.rltrace_new.restype = pointer
    found.rltrace_new.argtypes = [ctypes.c_int32, ctypes.POINTER(ctypes.c_char_p), pointer, pointer, pointer]
    found.rltrace_delete.argtypes = [pointer]
    found.rltrace_declare.argtypes = [
        pointer, ctypes.c_int64, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_int32, pointer,
    ]  # fmt: skip
    found.rltrace_decode.argtypes = [
        pointer, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int,
    ]  # fmt: skip
    found.rltrace_decode_more.argtypes = [
        pointer, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64),
    ]  # fmt: skip
    found.rltrace_whole_bytes.restype = ctypes.c_uint64
    found.rltrace_whole_bytes.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
    found.rltrace_finish.argtypes = found.rltrace_show_open.argtypes = [pointer]
    found.rltrace_rows.restype = found.rltrace_early.restype = ctypes.c_int64
    found.rltrace_rows.argtypes = found.rltrace_early.argtypes = [pointer]
    found.rltrace_take.argtypes = [pointer, pointers, ctypes.POINTER(ctypes.c_uint64)]
    found.rltrace_free.argtypes = [pointer]
    found.rltrace_texts.restype = found.rltrace_threads.restype = ctypes.c_int64
    found.rltrace_texts.argtypes = [pointer, ctypes.c_int, pointers, pointers]
    found.rltrace_threads.argtypes = [pointer, pointers]
    found.rltrace_losses.argtypes = [pointer, pointer]
    found.rltrace_crc32.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint32)]
    found.rltrace_add_up.argtypes = [
        pointer, pointer, ctypes.c_int64, pointer, pointer, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, pointer,
    ]  # fmt: skip
    found.rltrace_union.restype = found.rltrace_cut.restype = found.rltrace_group.restype = ctypes.c_int64
    found.rltrace_group.argtypes = [pointer, ctypes.c_int64, ctypes.c_int32, pointer, pointer, pointer]
    found.rltrace_union.argtypes = [pointer, ctypes.c_int64, pointer]
    found.rltrace_cut.argtypes = [
        pointer, ctypes.c_int64, pointer, ctypes.c_int64, pointer, pointer, pointer, ctypes.c_int64,
    ]  # fmt: skip


def crc32(content: bytes) -> int:
    """Return the checksum of a file's content, as `zlib.crc32` does, in a sixth of the time on most processors."""
    native, found = library(), ctypes.c_uint32()
    if native is not None and native.rltrace_crc32(content, len(content), ctypes.byref(found)):
        return found.value
    return zlib.crc32(content)


def whole_bytes(content: bytes) -> int:
    """Return how many bytes the whole records at the beginning take, at least: some are whole for Python only."""
    found = library()
    return 0 if found is None else int(found.rltrace_whole_bytes(content, len(content)))


class _Memory:
    """Memory that the library gave away: numpy's arrays keep this object, and with it the memory."""

    def __init__(self, library: ctypes.CDLL, address: int, size: int) -> None:
        self._free, self._address = library.rltrace_free, address
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        self._free(self._address)


class Decoder:
    """Decodes the segments of one process."""

    def __init__(self, library: ctypes.CDLL, arguments: Mapping[str, Argument], types: Sequence[Type]) -> None:
        """Prepare for the first segment.

        Raises:
            UnsoundError: the process has declared too many typed spans.
        """
        if len(types) > MOST_TYPES:
            raise UnsoundError
        self._library = library
        self._arguments = arguments
        self._decoder: int | None = self._new(arguments)
        self._texts: list[str] = []
        self._known_letters = 0
        self._places = {key: place for place, key in enumerate(arguments)}
        for type_ in types:
            self.declare(type_)

    def _new(self, arguments: Mapping[str, Argument]) -> int:
        keys = (ctypes.c_char_p * len(arguments))(*(key.encode() for key in arguments))
        of_all = list(arguments.values())
        kinds = np.array([argument.kind for argument in of_all], np.int32)
        least = np.array([argument.least for argument in of_all], np.int64)
        most = np.array([argument.most for argument in of_all], np.int64)
        made = self._library.rltrace_new(len(of_all), keys, kinds.ctypes.data, least.ctypes.data, most.ctypes.data)
        if not made:
            raise MemoryError
        return int(made)

    def declare(self, type_: Type) -> None:
        """Learn of one more typed span."""
        fields = np.array([self._places.get(field, -1) for field in type_.fields], np.int32)
        name = type_.name.encode()
        self._check(
            self._library.rltrace_declare(
                self._decoder, type_.number, name, len(name), type_.is_automatic, len(fields), fields.ctypes.data
            )
        )

    def __del__(self) -> None:
        if getattr(self, "_decoder", None) is not None:
            self._library.rltrace_delete(self._decoder)
            self._decoder = None

    def decode(self, content: bytes, first_ns: int, last_ns: int, *, may_grow: bool) -> None:
        """Decode the next segment.

        Raises:
            UnsoundError: it is damaged, or has what only the Python reader knows; the decoder is of no use any more.
        """
        self._check(self._library.rltrace_decode(self._decoder, content, len(content), first_ns, last_ns, may_grow))

    def decode_more(self, content: bytes, first_ns: int, last_ns: int, thread: int) -> int:
        """Decode more of a segment, whole records, and return of which thread the last one is.

        Args:
            content: What follows in the segment.
            first_ns: From when on it can have been written.
            last_ns: Until when.
            thread: Whose the record before it is.

        Raises:
            UnsoundError: as `decode`.
        """
        of = ctypes.c_int64(thread)
        self._check(
            self._library.rltrace_decode_more(self._decoder, content, len(content), first_ns, last_ns, ctypes.byref(of))
        )
        return of.value

    def show_open(self) -> None:
        """Add the spans that are open now; they stay open."""
        self._check(self._library.rltrace_show_open(self._decoder))

    @property
    def many_early(self) -> int:
        """How many ends wait for a beginning that was not read yet."""
        return int(self._library.rltrace_early(self._decoder))

    @property
    def many_texts(self) -> int:
        """How many texts it holds."""
        return self._many(0)

    @property
    def many_keys(self) -> int:
        """How many keys of arrows it holds."""
        return self._many(1)

    def _many(self, of: int) -> int:
        nowhere = ctypes.byref(ctypes.c_void_p())
        return int(self._library.rltrace_texts(self._decoder, of, nowhere, nowhere))

    def finish(self) -> None:
        """Add the spans that never ended."""
        self._check(self._library.rltrace_finish(self._decoder))

    def _check(self, state: int) -> None:
        if state == 1:
            raise UnsoundError
        if state:
            raise MemoryError

    @property
    def rows(self) -> int:
        """How many spans and samples `take` would give."""
        return int(self._library.rltrace_rows(self._decoder))

    def take(self) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """Return the columns so far, and those of the arguments; the next ones begin empty.

        The column of an argument that no row has is one value, however long, and cannot be written to.
        """
        data, sizes = (ctypes.c_void_p * _COLUMNS)(), (ctypes.c_uint64 * _COLUMNS)()
        self._library.rltrace_take(self._decoder, data, sizes)
        raw = [self._array(address, size) for address, size in zip(data, sizes, strict=True)]
        of_arguments = raw[len(_SPANS) : len(_SPANS) + len(self._arguments)]
        behind = raw[len(_SPANS) + _MOST_ARGUMENTS :]
        named = [*zip(_SPANS, raw, strict=False), *zip(_BEHIND, behind, strict=True)]
        columns = {name: array.view(code) for (name, code), array in named}
        rows = len(columns["name"])
        arguments = {
            key: array.view(DTYPES[argument.kind]) if len(array) else _nothing(argument.kind, rows)
            for (key, argument), array in zip(self._arguments.items(), of_arguments, strict=True)
            if argument.kind in DTYPES
        }
        return columns, arguments

    def _array(self, address: int | None, size: int) -> NDArray[np.uint8]:
        return np.asarray(_Memory(self._library, address, size)) if address else np.empty(0, np.uint8)

    def texts(self) -> list[str]:
        """Return all texts so far, by number; the list grows."""
        letters_at, ends = self._letters(0)
        new = ends[len(self._texts) :].tolist()
        if new:
            self._texts += _cut(letters_at + self._known_letters, self._known_letters, new)
            self._known_letters = new[-1]
        return self._texts

    def keys(self, numbers: NDArray[np.int32]) -> list[str]:
        """Return some keys of arrows, by their numbers."""
        letters_at, ends = self._letters(1)
        begins = np.where(numbers > 0, ends[numbers - 1], 0) if len(numbers) else numbers
        lengths = ends[numbers] - begins
        parts = map(ctypes.string_at, (letters_at + begins).tolist(), lengths.tolist())
        return [part.decode(errors="replace") for part in parts]

    def _letters(self, of: int) -> tuple[int, NDArray[np.int64]]:
        """Return where the letters of all texts, or keys, lie one behind the other, and where each ends among them;
        both until more is decoded."""
        letters, ends = ctypes.c_void_p(), ctypes.c_void_p()
        many = self._library.rltrace_texts(self._decoder, of, ctypes.byref(letters), ctypes.byref(ends))
        return letters.value or 0, np.frombuffer((ctypes.c_int64 * many).from_address(ends.value or 0), np.int64)

    def threads(self) -> list[tuple[int, str]]:
        """Return the native ids and the names of threads, in the order in which they were said."""
        pairs = ctypes.c_void_p()
        many = self._library.rltrace_threads(self._decoder, ctypes.byref(pairs))
        if not many:
            return []
        said, texts = (ctypes.c_int64 * (2 * many)).from_address(pairs.value or 0), self.texts()
        return [(said[at], texts[said[at + 1]]) for at in range(0, 2 * many, 2)]

    def losses(self) -> tuple[int, int, int]:
        """Return how many records were damaged, how many ends and flows lost the beginning of their span, and how many
        of these are flows."""
        losses = (ctypes.c_int64 * 3)()
        self._library.rltrace_losses(self._decoder, losses)
        return losses[0], losses[1], losses[2]


def _nothing(kind: int, rows: int) -> NDArray[Any]:
    """Return a column of which no row has anything: one value, however long, that nobody may write to."""
    column: NDArray[Any] = np.ndarray(rows, DTYPES[kind], _NOTHING[kind], strides=(0,))
    return column


def _cut(address: int, begin: int, ends: list[int]) -> Iterator[str]:
    """Return the texts that lie from an address on, one behind the other."""
    letters = ctypes.string_at(address, ends[-1] - begin)
    places = np.array([begin, *ends]) - begin
    parts = map(slice, places[:-1].tolist(), places[1:].tolist())
    if letters.isascii():  # as nearly all are: they are decoded at once
        return map(letters.decode().__getitem__, parts)
    return (letters[part].decode(errors="replace") for part in parts)
