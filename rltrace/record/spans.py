"""What a program calls: spans, counters and flows, appended to memory-mapped segments.

A record costs one call to encode it and one to append it, both in C. There is no thread and no buffer: what was
written before a `kill -9` is in the Recording. A failure of ours is counted as a lost event and never reaches the
traced program. The wire format is in `docs/format.md`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from asyncio import _get_running_loop
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any, Literal, cast

from rltrace.dependencies import msgspec
from rltrace.host import clock
from rltrace.host.interruption import own_failure
from rltrace.record.encoding import encode, encode_anyhow
from rltrace.record.error_message import message_of
from rltrace.record.segment import Segment
from rltrace.record.writer import Held, Recorder, typed_spans

if sys.version_info < (3, 14):
    # {loop: task} over all threads. `asyncio.current_task` is Python before 3.12, and `_get_running_loop` a system
    # call before 3.12: a look at this dictionary spares both while no task runs.
    from asyncio.tasks import _current_tasks  # type: ignore[attr-defined]

    _task_of = _current_tasks.get
else:
    from asyncio import current_task as _task_of

    _current_tasks = True

_now_ns = clock.now_ns
_ARRAY_OF_4 = b"\x94"
"""How the record of a span's end begins, before the time of the span's beginning."""
_local = threading.local()
"""`.write` appends to this thread's segment; absent until the thread's first record."""
_recorder: Recorder | None = None
_paused: Recorder | None = None
"""The recorder while `pause` holds it back: then `_recorder` is None, and recording costs what it costs untraced."""


# ---------------------------------------------------------------- who records


def current() -> Recorder | None:
    """The recorder of this process, paused or not; None if this process is not recorded."""
    return _recorder if _recorder is not None else _paused


def is_recording() -> bool:
    """Whether this process records now: it was started, and not paused."""
    return _recorder is not None


def has_recorded() -> bool:
    """Whether it records now, and there is an event of it."""
    return _recorder is not None and _recorder.has_written


def record_with(recorder: Recorder | None) -> None:
    """Have this process's records go to a recorder from here on; None: nowhere."""
    global _recorder, _paused, _local
    _recorder, _paused = recorder, None
    _local = threading.local()


def hold(on: bool) -> None:
    """Record nothing until this is called with False."""
    global _recorder, _paused
    _recorder, _paused = (None, current()) if on else (current(), None)


def forget_threads() -> None:
    """In a forked child: what its threads' segments were is its parent's."""
    global _local
    _local = threading.local()


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
            _local.write(encode(self))
            self.args = None
        except own_failure():
            _write_slowly(self)
            self.args = None
        except BaseException as interruption:  # `with` never calls `__exit__` then
            if _is_written(encode(self.start_ns)):
                self._end_interrupted(interruption)
            raise
        return self

    # The three arguments are spelled out: `*_` would build a tuple. Hooks end a span with the first one or two only.
    def __exit__(self, kind: type[BaseException] | None, error: object = None, traceback: object = None, /) -> None:
        if _recorder is None:
            return
        try:
            end_ns = _now_ns()
            if kind is not None and kind is not GeneratorExit:  # closing a generator is no error
                self.set(error=kind.__name__, **message_of(error))
            _local.write(encode((self.start_ns, end_ns, self.args, True)))
        except own_failure():
            _write_slowly((self.start_ns, end_ns, self.args, True))
        except BaseException as interruption:
            if not _is_written(_ARRAY_OF_4 + encode(self.start_ns)):
                self._end_interrupted(interruption)
            raise

    def _end_interrupted(self, interruption: BaseException) -> None:
        """Write the end of a span that an error from outside interrupted, so that it does not stay open."""
        args = {"error": type(interruption).__name__, **message_of(interruption), **(self.args or {})}
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
    number = -1 - len(typed_spans)
    # Called by position, so the fields need no names here: an argument may be called `task` or `args`.
    numbered = [(f"field{n}", type_) for n, type_ in enumerate(fields.values())]
    declared = msgspec.defstruct(f"TypedSpan{-number}", numbered, bases=(TypedSpan,), tag=number, gc=False)
    line = {"number": number, "name": name, "fields": list(fields)}
    typed_spans.append(line)
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
        _local.write(encode((name, _now_ns(), value, True)))
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
        _local.write(encode(record))
    except own_failure():
        _write_slowly(record)


def _write_slowly(record: Any) -> None:
    """The first record of a thread, one that its segment has no room for, or one that cannot be written at all."""
    recorder = _recorder
    if recorder is None:  # stopped while the span was open
        return
    try:
        data = encode_anyhow(record)
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
                recorder.write(local, waiting)
            except own_failure():
                recorder.lose()
                del waiting[0]
    finally:
        del local.waiting
        if waiting:  # interrupted
            recorder.lose(len(waiting))


def _is_written(part: bytes) -> bool:
    """Whether this thread's segment has a part of a record; a span's time of beginning is no other's."""
    held: Held | None = getattr(_local, "held", None)
    return held is not None and held.segment.has(part)
