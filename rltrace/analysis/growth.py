"""Goes on with what an earlier reading saw of a process that goes on: only what it wrote since is decoded."""

from __future__ import annotations

import threading
from array import array
from collections import defaultdict
from typing import Any, Protocol

import msgspec

from rltrace.events import Span
from rltrace.read import native
from rltrace.read.cache import GrowingCache
from rltrace.read.columns import Before, Columns, Growing
from rltrace.read.native import UnsoundError
from rltrace.read.recording import Process, Recording

WORTH_BYTES = 4 << 20
"""Fewer bytes of closed segments are decoded again."""
SHARE = 8
"""It is kept anew when one in so many bytes of closed segments is new."""


class Seeing(Protocol):
    """Keeps what counts of rows."""

    def add(self, rows: Columns) -> None:
        """Keep what counts of more rows."""

    def said(self) -> Any:
        """Return all that was kept, as numbers, texts and bytes."""

    def put(self, said: Any) -> None:
        """Take what another one said, before the first row."""


class Growth:
    """What was seen of the processes of a run that goes on."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.damaged: list[str] = []
        """Files of the cache that cannot be used, because they are damaged."""
        self._lock = threading.Lock()

    def see(self, process: Process, seeing: Seeing) -> bool:
        """Keep what counts of all rows of a process; return False if it has to be read from its beginning, by another
        one."""
        if not self._is_for(process):  # most have ended: their folders are not listed once more for this
            return False
        closed_bytes = {name: sum_.size_bytes for name in process.segment_names if (sum_ := process.seal(name))}
        if sum(closed_bytes.values()) < WORTH_BYTES:
            return False
        cache = GrowingCache(self._recording, process, closed_bytes)
        before = self._load(cache, seeing)

        def keep(now: Before) -> None:
            new_bytes = sum(closed_bytes.get(name, 0) for name in now.segments - before.segments)
            if new_bytes * SHARE >= sum(closed_bytes.values()):
                cache.save(now.segments, packed(now, seeing.said()))

        try:
            for rows in Growing(process).since(before, keep):
                seeing.add(rows)
        except UnsoundError:
            return False
        return True

    def _is_for(self, process: Process) -> bool:
        """Return whether what was seen of a process stays so: the times of other clocks change with each exchange, and
        of a process that has ended figures are kept."""
        is_plain = not (process.is_cut or process.infers) and process.mark is None and process.alignment is None
        is_beside = self._recording.folder == self._recording.path
        return is_beside and is_plain and process.is_alive and native.library() is not None

    def _load(self, cache: GrowingCache, seeing: Seeing) -> Before:
        content = cache.load()
        with self._lock:
            self.damaged += cache.damaged
        if content is None:
            return Before()
        now, said = msgspec.msgpack.decode(content)
        segments, spans, losses, unfit_arguments, threads = now
        seeing.put(said)
        opened = [span(one) for one in spans]
        return Before(frozenset(segments), opened, tuple(losses), unfit_arguments, threads)


def packed(now: Before, said: Any) -> bytes:
    """Return what was read and what was seen as bytes."""
    spans = [value_of(span) for span in now.open]
    return msgspec.msgpack.encode(
        [[sorted(now.segments), spans, now.losses, now.unfit_arguments, {**now.threads}], said]
    )


# ---- values -----------------------------------------------------------------------------------------------------


def value_of(kept: Any) -> Any:
    """Return what was kept as numbers, texts, bytes, lists and dictionaries of them."""
    if isinstance(kept, array):
        return [kept.typecode, kept.tobytes()]
    if isinstance(kept, Span):
        return [getattr(kept, name) for name in Span.__struct_fields__]
    if isinstance(kept, dict):
        return [[key, value_of(value)] for key, value in kept.items()]
    if isinstance(kept, (list, tuple)):
        return [value_of(one) for one in kept]
    if hasattr(type(kept), "__slots__"):
        return [value_of(getattr(kept, name)) for name in slots_of(kept)]
    return kept


def put(into: Any, said: Any) -> Any:
    """Return what `value_of` said of something like `into`, which may be changed for that."""
    if isinstance(into, array):
        code, content = said
        found = array(code)
        found.frombytes(content)
        return found
    if isinstance(into, defaultdict):
        assert into.default_factory is not None
        for key, value in said:
            into[_key(key)] = put(into.default_factory(), value)
        return into
    if isinstance(into, dict):
        return {_key(key): _key(value) for key, value in said}
    if isinstance(into, list):
        return [span(one) if isinstance(one, list) else one for one in said]
    if hasattr(type(into), "__slots__"):
        for name, value in zip(slots_of(into), said, strict=True):
            setattr(into, name, put(getattr(into, name), value))
        return into
    return said


def slots_of(kept: Any) -> list[str]:
    """Return the names of what something has, those of its parents too."""
    return [name for part in type(kept).__mro__ for name in getattr(part, "__slots__", ())]


def span(said: list[Any]) -> Span:
    """Return a span as `value_of` said it."""
    fields = dict(zip(Span.__struct_fields__, said, strict=True))
    return Span(**fields | {name: tuple(fields[name]) for name in ("flows_out", "flows_in")})


def _key(said: Any) -> Any:
    return tuple(map(_key, said)) if isinstance(said, list) else said
