"""What a program calls: spans, counters and flows, appended to memory-mapped segments.

A record costs one call to encode it and one to append it, both in C. There is no thread and no buffer: what was
written before a `kill -9` is in the Recording. A failure of ours is counted as a lost event and never reaches the
traced program. The wire format is in `docs/format.md`.

Where the native library was built (`native/spans.c`), the beginning and the end of a span, and an automatic span that
is over, are one call each. It writes the same bytes, and leaves what is not hot to the functions here.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any, Literal, cast

from rltrace.dependencies import msgspec
from rltrace.events import AUTOMATIC, KERNEL, OPERATOR, PHASES, STEP_FIGURES, is_of_bytes
from rltrace.host import clock
from rltrace.host.interruption import own_failure
from rltrace.record import native
from rltrace.record.encoding import encode, encode_anyhow
from rltrace.record.error_message import error_args, message_of
from rltrace.record.segment import Segment
from rltrace.record.unwritten import Unsaid, Unwritten
from rltrace.record.writer import Held, Recorder, typed_spans

_knows_asyncio = False
"""Whether the next three are asyncio's. Until something is recorded, they say that no task runs."""
_current_tasks: Any = {}
"""{loop: task} over all threads; True where Python has no such dictionary. `asyncio.current_task` is Python before
3.12, and `_get_running_loop` a system call before 3.12: a look at it spares both while no task runs."""
_task_of: Callable[[Any], Any] = _current_tasks.get


def _get_running_loop() -> Any:
    return None


_now_ns = clock.now_ns
_ARRAY_OF_4 = b"\x94"
"""How the record of a span's end begins, before the time of the span's beginning."""
_local = threading.local()
"""`.write` appends to this thread's segment; absent until the thread's first record."""
_recorder: Recorder | None = None
_paused: Recorder | None = None
"""The recorder while `pause` holds it back. `_recorder` is None then, and recording costs as little as without
tracing."""


# ---------------------------------------------------------------- who records


def current() -> Recorder | None:
    """Return the recorder of this process, paused or not; None if this process is not recorded."""
    return _recorder if _recorder is not None else _paused


def is_recording() -> bool:
    """Return whether this process records now: it was started, and is not paused."""
    return _recorder is not None


def has_recorded() -> bool:
    """Return whether this process records now and has recorded an event."""
    return _recorder is not None and _recorder.has_written


def record_with(recorder: Recorder | None) -> None:
    """Send this process's records to a recorder from here on; None drops them."""
    global _recorder, _paused, _local
    if recorder is not None and not _knows_asyncio:
        _learn_of_tasks()
    _recorder, _paused = recorder, None
    _local = threading.local()


def _learn_of_tasks() -> None:
    """Import asyncio: what records nothing need not wait for it, which is a third of importing all of this."""
    global _knows_asyncio, _current_tasks, _get_running_loop, _task_of
    from asyncio import _get_running_loop, current_task

    if sys.version_info < (3, 14):
        from asyncio.tasks import _current_tasks  # type: ignore[attr-defined]

        _task_of = _current_tasks.get
    else:
        _current_tasks, _task_of = True, current_task
    _knows_asyncio = True
    if native.LIBRARY is not None:
        native.LIBRARY.use(sys.modules[__name__], _get_running_loop, _task_of)


def hold(on: bool) -> None:
    """Record nothing until this is called with False."""
    global _recorder, _paused
    _recorder, _paused = (None, current()) if on else (current(), None)


def forget_threads() -> None:
    """Drop the segments of all threads in a forked child: they are its parent's."""
    global _local
    _local = threading.local()
    native.forget_segment()


@contextlib.contextmanager
def writing_to(segment: Segment) -> Iterator[None]:
    """Write this thread's records meanwhile to another segment, which is not part of the Recording."""
    own = _local.__dict__
    before = own.get("write")
    own["write"] = segment.write
    native.forget_segment()
    try:
        yield
    finally:
        del own["write"]
        if before is not None:
            own["write"] = before
        native.forget_segment()


# ---------------------------------------------------------------- spans


class NoSpan:
    """What `span` returns while nothing is recorded."""

    __slots__ = ()
    start_ns = 0

    def __enter__(self) -> NoSpan:
        return self

    def __exit__(self, kind: object = None, error: object = None, traceback: object = None, /) -> None:
        return None

    async def __aenter__(self) -> NoSpan:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def end_interrupted(self, interruption: BaseException | None) -> None:
        """Do nothing."""

    def set(self, /, **late_args: Any) -> None:
        """Do nothing."""


_NO_SPAN = NoSpan()

newest: Any = None
"""The span that was entered last, in any thread. It tells a hook which span an error from outside has taken from it."""


class _Enterable:
    """Enters and leaves a span. The record of its beginning is the Struct itself, and that of its end a tuple."""

    __slots__ = ()
    task: int
    start_ns: int
    args: dict[str, Any] | None
    """The arguments of the beginning's record; once that is written, the arguments that the end will add."""

    def __enter__(self: Any) -> Any:
        global newest
        if _recorder is None:
            return self
        if _current_tasks:
            loop = _get_running_loop()
            if loop is not None:
                task = _task_of(loop)
                if task is not None:  # None: a callback of the loop
                    self.task = id(task)
        self.start_ns = _now_ns()
        newest = self
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
            self.end_interrupted(interruption)
            raise

    def end_interrupted(self, interruption: BaseException | None) -> None:
        """End the span if it has begun, and an error from outside has kept its hook from ending it."""
        if self.start_ns and not _is_written(_ARRAY_OF_4 + encode(self.start_ns)):
            self._end_interrupted(interruption)

    def _end_interrupted(self, interruption: BaseException | None) -> None:
        args = {**({} if interruption is None else error_args(interruption)), **(self.args or {})}
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


class AutomaticSpan(LiveSpan, array_like=True, gc=False, tag=AUTOMATIC):
    """A span that a hook makes. On the wire: `[0, name, task, start_ns, args, true]`."""


_make_span: Callable[..., Any] = LiveSpan
"""What `span` makes; in a process where spans are watched, or not all are recorded, it makes something else."""
_make_automatic_span: Callable[..., Any] = AutomaticSpan


# Fields that only a keyword sets come last on the wire, so `ok` is the last byte here too.
class TypedSpan(_Enterable, msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """A span whose arguments are declared. On the wire: `[-number, *arguments, task, start_ns, nil, true]`."""

    task: int = 0
    start_ns: int = 0
    args: dict[str, Any] | None = None
    ok: Literal[True] = True


def _kind_of(tag: int | None, fields: list[str]) -> tuple[bytes, tuple[str, ...]]:
    """Return what begins the record of a span of one type, and the names of the fields that come next.

    Args:
        tag: Of the type; None if it has none.
        fields: Those that precede `task`, `start_ns`, `args` and `ok`.
    """
    values = (tag is not None) + len(fields) + 4
    of_array = encode([None] * values)[:-values]
    return of_array + (b"" if tag is None else encode(tag)), tuple(fields)


_kinds: dict[type, tuple[bytes, tuple[str, ...]]] = {
    LiveSpan: _kind_of(None, ["name"]),
    AutomaticSpan: _kind_of(AUTOMATIC, ["name"]),
}
"""How the record of each type of span begins, for the native library."""


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
    return _declared(name, fields)


def automatic_typed_span(name: str, /, **fields: type) -> Callable[..., TypedSpan]:
    """Declare, for a hook, what `typed_span` declares for a program."""
    return _declared(name, fields, automatic=True)


def _declared(name: str, fields: dict[str, type], **said: Any) -> Callable[..., TypedSpan]:
    if not isinstance(name, str):
        raise TypeError(f"the name of a span must be text, not {name!r}")
    number = -1 - len(typed_spans)
    # Called by position, so the fields need no names here: an argument may be called `task` or `args`.
    numbered = [(f"field{n}", type_) for n, type_ in enumerate(fields.values())]
    declared = msgspec.defstruct(f"TypedSpan{-number}", numbered, bases=(TypedSpan,), tag=number, gc=False)
    _kinds[declared] = _kind_of(number, [field for field, _ in numbered])
    line = {"number": number, "name": name, "fields": list(fields), **said}
    typed_spans.append(line)
    if (recorder := current()) is not None:
        recorder.append("type", **line)
    return cast("Callable[..., TypedSpan]", declared)


def span(name: str, /, **args: Any) -> LiveSpan | NoSpan:
    """Make a named interval of this thread or asyncio task, for `with` and `async with`.

    Args:
        name: `subject.action`.
        **args: Recorded with the beginning, so they are known even if the process dies inside.
    """
    return _NO_SPAN if _recorder is None else _make_span(name, 0, 0, args)


def automatic_span(name: str, /, **args: Any) -> LiveSpan | NoSpan:
    """Make a span for a hook: readers tell it from the program's own spans, whatever their names."""
    return _NO_SPAN if _recorder is None else _make_automatic_span(name, 0, 0, args)


def phase(name: str, /, **args: Any) -> LiveSpan | NoSpan:
    """Make a span that partitions its rank's step: phases of one rank do not overlap."""
    return _NO_SPAN if _recorder is None else _make_span(name, 0, 0, {**args, "phase": True})


def end_lost(before: Any, interruption: BaseException) -> None:
    """End the span that was entered last, if it was in this thread, and no hook got it.

    Args:
        before: `newest` before the hook began.
        interruption: The error from outside that came between.
    """
    if newest is not before and _is_written(encode(newest.start_ns)):
        newest.end_interrupted(interruption)


# ---------------------------------------------------------------- watching, and being brief

_Watcher = tuple[Callable[[dict[str, Any]], Any], Callable[[Any], None]]
_watchers: dict[str, list[_Watcher]] = {}
"""Who is told when spans of a name begin and end."""
_look: Callable[[], None] | None = None
"""Who is told where phases begin."""
_always: frozenset[str] | None = None
"""Names of the spans that are recorded anyway, while not everything is; None while everything is."""
_encode_sample = encode
_phase_ends: list[Callable[[str, int, int], None]] = []
"""Who is told when a phase has ended: its name, its beginning and its end."""
_sample_watchers: list[Callable[[str, float], None]] = []
"""Who is told of each sample: its name and its value."""


def watch_spans(watched: str, begin: Callable[[dict[str, Any]], Any], end: Callable[[Any], None]) -> Callable[[], None]:
    """Report the spans of a name that are made from here on, without typed ones.

    It costs nothing if nobody watches.

    Args:
        watched: Name of the spans.
        begin: Called with the arguments before a span begins, which it may change; must not raise.
        end: Called with what `begin` returned after the span has ended; must not raise.

    Returns:
        What undoes it.
    """
    watcher = begin, end
    _watchers.setdefault(watched, []).append(watcher)
    _choose_makers()

    def undo() -> None:
        if watcher in _watchers.get(watched, []):
            _watchers[watched].remove(watcher)
            _choose_makers()

    return undo


def watch_phases(look: Callable[[], None] | None) -> None:
    """Call `look` where a phase begins, before it does; it must not raise. None: nobody wants that any more."""
    global _look
    _look = look
    _choose_makers()


def watch_phase_ends(told: Callable[[str, int, int], None]) -> Callable[[], None]:
    """Call `told` with name, beginning and end of each phase of this process that ends from here on; it must not raise.
    Returns what undoes it."""
    _phase_ends.append(told)
    _choose_makers()

    def undo() -> None:
        _phase_ends.remove(told)
        _choose_makers()

    return undo


def watch_samples(told: Callable[[str, float], None]) -> Callable[[], None]:
    """Call `told` with name and value of each sample that is taken from here on; it must not raise. Returns what undoes
    it."""
    _sample_watchers.append(told)
    _choose_encoder()

    def undo() -> None:
        _sample_watchers.remove(told)
        _choose_encoder()

    return undo


def phase_ended(name: str, start_ns: int) -> None:
    """Tell whoever watches that a phase has ended."""
    for told in _phase_ends:
        told(name, start_ns, _now_ns())


def phase_begins() -> None:
    """Tell whoever watches phases that one is about to begin."""
    if _look is not None:
        _look()


def be_brief(always: frozenset[str] | None) -> None:
    """Record only spans of these names, phases, spans that an exception leaves, and samples of bytes and of a step's
    figures; None: everything."""
    global _always
    if always != _always:
        _always = always
        _choose_encoder()
        if always is not None:
            _make_typed_brief()
        _choose_makers()


def _choose_encoder() -> None:
    global _encode_sample
    kept = encode if _always is None else _encode_if_kept
    _encode_sample = _encode_and_tell if _sample_watchers else kept


def _encode_and_tell(record: Any) -> bytes:
    _tell_of_sample(record[0], record[2])
    return _encode_if_kept(record)


def _tell_of_sample(name: str, value: float) -> None:
    for told in _sample_watchers:
        told(name, value)


def _choose_makers() -> None:
    global _make_span, _make_automatic_span
    _make_span, _make_automatic_span = _maker(LiveSpan), _maker(AutomaticSpan)


def _maker(kind: type[LiveSpan]) -> Callable[..., Any]:
    """Return what makes spans of a kind: the kind itself if nobody watches."""
    is_watched = _look or _always is not None or _phase_ends or any(_watchers.values())
    return _attentive_maker(kind) if is_watched else kind


@functools.cache
def _attentive_maker(kind: type[LiveSpan]) -> Callable[..., Any]:
    class WatchedSpan(kind, dict=True, gc=True):  # type: ignore[call-arg, misc, valid-type]
        def __enter__(self) -> Any:
            watchers = list(_watchers.get(self.name, ()))
            args = {} if self.args is None else self.args
            self.tokens = [(end, begin(args)) for begin, end in watchers]
            return kind.__enter__(self)

        def __exit__(self, *error: Any) -> None:
            kind.__exit__(self, *error)
            for end, token in self.tokens:
                end(token)

    class WatchedPhase(WatchedSpan, dict=True, gc=True):  # type: ignore[call-arg]
        def __exit__(self, *error: Any) -> None:
            WatchedSpan.__exit__(self, *error)
            phase_ended(self.name, self.start_ns)

    def make(name: str, task: int, start_ns: int, args: dict[str, Any]) -> Any:
        is_phase = name in PHASES or args.get("phase") is True
        if is_phase:
            phase_begins()
            if _phase_ends:
                return WatchedPhase(name, task, start_ns, args)
        if _watchers.get(name):
            return WatchedSpan(name, task, start_ns, args)
        if _always is None or is_phase or name in _always:
            return kind(name, task, start_ns, args)
        return Unwritten(name, kind is AutomaticSpan, args, _write_failed)

    return make


@functools.lru_cache(4096)
def _is_always_sampled(name: str) -> bool:
    return is_of_bytes(name) or name in STEP_FIGURES


def _is_kept(name: str) -> bool:
    return _always is None or _is_always_sampled(name)


def _encode_if_kept(record: Any) -> bytes:
    """Encode a sample; one that is not recorded is no bytes at all."""
    return encode(record) if _is_kept(record[0]) else b""


def _write_first(data: bytes) -> None:
    """Stand for the segment of a thread that has recorded nothing: a record must get one first."""
    if data:
        raise ValueError("this thread has no segment yet")


def _write_failed(name: str, is_automatic: bool, start_ns: int, args: dict[str, Any]) -> None:
    """Write a span that an exception has left, which was not written when it began."""
    record = (name, 0, start_ns, _now_ns(), args, True)
    _write((AUTOMATIC, *record) if is_automatic else record)


_is_typed_brief = False


def _make_typed_brief() -> None:
    """Have typed spans ask from here on whether they are recorded: they are made without a function of ours."""
    global _is_typed_brief
    if _is_typed_brief:
        return
    _is_typed_brief = True
    enter, leave = _Enterable.__enter__, _Enterable.__exit__
    end_interrupted, add = _Enterable.end_interrupted, _Enterable.set

    def enter_briefly(span: Any) -> Any:
        if _always is None or _recorder is None or _declaration(span)["name"] in _always:
            return enter(span)
        span.start_ns, span.args = _now_ns(), Unsaid()
        return span

    def leave_briefly(span: Any, kind: Any, error: Any = None, traceback: object = None, /) -> None:
        if span.args.__class__ is not Unsaid:
            leave(span, kind, error, traceback)
        elif kind is not None and kind is not GeneratorExit and _recorder is not None:
            said = _declaration(span)
            values = {field: getattr(span, f"field{n}") for n, field in enumerate(said["fields"])}
            args = {**values, **span.args, "error": kind.__name__, **message_of(error)}
            _write_failed(said["name"], said.get("automatic", False), span.start_ns, args)

    def end_briefly(span: Any, interruption: BaseException | None) -> None:
        if span.args.__class__ is not Unsaid:
            end_interrupted(span, interruption)
        elif interruption is not None:
            leave_briefly(span, type(interruption), interruption)

    def add_briefly(span: Any, /, **late_args: Any) -> None:
        if span.args.__class__ is Unsaid:
            span.args.update(late_args)
        else:
            add(span, **late_args)

    TypedSpan.__enter__, TypedSpan.__exit__ = enter_briefly, leave_briefly  # type: ignore[method-assign]
    TypedSpan.end_interrupted, TypedSpan.set = end_briefly, add_briefly  # type: ignore[method-assign, assignment]


def _declaration(span: Any) -> dict[str, Any]:
    number: int = span.__struct_config__.tag
    return typed_spans[-1 - number]


# ---------------------------------------------------------------- finished spans, samples and arrows


def span_at(name: str, start_ns: int, end_ns: int, /, *, lane: int = 0, **args: Any) -> None:
    """Record a span that is over, with times read elsewhere from `clock.now_ns`.

    A span with impossible times (negative, more than 63 bits, or an end before the start) is counted as lost.

    Args:
        name: `subject.action`.
        start_ns: First instant, CLOCK_MONOTONIC.
        end_ns: First instant after it.
        lane: Spans of one lane nest; 0 is the thread's own lane, any other number below 2**63 a row of its own (a
            request, a stream).
        **args: Recorded with it.
    """
    _write_finished((name, lane, start_ns, end_ns, args, True), start_ns, end_ns, lane)


def automatic_span_at(name: str, start_ns: int, end_ns: int, /, *, lane: int = 0, **args: Any) -> None:
    """Record, for a hook, a span that is over, as `span_at` does for a program."""
    _write_finished((AUTOMATIC, name, lane, start_ns, end_ns, args, True), start_ns, end_ns, lane)


def begin_automatic(name: str, start_ns: int, args: dict[str, Any]) -> bool:
    """Begin, for a hook, a span of this thread or task whose beginning was read a moment ago.

    Returns:
        Whether that was written, so that `end_automatic` has to end it, in whatever thread. False where nothing is
        recorded, or not everything is: then it is for `automatic_span_at`, once it is over.
    """
    if _recorder is None or _always is not None:
        return False
    loop = _get_running_loop() if _current_tasks else None
    task = None if loop is None else _task_of(loop)
    _write((AUTOMATIC, name, 0 if task is None else id(task), start_ns, args, True))
    return True


def end_automatic(start_ns: int, end_ns: int, late_args: dict[str, Any] | None) -> None:
    """End what `begin_automatic` began."""
    if _recorder is not None:
        _write((start_ns, end_ns, late_args, True))


def _write_finished(record: tuple[Any, ...], start_ns: int, end_ns: int, lane: int) -> None:
    if _recorder is None:
        return
    if _always is not None and not _is_kept_finished(record):
        return
    if 0 <= _whole(start_ns) <= _whole(end_ns) < _END_NS and -_END_NS < _whole(lane) < _END_NS:
        _write(record)
    else:
        _recorder.lose()


def _is_kept_finished(record: tuple[Any, ...]) -> bool:
    name, args = record[-6], record[-2]
    if _always is None or name in _always or name in PHASES or name.startswith((KERNEL, OPERATOR)):
        return True
    return "error" in args or args.get("phase") is True


_END_NS = 2**63
"""No clock shows this time or a later one."""


def _whole(value: Any) -> Any:
    """Return a whole number as it is, and anything else as a number that is out of range."""
    return value if value.__class__ is int or isinstance(value, Integral) else _END_NS


def counter(name: str, value: float, /) -> None:
    """Record a sample of a value; its name ends with the unit (`allocated_bytes`)."""
    if _recorder is None:
        return
    try:
        _local.write(_encode_sample((name, _now_ns(), value, True)))
    except own_failure():
        if _sample_watchers and not hasattr(_local, "write"):  # the thread's first one: it was not encoded
            _tell_of_sample(name, value)
        if _is_kept(name):
            _write_slowly((name, _now_ns(), value, True))
        else:  # the thread has no segment, and needs none yet
            _local.__dict__.setdefault("write", _write_first)


def counter_at(name: str, ts_ns: int, value: float, /) -> None:
    """Record a value with the time at which it held, read elsewhere from `clock.now_ns`; lost if no clock shows that
    time."""
    if _recorder is None:
        return
    if _always is not None and not _is_kept(name):
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
    if _always is not None:
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
    """Write a thread's first record, one that its segment has no room for, or one that cannot be written at all."""
    recorder = _recorder
    if recorder is None:  # stopped while the span was open
        return
    try:
        data = encode_anyhow(record)
    except own_failure():
        recorder.lose()
    else:
        _write_to_new_segment(recorder, data)


SMALL_BYTES = 512
"""If a record of no more finds no room on a full disk, no other one is tried until the disk is asked again."""


def _write_to_new_segment(recorder: Recorder, data: bytes) -> None:
    """Get a segment for this thread, and write to it.

    A signal handler that records while its thread gets a segment must not get one too: a timer that fires faster than
    that takes would nest without end. Its records wait, and the call that it interrupted writes them.
    """
    local = _local  # `stop`, in another thread, puts another one in its place
    left: list[bytes] | None = getattr(local, "waiting", None)
    if left is not None and _is_called_below(_write_to_new_segment):
        left.append(data)
        return
    # Else an error from outside has kept an earlier call from its end.
    waiting = [*(left or ()), data]
    try:
        while waiting:
            local.waiting = waiting
            while waiting:
                try:
                    recorder.write(local, waiting)
                except own_failure():
                    recorder.lose()
                    lost = waiting.pop(0)
                    # To come here takes as long as 100 spans.
                    if recorder.is_short_of_space and len(lost) <= SMALL_BYTES:
                        local.write = recorder.lose_while_short
            local.__dict__.pop("waiting", None)  # what came just before is written in another round
    finally:
        if waiting:  # interrupted
            recorder.lose(len(waiting))
            waiting.clear()
        local.__dict__.pop("waiting", None)


def _is_called_below(function: Callable[..., Any]) -> bool:
    """Return whether a call of the function is under way in this thread, besides the one that asks."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _is_written(part: bytes) -> bool:
    """Return whether this thread's segment has a part of a record; no two spans begin at the same time."""
    held: Held | None = getattr(_local, "held", None)
    return held is not None and held.segment.has(part)


# ---------------------------------------------------------------- natively

PLAIN = _Enterable.__enter__, _Enterable.__exit__, automatic_span, automatic_span_at, counter
"""What records where there is no library, and what a library leaves all that is not hot to."""


def record_by(enter: Any, leave: Any, make: Any, write: Any, count: Any) -> None:
    """Record by functions that do what those of `PLAIN` do."""
    global automatic_span, automatic_span_at, counter
    _Enterable.__enter__, _Enterable.__exit__ = enter, leave  # type: ignore[method-assign]
    automatic_span, automatic_span_at, counter = make, write, count


FASTEST = PLAIN
"""What records: the library's functions where there is one."""
if native.LIBRARY is not None:
    native.LIBRARY.use(sys.modules[__name__], _get_running_loop, _task_of)
    FASTEST = native.LIBRARY.standing_for(_Enterable, _kinds, _NO_SPAN, encode, PLAIN)
    record_by(*FASTEST)
