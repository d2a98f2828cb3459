"""Records what this process does: spans, counters and flows, appended to memory-mapped segments.

A record costs one call to encode it and one to append it, both in C. There is no thread and no buffer: what was
written before a `kill -9` is in the Recording. A failure of ours is counted as a lost event and never reaches the
traced program. The wire format is in `rltrace/README.md`.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import os
import re
import sys
import threading
import time
from asyncio import _get_running_loop
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, cast

from rltrace.dependencies import msgspec
from rltrace.host import clock
from rltrace.record import checksum, cluster, manifest
from rltrace.record.announcement import complain, complain_once, say, say_once
from rltrace.record.encoding import plain_text, sayable
from rltrace.record.interruption import own_failure, suppress_own
from rltrace.record.process import (
    COUNT_SLOTS,
    COUNTS_BYTES,
    LOST,
    Line,
    ProcessFolder,
    discard_attempts,
    identity,
    process_key,
    sound_fields,
)
from rltrace.record.segment import FIRST_BYTES, NEXT_BYTES, REUSE_BYTES, Segment

if sys.version_info < (3, 14):
    # {loop: task} over all threads. `asyncio.current_task` is Python before 3.12, and `_get_running_loop` a system
    # call before 3.12: a look at this dictionary spares both while no task runs.
    from asyncio.tasks import _current_tasks  # type: ignore[attr-defined]

    _task_of = _current_tasks.get
else:
    from asyncio import current_task as _task_of

    _current_tasks = True

_now_ns = clock.now_ns

DIR_VARIABLE = cluster.DIR_VARIABLE
"""Environment variable naming the Recording that a process joins."""

PARENT_VARIABLE = "RLTRACE_PARENT"
"""Environment variable naming the process (its folder) that started this one."""

HOOKS_VARIABLE = "RLTRACE_HOOKS"
"""Environment variable set by a process that has hooks installed: the processes that it starts get them too."""

RETRY_NS = 1_000_000_000
"""How long to wait after a full disk before trying for a segment, or the process's folder, again."""

_MAY_PASS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""What keeps a folder from being made now and maybe not in a second: there is no space, or no descriptor."""

MOST_UNSAID = 1000
"""Lines that are kept until there is a folder for them."""

_TOLD_AGAIN = ("process", "type", "hook")
"""Kinds of lines that `Recorder._lines` has."""


def _plain(value: Any) -> Any:
    """What an argument that msgpack does not know is recorded as: a number or text if it is one, else its print."""
    item = getattr(value, "item", None)
    if item is not None:
        try:
            number = item()
            if isinstance(number, (int, float, str)):
                return number
        except own_failure():  # a tensor of several elements
            pass
    return str(value)[:256]


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_ARRAY_OF_4 = b"\x94"
"""How the record of a span's end begins, before the time of the span's beginning."""
_local = threading.local()
"""`.write` appends to this thread's segment; absent until the thread's first record."""
_recorder: Recorder | None = None
_paused: Recorder | None = None
"""The recorder while `pause` holds it back: then `_recorder` is None, and recording costs what it costs untraced."""
_switches: list[Callable[[bool], None]] = []
_endings: list[Callable[[], None]] = []
_typed_spans: list[dict[str, Any]] = []


# ---------------------------------------------------------------- spans


class NoSpan:
    """What `span` returns while nothing is recorded."""

    __slots__ = ()

    def __enter__(self) -> NoSpan:
        return self

    def __exit__(self, kind: object = None, error: object = None, traceback: object = None, /) -> None:
        return None

    async def __aenter__(self) -> NoSpan:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def set(self, /, **late_args: Any) -> None:
        """Do nothing."""


_NO_SPAN = NoSpan()


class _Enterable:
    """Entering and leaving a span: the record of its beginning is the Struct itself, that of its end a tuple."""

    __slots__ = ()
    task: int
    start_ns: int
    args: dict[str, Any] | None
    """What the record of the beginning says; once that is written, what the end will add."""

    def __enter__(self: Any) -> Any:
        if _recorder is None:
            return self
        if _current_tasks:
            loop = _get_running_loop()
            if loop is not None:
                task = _task_of(loop)
                if task is not None:  # None: a callback of the loop
                    self.task = id(task)
        self.start_ns = _now_ns()
        try:
            _local.write(_encode(self))
            self.args = None
        except own_failure():
            _write_slowly(self)
            self.args = None
        except BaseException as interruption:  # `with` never calls `__exit__` then
            if _is_written(_encode(self.start_ns)):
                self._end_interrupted(interruption)
            raise
        return self

    # The three arguments are spelled out: `*_` would build a tuple. Hooks end a span with the first one only.
    def __exit__(self, kind: type[BaseException] | None, error: object = None, traceback: object = None, /) -> None:
        if _recorder is None:
            return
        try:
            end_ns = _now_ns()
            if kind is not None and kind is not GeneratorExit:  # closing a generator is no error
                self.set(error=kind.__name__)
            _local.write(_encode((self.start_ns, end_ns, self.args, True)))
        except own_failure():
            _write_slowly((self.start_ns, end_ns, self.args, True))
        except BaseException as interruption:
            if not _is_written(_ARRAY_OF_4 + _encode(self.start_ns)):
                self._end_interrupted(interruption)
            raise

    def _end_interrupted(self, interruption: BaseException) -> None:
        """Write the end of a span that an error from outside interrupted, so that it does not stay open."""
        args = {"error": type(interruption).__name__, **(self.args or {})}
        _write((self.start_ns, _now_ns(), args, True))

    async def __aenter__(self: Any) -> Any:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: object, traceback: object, /) -> None:
        self.__exit__(kind, error, traceback)

    def set(self: Any, /, **late_args: Any) -> None:
        """Add arguments that are known only inside the span; they are written with its end."""
        self.args = late_args if self.args is None else {**self.args, **late_args}


class LiveSpan(_Enterable, msgspec.Struct, array_like=True, gc=False):
    """A span whose arguments are keywords. On the wire: `[name, task, start_ns, args, true]`."""

    name: str
    task: int
    start_ns: int
    args: dict[str, Any] | None
    ok: Literal[True] = True


_make_span: Callable[..., LiveSpan] = LiveSpan
"""What `span` makes; something else in a process where somebody watches spans of a name."""


# Fields that only a keyword sets come last on the wire, so `ok` is the last byte here too.
class TypedSpan(_Enterable, msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """A span whose arguments are declared. On the wire: `[-number, *arguments, task, start_ns, nil, true]`."""

    task: int = 0
    start_ns: int = 0
    args: dict[str, Any] | None = None
    ok: Literal[True] = True


def typed_span(name: str, /, **fields: type) -> Callable[..., TypedSpan]:
    """Declare a span for a hot site: its arguments are positional, and it costs about three quarters of `span`.

    Args:
        name: Name of every span made by the result.
        **fields: Names and types of its arguments, in their order.

    Returns:
        A callable that makes the span: `gather = typed_span("weight_sync.gather", bytes=int)`, then
        `with gather(4096): ...`.

    Raises:
        TypeError: the name is no text, or a field has no such type.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a span is text, not {name!r}")
    number = -1 - len(_typed_spans)
    # Called by position, so the fields need no names here: an argument may be called `task` or `args`.
    numbered = [(f"field{n}", type_) for n, type_ in enumerate(fields.values())]
    declared = msgspec.defstruct(f"TypedSpan{-number}", numbered, bases=(TypedSpan,), tag=number, gc=False)
    line = {"number": number, "name": name, "fields": list(fields)}
    _typed_spans.append(line)
    if (recorder := current()) is not None:
        recorder.append("type", **line)
    return cast("Callable[..., TypedSpan]", declared)


def span(name: str, /, **args: Any) -> LiveSpan | NoSpan:
    """A named interval of this thread or asyncio task, for `with` and `async with`.

    Args:
        name: `subject.action`.
        **args: Recorded with the beginning, so they are known even if the process dies inside.
    """
    return _NO_SPAN if _recorder is None else _make_span(name, 0, 0, args)


def phase(name: str, /, **args: Any) -> LiveSpan | NoSpan:
    """A span that partitions its rank's step: phases of one rank do not overlap."""
    return _NO_SPAN if _recorder is None else LiveSpan(name, 0, 0, {**args, "phase": True})


def watch_spans(watched: str, begin: Callable[[dict[str, Any]], Any], end: Callable[[Any], None]) -> Callable[[], None]:
    """Have somebody told of the spans of a name that are made from here on, typed ones left out; one at a time.

    Nobody pays where nobody watches.

    Args:
        watched: The name.
        begin: Called with the arguments before one begins; must not raise.
        end: Called with what `begin` returned after it has ended; must not raise.

    Returns:
        What undoes it.
    """
    global _make_span

    class WatchedSpan(LiveSpan, dict=True, gc=True):
        def __enter__(self) -> Any:
            self.token = begin(self.args or {})
            return LiveSpan.__enter__(self)

        def __exit__(self, *error: Any) -> None:
            LiveSpan.__exit__(self, *error)
            end(self.token)

    def make(name: str, task: int, start_ns: int, args: dict[str, Any]) -> LiveSpan:
        return (WatchedSpan if name == watched else LiveSpan)(name, task, start_ns, args)

    def undo() -> None:
        global _make_span
        if _make_span is make:
            _make_span = LiveSpan

    _make_span = make
    return undo


def span_at(name: str, start_ns: int, end_ns: int, /, *, lane: int = 0, **args: Any) -> None:
    """A span that is over, with times read elsewhere from `clock.now_ns`.

    One whose times no clock tells, negative ones or more than 63 bits or an end before the start, is counted as lost.

    Args:
        name: `subject.action`.
        start_ns: First instant, CLOCK_MONOTONIC.
        end_ns: First instant after it.
        lane: Spans of one lane nest; 0 is the thread's own, any other number below 2**63 a row of its own (a request,
            a stream).
        **args: Recorded with it.
    """
    if _recorder is None:
        return
    if 0 <= _whole(start_ns) <= _whole(end_ns) < _END_NS and -_END_NS < _whole(lane) < _END_NS:
        _write((name, lane, start_ns, end_ns, args, True))
    else:
        _recorder.lose()


_END_NS = 2**63
"""No clock tells this time, or a later one."""


def _whole(value: Any) -> Any:
    """A whole number as it is; what is none as one that is in no range."""
    return value if value.__class__ is int or isinstance(value, Integral) else _END_NS


def counter(name: str, value: float, /) -> None:
    """A sample of a value; the unit is the end of its name (`allocated_bytes`)."""
    if _recorder is None:
        return
    try:
        _local.write(_encode((name, _now_ns(), value, True)))
    except own_failure():
        _write_slowly((name, _now_ns(), value, True))


def counter_at(name: str, ts_ns: int, value: float, /) -> None:
    """A value with the time at which it was so, read elsewhere from `clock.now_ns`; lost if no clock tells it."""
    if _recorder is None:
        return
    if 0 <= _whole(ts_ns) < _END_NS:
        _write((name, ts_ns, value, True))
    else:
        _recorder.lose()


def flow(key: str, direction: Literal["out", "in"], /) -> None:
    """Make the innermost open span an end of an arrow between processes.

    Args:
        key: The same on both ends, unique in the run.
        direction: "out" where the arrow leaves, "in" where it arrives.
    """
    if _recorder is None:
        return
    loop = _get_running_loop()
    task = None if loop is None else _task_of(loop)
    _write((key, 0 if task is None else id(task), _now_ns(), direction, True))


# ---------------------------------------------------------------- writing


def _write(record: Any) -> None:
    try:
        _local.write(_encode(record))
    except own_failure():
        _write_slowly(record)


def _write_slowly(record: Any) -> None:
    """The first record of a thread, one that its segment has no room for, or one that cannot be written at all."""
    recorder = _recorder
    if recorder is None:  # stopped while the span was open
        return
    try:
        data = _encode_anyhow(record)
    except own_failure():
        recorder.lose()
    else:
        _write_to_new_segment(recorder, data)


def _write_to_new_segment(recorder: Recorder, data: bytes) -> None:
    """Get a segment for this thread, and write to it.

    A signal handler that records while its thread gets a segment must not get one too: a timer that fires faster than
    that takes would nest without end. Its records wait, and the call that it interrupted writes them.
    """
    local = _local  # `stop`, in another thread, puts another one in its place
    waiting: list[bytes] | None = getattr(local, "waiting", None)
    if waiting is not None:
        waiting.append(data)
        return
    local.waiting = waiting = [data]
    try:
        while waiting:
            try:
                recorder.write(waiting)
            except own_failure():
                recorder.lose()
                del waiting[0]
    finally:
        del local.waiting
        if waiting:  # interrupted
            recorder.lose(len(waiting))


def _is_written(part: bytes) -> bool:
    """Whether this thread's segment has a part of a record; a span's time of beginning is no other's."""
    held: _Held | None = getattr(_local, "held", None)
    return held is not None and held.segment.has(part)


def _encode_anyhow(record: Any) -> bytes:
    """Encode a record; what msgpack refuses of its texts and arguments (an int of 65 bits) becomes text that it takes.

    Raises:
        Exception: what it consists of besides, such as a time, cannot be encoded.
    """
    try:
        return _encode(record)
    except own_failure():
        pass
    if isinstance(record, TypedSpan):
        fields = map(_sayable, msgspec.structs.astuple(record))
        return _encode((type(record).__struct_config__.tag, *fields))
    if isinstance(record, LiveSpan):
        record = msgspec.structs.astuple(record)
    return _encode([_sayable_part(part) for part in record])


def _sayable_part(part: Any) -> Any:
    """Of a record: its arguments, or a text such as its name."""
    if isinstance(part, dict):
        return {_sayable(key): _sayable(value) for key, value in part.items()}
    return plain_text(part) if isinstance(part, str) else part


def _sayable(value: Any) -> Any:
    return sayable(value, _encode)


class _Held:
    """The segment of a thread: its thread-local storage has the only reference, so this dies with the thread."""

    __slots__ = ("pid", "recorder", "segment")

    segment: Segment

    def __init__(self, recorder: Recorder) -> None:
        self.pid = recorder.pid
        self.recorder = recorder

    def __del__(self) -> None:
        try:
            if self.pid == os.getpid():  # a forked child has no part in its parent's segments
                self.recorder.take_back(self.segment)
        except own_failure():
            pass


class HookCount:
    """One patched place of a framework: how often it fired is counted without a function of ours.

    Hooks run between a program's own calls, with none of their code and data in the processor's caches: there a store
    in the mapped counts took 2 of a hook's 7 us. So a number is taken each time, and the counts are written when the
    hook fires first, with every new segment, and at the end; after a kill they are what they were then.
    """

    __slots__ = ("_next", "_reads", "_recorder", "_slot", "fired", "line")

    fired: Callable[[], object]
    """Count once."""

    def __init__(self, recorder: Recorder, line: dict[str, Any]) -> None:
        self.line = line
        self._recorder = recorder
        self._slot: int = line["slot"]
        self.restart()

    def restart(self) -> None:
        """Count from the start again: in a forked child, what fired before belongs to its parent."""
        # One C call that never gives two threads the same number: a lock here costs a hot hook 0.3 us.
        self._next = itertools.count(1).__next__
        self._reads = 0
        self.fired = self._fire_first

    def _fire_first(self) -> None:
        self.fired = self._next
        self._next()
        self.settle()

    def settle(self) -> None:
        """Write how often it has fired until now."""
        try:
            with self._recorder._lock:
                taken = self._next()
                self._reads += 1  # to look takes a number too
                self._recorder._counts[self._slot] = taken - self._reads
        except own_failure():  # the recorder has stopped
            pass

    def spent(self, spent_ns: int) -> None:
        """Add what it took; not of the hooks that share the last slot."""
        try:
            if self._slot < COUNT_SLOTS - 1:
                self._recorder._counts[COUNT_SLOTS + self._slot] += spent_ns
        except own_failure():  # the recorder has stopped
            pass


class Recorder:
    """What one process writes of a Recording: made by `start` and `join`; a forked child begins anew."""

    _folder: ProcessFolder | None = None

    def __init__(
        self, recording: Path, *, start_ns: int | None = None, max_bytes: int | None = None, **who: Any
    ) -> None:
        """Open this process's folder.

        Args:
            recording: Folder with a manifest.
            start_ns: When this process began to record; now by default.
            max_bytes: Bound on this process's segments: the oldest are dropped, and counted, when it is reached. What
                its threads are writing now, at most 1 MiB a thread, is never dropped.
            **who: Added to the process's identity: role, rank, device, name.

        Raises:
            OSError: the folder cannot be written.
        """
        self.recording = recording
        self.max_bytes = self._sound({"max_bytes": max_bytes}).get("max_bytes")
        self.who = self._sound(who)
        self._hooks: dict[tuple[str, str], HookCount] = {}
        self.forget_parent(start_ns)
        try:
            with self._lock:
                self._open()
        except OSError as error:
            if error.errno not in _MAY_PASS:
                raise
            complain(f"{recording} cannot be written now, it is tried again every second: {error.strerror}")
            _stop_at_exit()

    def forget_parent(self, start_ns: int | None = None) -> None:
        """Begin with nothing: in a forked child the mappings belong to the parent, which goes on writing them.

        The child makes a folder of its own at its first record, so one that records nothing leaves nothing.
        """
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        self.start_ns = _now_ns() if start_ns is None else start_ns
        self.key = process_key(self.start_ns)
        self._lock = threading.RLock()  # re-entrant: a signal handler may record too
        self._counts = memoryview(bytearray(COUNTS_BYTES)).cast("Q")
        self._lost = 0
        for hook in self._hooks.values():
            hook.restart()
        self._segments: list[Segment] = []
        self._returned: list[Segment] = []
        self._sealed: set[str] = set()
        """Names of segments whose checksum was said."""
        self._attempts = itertools.count(1)
        self._made: dict[str, tuple[ProcessFolder, list[Line]]] = {}
        """The folder that is to be shown, and what it says, by the key."""
        self._unsaid: list[Line] = []
        """Lines that came before there was a folder, but for those that `_lines` has."""
        self._said: list[Line] = []
        """Of `_lines`, what the folder says."""
        self._is_open = False
        self._is_behind = False
        """Some of it could not be written."""
        self._retry_ns = self._say_ns = 0
        self.pid = os.getpid()  # last: where this does not end, it is done again

    def _open(self) -> None:
        """Make this process's folder and say in it what is known of the process, unless that is done.

        What a signal handler raises may come at any point of this, and so may what it records: each step may be
        repeated, and the next record goes on with the first that is not done.

        Raises:
            OSError: the disk is full, now or less than `RETRY_NS` ago.
        """
        if self._is_open:
            return
        if self.pid != os.getpid():  # what is done after a fork was interrupted
            self.forget_parent()
        if self._folder is None:
            self._show()
        elif _now_ns() < self._say_ns:
            return
        self._is_behind = False
        lines, said = self._lines(), self._said
        for kind, fields in [line for line in lines if line not in said] if lines != said else ():
            self.append(kind, **fields)
        self._said = [] if self._is_behind else lines
        while self._unsaid:
            kind, fields = self._unsaid[0]
            self.append(kind, **fields)
            del self._unsaid[:1]
        os.environ[DIR_VARIABLE] = str(self.recording)  # processes started from here join the same Recording
        os.environ[PARENT_VARIABLE] = self.key
        _stop_at_exit()
        self._is_open = not self._is_behind

    def _show(self) -> None:
        """Make the folder and show it to readers."""
        self._wait_for_space()
        try:
            if (made := self._made.get(self.key)) is None:
                # Which is not ours where a signal handler has recorded meanwhile.
                made = self._made.setdefault(self.key, self._attempt())
            folder, self._said = made
            folder.show()
        except own_failure(OSError):
            if self._folder is not None:  # a signal handler's record has made it
                return
            self._made.pop(self.key, None)
            self._retry_ns = _now_ns() + RETRY_NS
            raise
        if self._counts is not folder.counts:
            folder.counts[:] = self._counts
            self._counts = folder.counts
        self._counts[LOST] = self._lost
        self._folder = folder
        discard_attempts(self.recording, self.key)

    def _attempt(self) -> tuple[ProcessFolder, list[Line]]:
        """A folder that no reader sees yet, and what of `_lines` is said in it: who this process is."""
        kind, who = self._lines()[0]
        line = {**identity(self.start_ns), "parent": os.environ.get(PARENT_VARIABLE), **who}
        return ProcessFolder(self.recording, self.key, next(self._attempts), (kind, line)), [(kind, who)]

    def _lines(self) -> list[Line]:
        """What its folder says of this process, as far as that is told again where it could not be written."""
        types: list[Line] = [("type", line) for line in _typed_spans]
        hooks: list[Line] = [("hook", hook.line) for hook in list(self._hooks.values())]
        return [("process", {**self.who}), *types, *hooks]

    def append(self, kind: str, **fields: Any) -> None:
        """Append a line about this process; one that cannot be written is written later, or counted as lost."""
        if self._folder is None:  # it has recorded nothing: `_open` will say it all
            if kind not in _TOLD_AGAIN and len(self._unsaid) < MOST_UNSAID:
                self._unsaid.append((kind, fields))
            elif kind not in _TOLD_AGAIN:
                self.lose()
            return
        try:
            self._folder.append(kind, **fields)
        except own_failure() as error:
            if kind in _TOLD_AGAIN and isinstance(error, OSError):
                self._tell_again(RETRY_NS)
            else:
                self.lose()
        except BaseException:
            self._tell_again(0)
            raise

    def _tell_again(self, wait_ns: int) -> None:
        """Have `_open` say all that it knows once more, not before some time has passed."""
        self._say_ns = _now_ns() + wait_ns
        self._said = []
        self._is_behind = True
        self._is_open = False

    def keep_to(self, max_bytes: int | None) -> None:
        """Bound this process's segments from the next one on; None leaves the bound that there is."""
        if max_bytes is not None:
            self.max_bytes = max_bytes

    def identify(self, **who: Any) -> None:
        """Say more about this process: role, rank, device, name; what cannot be is left out, and said on stderr."""
        sound = self._sound(who)
        self.who |= sound
        self.append("process", **sound)

    def _sound(self, who: dict[str, Any]) -> dict[str, Any]:
        sound, refused = sound_fields(who)
        for field in refused:
            complain_once(f"left out: {field}")
        return sound

    def hook(
        self, instrumentation: str, target: str, state: str, reason: str | None = None, emits: tuple[str, ...] = ()
    ) -> HookCount:
        """Report a hook.

        Args:
            instrumentation: Name in the table of instrumentations.
            target: `module:Class.attribute`.
            state: "waiting", "installed", "skipped", "failed" or "undone"; a later report of the same instrumentation's
                same target replaces it.
            reason: Why it is not installed.
            emits: Names of the spans it makes.
        """
        known = self._hooks.get((instrumentation, target))
        slot = known.line["slot"] if known else min(len(self._hooks) + 1, COUNT_SLOTS - 1)
        line = {
            "slot": slot,
            "instrumentation": instrumentation,
            "target": target,
            "state": state,
            "reason": reason,
            "emits": list(emits),
        }
        if known is None:
            self._hooks[instrumentation, target] = known = HookCount(self, line)
        known.line = line
        if state == "failed" and self._folder is None:  # a forked child that may never record anything
            self._say_all()
        else:
            self.append("hook", **line)
        return known

    def _say_all(self) -> None:
        """Open this process's part of the Recording, which says what is known of it."""
        try:
            with self._lock:
                self._open()
        except own_failure():
            self.lose()

    def lose(self, count: int = 1) -> None:
        """Count events that could not be written."""
        try:
            with self._lock:
                self._lost += count
                self._counts[LOST] = self._lost
        except own_failure():  # the recorder has stopped
            pass

    def write(self, records: list[bytes]) -> None:
        """Write all of this thread's records that its segment has no room for, or that came before it had one.

        Args:
            records: Taken out once they are written; a signal handler may append to them meanwhile.

        Raises:
            OSError: the disk is full, now or less than `RETRY_NS` ago.
            ValueError: a record is larger than a segment, or the recorder has stopped.
        """
        while records:
            segment = self._segment_of_thread(len(records[0]))
            segment.write(records[0])
            del records[0]
        _local.write = segment.write

    def _segment_of_thread(self, record_bytes: int) -> Segment:
        """The segment of this thread, or a new one, with room for a record.

        A call that an error from outside ended is made again: what it left is taken up or overwritten.
        """
        if record_bytes > NEXT_BYTES - REUSE_BYTES:
            raise ValueError(f"a record of {record_bytes} bytes does not fit a segment of {NEXT_BYTES}")
        with self._lock:
            if _recorder is not self:
                raise ValueError("the recorder has stopped")
            self._open()
            held: _Held | None = getattr(_local, "held", None)
            if held is not None and held.segment.free_bytes >= record_bytes:
                return held.segment
            self._settle_hooks()
            return self._take_segment(held, record_bytes)

    def _take_segment(self, held: _Held | None, record_bytes: int) -> Segment:
        header = _encode((threading.get_native_id(), _thread_name(), True))
        segment = self._returned_segment(held, len(header) + record_bytes)
        made = [] if segment is not None else [self._new_segment(held, len(header) + record_bytes)]
        segment = segment or made[0]
        segment.write(header)
        full = None if held is None else held.segment
        holder = held or _Held(self)
        # No call from here to the next comment, and so nothing that Python would run a signal handler after.
        self._segments += made
        holder.segment = segment
        _local.held = holder
        # It has the segment now.
        if full is not None:
            self._seal(full)
        return segment

    def _settle_hooks(self) -> None:
        for hook in self._hooks.values():
            if hook.fired != hook._fire_first:
                hook.settle()

    def _returned_segment(self, held: _Held | None, needed_bytes: int) -> Segment | None:
        """One that a dead thread left, for a thread that has none."""
        for segment in list(self._returned) if held is None else ():
            # A signal handler may have come in between, and have taken it.
            if segment.free_bytes > max(needed_bytes, REUSE_BYTES) and segment in self._returned:
                self._returned.remove(segment)
                return segment
        return None

    def _new_segment(self, held: _Held | None, needed_bytes: int) -> Segment:
        size_bytes = FIRST_BYTES if held is None and needed_bytes < FIRST_BYTES else NEXT_BYTES
        self._wait_for_space()
        self._drop_oldest(size_bytes)
        try:
            return Segment(self._next_path(), size_bytes)
        except own_failure(OSError):
            self._retry_ns = _now_ns() + RETRY_NS
            raise

    def _next_path(self) -> Path:
        """Of the segment behind the newest one: where a call was interrupted, its file is there already."""
        assert self._folder is not None
        number = int(self._segments[-1].path.stem) if self._segments else 0
        return self._folder.path / f"{number + 1:06d}.seg"

    def _wait_for_space(self) -> None:
        """Asking a full disk again and again would slow the program down: fail at once until `RETRY_NS` have passed."""
        if _now_ns() < self._retry_ns:
            raise OSError("the disk was full a moment ago")

    def _drop_oldest(self, new_bytes: int) -> None:
        if self.max_bytes is None:
            return
        full = [s for s in self._segments[:-1] if s.is_closed]  # the newest one has the number to go on from
        total_bytes = new_bytes + sum(s.size_bytes for s in self._segments)
        for segment in full:
            if total_bytes <= self.max_bytes:
                return
            total_bytes -= segment.size_bytes
            self._segments.remove(segment)
            segment.path.unlink(missing_ok=True)
            self.append("lost", segments=1, bytes=segment.size_bytes, segment=segment.path.name)

    def take_back(self, segment: Segment) -> None:
        """Keep what a dead thread left for the next new one, if it has room."""
        with self._lock:
            if segment.free_bytes > REUSE_BYTES:
                self._returned.append(segment)
            else:
                self._seal(segment)

    def _seal(self, segment: Segment) -> None:
        """Close a segment and say its checksum, once: nothing can be written to it any more."""
        segment.close()
        if segment.path.name in self._sealed or self._folder is None:
            return
        try:
            found = checksum.of_file(segment.path)
            self._folder.append("seal", segment=segment.path.name, bytes=found.size_bytes, crc32=found.crc32)
        except own_failure(OSError):  # the disk is full, or a signal handler that records too has dropped the segment
            return
        self._sealed.add(segment.path.name)

    def close(self) -> None:
        """End this process's part of the Recording."""
        with self._lock:
            if self._lost and self._folder is None:  # it never could be made, maybe now
                self._retry_ns = 0
                self._open()
            if self._folder is None:
                return
            for segment in self._segments:
                self._seal(segment)
            self._next_path().unlink(missing_ok=True)
            self._settle_hooks()
            self._say_ns = 0
            self._open()
            if self._is_behind:
                self.lose()
            counts = {slot: count for slot, count in enumerate(self._counts) if count}
            are_sealed = all(segment.path.name in self._sealed for segment in self._segments)
            segments = len(self._segments) if are_sealed else None
            self.append("end", end_ns=_now_ns(), segments=segments, counts=counts)
            self._folder.close()


def _thread_name() -> str:
    """Of this thread, cut to a length and an alphabet that any record can hold."""
    name = threading.current_thread().name
    if name.startswith("Dummy-"):  # not made by Python, which has no better name for it; the kernel may
        try:
            name = _kernel_name()
        except own_failure(OSError):
            pass
    return plain_text(name[:256])


def _kernel_name() -> str:
    """Of this thread; one that it only inherited from its process, as those of Ray's pools do, says nothing."""
    own, main = (
        Path(f"/proc/self/task/{task}/comm").read_text(errors="replace").strip()
        for task in (threading.get_native_id(), os.getpid())
    )
    # Ray renames its main thread with every call ("ray::Worker.step"); a pool has the name of when it was made.
    return "thread" if re.split("[.:]", own)[0] == re.split("[.:]", main)[0] else own


_is_bequeathed = False


def _stop_at_exit() -> None:
    """Children of multiprocessing leave without running atexit's functions; they run its finalizers."""
    global _is_bequeathed
    atexit.register(stop)
    util: Any = sys.modules.get("multiprocessing.util")
    if util is None:
        return
    _finalize(None)
    if not _is_bequeathed:  # a child begins by forgetting all finalizers, those too that its own main module made
        util.register_after_fork(stop, _finalize)
        _is_bequeathed = True


def _finalize(_: object) -> None:
    from multiprocessing.process import parent_process
    from multiprocessing.util import Finalize

    if parent_process() is not None:
        Finalize(None, stop, exitpriority=-100)


# ---------------------------------------------------------------- start and stop


def start(
    folder: str | os.PathLike[str] | None = None,
    *,
    role: str = "main",
    rank: int | None = None,
    device: Mapping[str, Any] | None = None,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    max_bytes: int | None = None,
) -> Path | None:
    """Record this process from here on.

    Processes that name the folder of a run that is still going on join it. A folder that holds a finished Recording is
    left alone: a numbered one beside it is used, and said.

    Args:
        folder: Of the Recording; `rltrace-runs/<time>` by default. Ignored under `rltrace exec`, where `RLTRACE_DIR` is
            set, and where this process records already: that folder is used, and said.
        role: What this process is: "main", "driver", "worker", "engine".
        rank: Of its device in the run.
        device: {"host": ..., "uuid": ...} of the device it works on.
        name: What a reader calls it, where it has no rank.
        config: Of the run, kept in the manifest with secrets redacted.
        max_bytes: Bound on what this process keeps; the oldest is dropped when it is reached, and counted. A process
            that records already, as under `rltrace exec`, keeps to it from its next segment on. A forked child has the
            same bound for what it records itself; any other child has the one that it gives itself.

    Of these, what is not of its type is left out, and a line on stderr says so.

    Returns:
        The folder; None where recording is impossible, with one line on stderr that says why. Never raises.
    """
    who = {"role": role, "rank": rank, "device": device, "name": name}
    if (recorder := current()) is not None:
        identify(**{key: value for key, value in who.items() if value is not None and (key, value) != ("role", "main")})
        recorder.keep_to(max_bytes)
        _say_where(folder, recorder.recording, rank)
        return recorder.recording
    start_ns = _now_ns()
    try:
        inherited = os.environ.get(DIR_VARIABLE)
        key = process_key(start_ns)
        recording = _inherited(config, key) if inherited else _claim(folder, config, key)
        if inherited:
            _say_where(folder, recording, rank)
    except own_failure() as error:
        complain(f"not recording: {error}")
        return None
    return join(recording, start_ns=start_ns, max_bytes=max_bytes, **who)


def join(
    recording: str | os.PathLike[str], *, start_ns: int | None = None, max_bytes: int | None = None, **who: Any
) -> Path | None:
    """Record this process into a Recording that another process made.

    Args:
        recording: Its folder.
        start_ns: When this process began to record; now by default.
        max_bytes: As of `start`.
        **who: role, rank, device and name of this process.

    Returns:
        The folder; None where recording is impossible, with one line on stderr. Never raises.
    """
    global _recorder, _local
    if (recorder := current()) is not None:
        recorder.keep_to(max_bytes)
        return recorder.recording
    try:
        path = Path(recording).absolute()
        recorder = Recorder(path, start_ns=start_ns, max_bytes=max_bytes, **who)
    except own_failure() as error:
        complain(f"not recording: {recording} cannot be written: {error}")
        return None
    _local = threading.local()
    _recorder = recorder
    return path


def stop() -> None:
    """End this process's part of the Recording; spans still open stay open in it. Never raises."""
    global _recorder, _paused, _local
    if current() is not None:
        for ending in _endings:
            ending()
    recorder, _recorder, _paused = current(), None, None
    _local = threading.local()
    if recorder is None:
        return
    atexit.unregister(stop)
    if os.environ.get(PARENT_VARIABLE) == recorder.key:
        os.environ.pop(DIR_VARIABLE, None)
        os.environ.pop(PARENT_VARIABLE, None)
        os.environ.pop(HOOKS_VARIABLE, None)
    try:
        recorder.close()
    except own_failure() as error:
        complain(f"the Recording {recorder.recording} is not ended cleanly: {error}")


def identify(**who: Any) -> None:
    """Say more about this process: role, rank, device, name. Never raises.

    Args:
        **who: As of `start`; what is not of its type is left out, and a line on stderr says so.
    """
    if (recorder := current()) is not None:
        recorder.identify(**who)


def unavailable(what: str, reason: str) -> None:
    """Say why this process cannot tell something."""
    if (recorder := current()) is not None:
        recorder.append("unavailable", what=what, reason=reason)


def current() -> Recorder | None:
    """The recorder of this process, paused or not; None if this process is not recorded."""
    return _recorder if _recorder is not None else _paused


def pause() -> None:
    """Record nothing in this process until `resume`; its hooks stay in place and do nothing.

    The Recording says from when to when. A span that is open now and ends meanwhile stays open in it.
    """
    global _recorder, _paused
    if _recorder is None:
        return
    _recorder.append("pause", ts_ns=_now_ns())
    _recorder, _paused = None, _recorder
    for switch in _switches:
        switch(False)


def resume() -> None:
    """Go on recording after `pause`."""
    global _recorder, _paused
    if _paused is None:
        return
    for switch in _switches:
        switch(True)
    _recorder, _paused = _paused, None
    _recorder.append("resume", ts_ns=_now_ns())


def is_recording() -> bool:
    """Whether this process records now: it was started, and not paused."""
    return _recorder is not None


def has_recorded() -> bool:
    """Whether it records now, and there is an event of it."""
    return _recorder is not None and _recorder.pid == os.getpid() and bool(_recorder._segments)


@contextlib.contextmanager
def writing_to(segment: Segment) -> Iterator[None]:
    """Let this thread's records go to another segment meanwhile, one that is not of the Recording."""
    own = _local.__dict__
    before = own.get("write")
    own["write"] = segment.write
    try:
        yield
    finally:
        del own["write"]
        if before is not None:
            own["write"] = before


def when_switched(switch: Callable[[bool], None]) -> None:
    """Call `switch(False)` at every `pause` and `switch(True)` at every `resume` of this process."""
    _switches.append(switch)


def when_stopped(ending: Callable[[], None]) -> Callable[[], None]:
    """Call `ending` when this process stops recording, while it still does; must not raise. Returns what undoes it."""
    _endings.append(ending)
    return lambda: _endings.remove(ending)


def _inherited(config: Mapping[str, Any] | None, owner: str) -> Path:
    """The Recording that the environment names; for the first process of a run that the user began, as `start` does."""
    recording = cluster.recording_here(os.environ)
    began_elsewhere = os.environ.get(PARENT_VARIABLE) or os.environ.get(cluster.RUN_ID_VARIABLE)
    return recording if began_elsewhere else _claim(recording, config, owner)


def _claim(folder: str | os.PathLike[str] | None, config: Mapping[str, Any] | None, owner: str) -> Path:
    """The folder to record into: made, joined if its run goes on, or numbered if it is another run's."""
    wanted = Path(folder) if folder is not None else default_folder()
    for path in itertools.chain([wanted], (wanted.with_name(f"{wanted.name}-{n}") for n in itertools.count(2))):
        try:
            manifest.create(path, owner=owner, command=sys.orig_argv, config=config)
        except FileExistsError:
            if not manifest.is_live(path):
                continue
        if path != wanted:
            say(f"{wanted} holds another run already; recording into {path}")
        return path
    raise AssertionError("unreachable: the numbers do not end")


def _say_where(named: str | os.PathLike[str] | None, recording: Path, rank: int | None) -> None:
    """Say where this process records if its program named another folder; of several ranks the first one does."""
    if named is None or rank:
        return
    with suppress_own(Exception):  # a name that is none, or a working directory that is gone
        # On another host than the run's its folder is not the one that records.
        used = {os.path.abspath(folder) for folder in (recording, os.environ.get(DIR_VARIABLE, recording))}
        if os.path.abspath(named) not in used:
            say_once(f"recording into {recording}, the folder of the run that this process is of, not into {named}")


def default_folder() -> Path:
    """`rltrace-runs/` and the time to the second."""
    return Path("rltrace-runs") / time.strftime("%Y%m%d-%H%M%S")


def _after_fork_in_child() -> None:
    global _local
    _local = threading.local()  # first: what it held was the parent's
    if (recorder := current()) is not None:
        recorder.forget_parent()


if hasattr(os, "register_at_fork"):  # readers run where nothing forks
    os.register_at_fork(after_in_child=_after_fork_in_child)
