"""Spans of places that a step passes hundreds of times, with the same arguments each time.

Between two of these a program runs for a millisecond, and leaves nothing of ours in the processor's caches. What a hook
costs there is what it touches: a function, an object or an attribute is some hundred nanoseconds, which a loop hides.
So what begins such a span only reads the clock, and what ends it writes one record for both, encoded once but for the
times. Nothing is open in the Recording meanwhile: of a process that is killed, the module that it was computing is
missing, and the spans of the model around it and of the collective inside it are there.

What is hot is also in C (`native/repeated.c`), which is used where it was built. It does the same, and leaves to the
functions here what is not hot: the first span of each place and thread, and whatever cannot be written at once.
"""

from __future__ import annotations

from asyncio import _get_running_loop
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

from rltrace.events import AUTOMATIC
from rltrace.host.clock import now_ns
from rltrace.host.interruption import own_failure
from rltrace.record import native, spans
from rltrace.record.encoding import encode
from rltrace.record.error_message import error_args


class Gate(Protocol):
    """A hook: it says whether it works, and counts its calls."""

    @property
    def live(self) -> bool:
        """Whether it works."""

    @property
    def row(self) -> Any:
        """Its counters."""

    def failed(self, error: Exception, /) -> None:
        """Count an error of ours."""


NATIVE = native.LIBRARY
"""The library; None where everything is done here."""

_TIME = encode(2**62)
"""A time that no argument looks like."""


class Said(NamedTuple):
    """What a span says each time."""

    name: str
    args: dict[str, Any]

    def around_times(self) -> tuple[bytes, bytes]:
        """Return what precedes the two times in the span's record, and what follows them."""
        head, _, tail = encode((AUTOMATIC, self.name, 0, 2**62, 2**62, self.args, True)).partition(2 * _TIME)
        return head, tail

    def write(self, start_ns: int, **late_args: Any) -> None:
        """Write a span that ends now, by the way of all spans that are over."""
        loop = _get_running_loop()
        task = None if loop is None else spans._task_of(loop)
        lane = 0 if task is None else id(task)
        spans.automatic_span_at(self.name, start_ns, now_ns(), lane=lane, **self.args, **late_args)

    def write_interrupted(self, start_ns: int, interruption: BaseException) -> None:
        """Write a span that an error from outside has kept its hook from writing."""
        if start_ns and not spans._is_written(encode(start_ns)):
            self.write(start_ns, **error_args(interruption))


# ---------------------------------------------------------------- calls


def around_calls(
    gate: Gate,
    said_in: Callable[[bool], Said],
    is_lasting: Callable[[], bool],
    kind: Callable[[], int],
    kind_address: int = 0,
) -> tuple[Callable[[Any, Any], None], Callable[[Any, Any, Any], None]]:
    """Return what runs before a call of a module and what runs after it, called as torch calls hooks.

    Calls may nest. Two threads that call the module at the same time, which FSDP forbids, would exchange their times.

    Args:
        gate: Of the hook.
        said_in: Returns what the span says of a call of the first kind or, given True, of the second.
        is_lasting: Returns whether it says the same from here on.
        kind: Returns -1 in a call of the first kind.
        kind_address: Where a function of C, `int (void)`, begins that returns the same; 0 if there is none.
    """
    starts_ns: list[int] = []
    """Of the calls that are under way; 0 for one without a span."""
    head = first = second = b""
    count = gate.row.fired
    calls: Any = None

    def before(_module: Any, _args: Any) -> None:
        try:
            starts_ns.append(now_ns() if gate.live else 0)
        except BaseException:  # `after` takes one for each call
            starts_ns.append(0)
            raise

    def after(_module: Any, _args: Any, _result: Any) -> None:
        start_ns = 0
        try:
            start_ns = starts_ns.pop()
            if not start_ns or not gate.live:
                return
            if head and spans._always is None and not (spans._current_tasks and _get_running_loop() is not None):
                end = first if kind() == -1 else second
                spans._local.write(head + encode(start_ns) + encode(now_ns()) + end)
                count()
                return
        except own_failure():  # the thread's first record, or one that its segment has no room for
            pass
        except BaseException as interruption:
            said_in(kind() != -1).write_interrupted(start_ns, interruption)
            raise
        write_slowly(start_ns)

    def write_slowly(start_ns: int) -> None:
        nonlocal head, first, second, count
        try:
            if start_ns:
                gate.row.fired()
                said_in(kind() != -1).write(start_ns)
                if not head and is_lasting():
                    count = gate.row.fired
                    _, second = said_in(True).around_times()
                    head, first = said_in(False).around_times()
                    if calls is not None and native.are_native(count):
                        calls.know(head, first, second, count)
        except own_failure() as error:
            gate.failed(error)

    if NATIVE is None or not native.are_native(kind):
        return before, after
    calls = NATIVE.Calls(gate, starts_ns, kind, kind_address, write_slowly)
    end = calls.after

    def after_natively(_module: Any, _args: Any, _result: Any) -> None:
        end()

    return before, after_natively


# ---------------------------------------------------------------- what one hook begins, and another ends


class PlainStretch:
    """A stretch of work that one hook begins and another ends, maybe in another thread; one is open at a time."""

    __slots__ = ("head", "left", "parts", "said", "start_ns", "tail")

    def __init__(self, said: Said, parts: int) -> None:
        """Args:
        said: What its span says.
        parts: How many parts end before it does.
        """
        self.said, self.parts = said, parts
        self.head, self.tail = said.around_times()
        self.left = self.start_ns = 0


Stretch: type[PlainStretch] = PlainStretch if NATIVE is None else NATIVE.Stretch


def beginning(
    gate: Gate,
    known: dict[int, PlainStretch],
    meet: Callable[[Any], PlainStretch | None],
    is_told_again: Callable[[Any], bool],
) -> Callable[[Any], None]:
    """Return what begins the stretch of an object.

    Args:
        gate: Of the hook.
        known: Stretches by the ids of their objects.
        meet: Returns the stretch of an object that is not known; None if it has none.
        is_told_again: Returns whether an object tells once more of the stretch that it has begun.
    """

    count: Callable[[], object]
    natively: Any = None

    def count_first() -> None:
        nonlocal count
        gate.row.fired()
        count = gate.row.fired
        if natively is not None and native.are_native(count):
            natively.know(count)

    count = count_first

    def begin(of: Any) -> None:
        stretch = known.get(id(of))
        if stretch is None or stretch.left:
            begin_slowly(of)
        else:
            stretch.start_ns, stretch.left = now_ns(), stretch.parts
            count()

    def begin_slowly(of: Any) -> None:
        try:
            count_first()
            stretch = known.get(id(of))
            if stretch is None:
                stretch = meet(of)
            elif stretch.left:
                if is_told_again(of):
                    return
                stretch.left = 0
                stretch.said.write(stretch.start_ns, error="RuntimeError")  # what raised left it open
            if stretch is not None:
                stretch.start_ns, stretch.left = now_ns(), stretch.parts
        except own_failure() as error:
            gate.failed(error)

    if NATIVE is not None and Stretch is not PlainStretch:
        natively = NATIVE.StretchEnd(known, begin_slowly)
        return cast("Callable[[Any], None]", natively.begin)
    return begin


def ending(gate: Gate, known: dict[int, PlainStretch]) -> Callable[[Any], None]:
    """Return what ends a part of a stretch, and the stretch with its last part.

    Args:
        gate: Of the hook.
        known: Stretches by the ids of their parts.
    """

    count: Callable[[], object]
    natively: Any = None

    def count_first() -> None:
        nonlocal count
        gate.row.fired()
        count = gate.row.fired
        if natively is not None and native.are_native(count):
            natively.know(count)

    count = count_first

    def end(of: Any) -> None:
        stretch, start_ns = known.get(id(of)), 0
        if stretch is None or not stretch.left:
            return
        try:
            if stretch.left > 1:
                stretch.left -= 1
                return
            start_ns, stretch.left = stretch.start_ns, 0
            if spans._always is None and not (spans._current_tasks and _get_running_loop() is not None):
                spans._local.write(stretch.head + encode(start_ns) + encode(now_ns()) + stretch.tail)
                count()
                return
        except own_failure():  # the thread's first record, or one that its segment has no room for
            pass
        except BaseException as interruption:
            stretch.said.write_interrupted(start_ns, interruption)
            raise
        end_slowly(stretch, start_ns)

    def end_slowly(stretch: PlainStretch, start_ns: int) -> None:
        try:
            count_first()
            stretch.said.write(start_ns)
        except own_failure() as error:
            gate.failed(error)

    if NATIVE is not None and Stretch is not PlainStretch:
        natively = NATIVE.StretchEnd(known, end_slowly)
        return cast("Callable[[Any], None]", natively.end)
    return end
