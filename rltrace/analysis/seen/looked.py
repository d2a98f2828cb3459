"""When a process looked at its memory, and what it read: `memory.edge` spans, as columns."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.seen.spans import Intervalled
from rltrace.read.columns import OPEN
from rltrace.read.gate import list_of


class Said(msgspec.Struct, frozen=True):
    """What a look says that figures are made of; a number is None if it does not say it."""

    turn: Any = None
    """What turned there, if that is a text."""
    totals: dict[str, float] = {}
    held_bytes: dict[str, float] = {}
    cpu_ns: dict[str, float] = {}
    free_bytes: float | None = None
    others_bytes: float | None = None
    age_ns: float | None = None
    unchanged_ns: float | None = None


class Looked(Intervalled):
    """Looks as columns: 16 bytes per span, and some 200 of what it says."""

    __slots__ = ("said_bytes",)

    def __init__(self) -> None:
        super().__init__()
        self.said_bytes: array[int] | NDArray[np.uint8] = array("B")
        """What each says, one after the other, as maps in MessagePack."""

    def add(self, start_ns: int, end_ns: int | None, args: Mapping[str, Any]) -> None:
        """Append one, with the arguments of its span."""
        assert isinstance(self.pairs, array) and isinstance(self.said_bytes, array)
        self.pairs.extend((start_ns, OPEN if end_ns is None else end_ns))
        self.has_open |= end_ns is None
        self.said_bytes.frombytes(encoded(args))

    def said(self) -> list[Said]:
        """Return what each says."""
        return _SAID.decode(list_of([np.asarray(self.said_bytes).data], len(self)))

    def compacted(self) -> Iterator[tuple[Any, str]]:
        """Put numbers into as few bytes as they take; yield where long columns are."""
        yield from super().compacted()
        self.said_bytes = np.asarray(self.said_bytes)
        yield self, "said_bytes"


def encoded(args: Mapping[str, Any]) -> bytes:
    """Return what the arguments of a look say, as a map in MessagePack; what is no number says nothing."""
    told = {name: _told(args[name]) for name in Said.__struct_fields__ if name in args}
    return _ENCODER.encode({name: value for name, value in told.items() if value is not None})


def _told(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: float(number) for name, number in value.items()}
    return float(value) if isinstance(value, (int, float)) else value if isinstance(value, str) else None


_ENCODER = msgspec.msgpack.Encoder()
_SAID = msgspec.msgpack.Decoder(list[Said])
