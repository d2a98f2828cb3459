"""Every error that comes from outside in the middle of our code reaches the program."""

from __future__ import annotations

import ctypes
import gc
import itertools
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import bytecode_tracer
import pytest
from bytecode_tracer import in_a_thread

import rltrace
from rltrace.events import Counter as Sample
from rltrace.events import Span
from rltrace.hooks import patching, wrapping
from rltrace.hooks.hook import Hook
from rltrace.host import interruption
from rltrace.host.interruption import is_from_outside, own_failure, suppress_own
from rltrace.read.recording import Recording
from rltrace.record import native, spans

OURS = str(Path(rltrace.__file__).parent)


class LateError(Exception):
    """The timeout of a program."""


class LateWithTextError(Exception):
    """One that makes its own message."""

    def __init__(self) -> None:
        super().__init__("too late")


class QuietError(BaseException):
    """One that `except Exception` does not see."""


@pytest.fixture(scope="module")
def interrupter(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return bytecode_tracer.build(tmp_path_factory.mktemp("interrupter"))


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """What a signal handler raises in a callback of the garbage collector, as hypothesis has one, is lost anyway."""
    gc.disable()
    yield
    gc.enable()


class Loss:
    """An argument as torch has them: converted by `.item()`."""

    def item(self) -> float:
        return 0.5


def hooked() -> Callable[[], Any]:
    hook = Hook("ours", "json:loads")
    hook.bind(True)
    before, after = patching._span_hooks("hooked", lambda: {"bytes": 1}, lambda _: {"late": Loss()}, None, None)
    call = wrapping.wrap_function(lambda: None, hook, before, after)
    call.hook = hook  # type: ignore[attr-defined]
    return call


TYPED = rltrace.typed_span("typed", bytes=int)


def span() -> None:
    with rltrace.span("work", loss=Loss()) as made:
        made.set(tokens=4)


def typed() -> None:
    with TYPED(4096):
        pass


def flow() -> None:
    with rltrace.span("sent"):
        rltrace.flow("bucket", "out")


def phase() -> None:
    with rltrace.phase("mine"):
        pass


@rltrace.traced
def traced() -> None:
    pass


def refused() -> None:
    """One that msgpack refuses: an argument of 65 bits becomes text."""
    rltrace.span_at("wide", 1, 2, number=2**65)


KEPT: list[Any] = []
"""What errors from outside would be lost in the finalizers of."""


def first_of_thread() -> None:
    """The longest way: of a thread that has no segment yet."""
    KEPT.append(spans._local)
    spans._local = threading.local()
    native.forget_segment()
    rltrace.counter("value", 1)


async def one_task() -> None:
    async with rltrace.span("task"):
        pass


def task() -> None:
    """Driven as an event loop would."""
    with suppress(StopIteration):
        one_task().send(None)


# Interrupted between the call of a coroutine function and its await, Python itself leaves the coroutine behind.
@pytest.mark.filterwarnings("ignore:coroutine '_Enterable.__aexit__' was never awaited:RuntimeWarning")
@pytest.mark.parametrize(
    "made", [LateError, LateWithTextError, TimeoutError, ValueError, QuietError, KeyboardInterrupt]
)
@pytest.mark.parametrize("way", ["handler", "thread"])
def test_every_bytecode(
    folder: Path, interrupter: Any, way: str, made: type[BaseException], recording_way: str
) -> None:
    """An error at any bytecode of ours goes to the program, and the next span is recorded in good order."""

    def ring(_number: int, _frame: object) -> None:
        raise made("late") if made in (TimeoutError, ValueError) else made()

    hook = hooked()
    works = [span, typed, flow, phase, traced, refused, hook, task, first_of_thread, lambda: rltrace.counter("c", 1)]
    rltrace.start(folder)
    interruptions: list[int] = []
    in_a_thread(lambda: interruptions.extend(interrupt_everywhere(works, interrupter, ring, made, way)))
    with rltrace.span("afterwards"):
        pass
    rltrace.stop()
    KEPT.clear()
    # Nothing comes in between in C: a typed span and a sample have no bytecode of ours, and others have some.
    assert sum(count > 10 for count in interruptions) == (len(works) if recording_way == "plain" else len(works) - 2)
    assert hook.hook.failures == 0  # type: ignore[attr-defined]
    (process,) = Recording.open(folder).processes
    spans = [event for event in process.events() if isinstance(event, Span)]
    left = Counter(event.name for event in spans if event.end_ns is None)
    assert not left["hooked"]
    # In a `with`, an error that comes in front of the first statement of `__exit__` leaves a span open.
    assert all(left[name] < 12 for name in ("work", "typed", "sent", "mine")), left
    assert [event.end_ns is not None for event in spans if event.name == "afterwards"] == [True]


def test_handlers_records_are_kept(folder: Path, interrupter: Any) -> None:
    """A signal handler may record at any bytecode of ours, also while its thread gets a segment."""
    recorded: list[int] = []

    def ring(_number: int, _frame: object) -> None:
        rltrace.counter("handler", recorded[-1])

    def record() -> None:
        for n in itertools.count(1):
            recorded.append(n)
            interrupter.start(OURS, n, ring, None)
            first_of_thread()
            if not interrupter.stop():
                break

    rltrace.start(folder)
    in_a_thread(record)
    rltrace.stop()
    KEPT.clear()
    (process,) = Recording.open(folder).processes
    found = [event for event in process.events() if isinstance(event, Sample)]
    assert len(recorded) > 300
    assert sorted(event.value for event in found if event.name == "handler") == recorded[:-1]
    assert sum(event.name == "value" for event in found) == len(recorded)
    assert process.lost_events == 0


def test_thread_goes_on_recording(folder: Path) -> None:
    """A call that an error from outside kept from its end does not keep the thread's later records waiting."""

    def record() -> None:
        rltrace.counter("before", 1)
        spans._local.waiting = []  # as such a call leaves it
        del spans._local.write  # the next record needs a segment
        rltrace.counter("afterwards", 2)
        assert not hasattr(spans._local, "waiting")

    rltrace.start(folder)
    in_a_thread(record)
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    assert [event.name for event in process.events() if isinstance(event, Sample)] == ["before", "afterwards"]


def interrupt_everywhere(works: Any, interrupter: Any, ring: Any, made: Any, way: str) -> list[int]:
    """Return how often each work was interrupted."""
    interruptions = []
    for work in works:
        work()
        passed = 0
        for n in itertools.count(1):
            error: BaseException | None = None
            try:
                interrupter.start(OURS, n, ring, made if way == "thread" else None)
                work()
                for _ in range(2):  # what another thread sets comes where a function begins or a loop goes on
                    pass
            except made as raised:
                error = raised
            was_interrupted = interrupter.stop()
            if not was_interrupted:
                break
            passed += error is not None
            assert error is not None, f"{made.__name__} at bytecode {n} of {work} was swallowed"
        interruptions.append(passed)
    return interruptions


# ---------------------------------------------------------------- what is ours


class Odd:
    """An argument whose conversion fails, each time in another way."""

    def __init__(self, error: BaseException | type[BaseException]) -> None:
        self.error = error

    def item(self) -> float:
        raise self.error

    def __str__(self) -> str:
        raise self.error


@pytest.mark.parametrize("error", [LateError, LateError(), LateWithTextError(), TimeoutError(), ValueError("text")])
def test_own_errors_stay(folder: Path, error: Exception) -> None:
    """An argument that cannot be converted costs its text, and never reaches the program."""
    rltrace.start(folder)
    with rltrace.span("work", loss=Odd(error)):
        pass
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    (work,) = process.events()
    assert isinstance(work, Span) and work.args["loss"] == "<Odd>"


@pytest.mark.parametrize("fails", [lambda: next(iter(())), lambda: int("x"), [].pop, lambda: {}["key"]])
def test_c_functions_errors_are_ours(fails: Callable[[], Any]) -> None:
    """Errors of functions in C are ours.

    Whatever a function in C raises to a statement of ours is no error from outside.
    """
    with pytest.raises(Exception) as caught:
        fails()
    assert not is_from_outside(caught.value)


def test_compiled_placeholders_raise() -> None:
    """Placeholders of compiled functions raise themselves.

    The traceback entry of a function that Cython compiled has no bytecode at which it could be interrupted.
    """
    ctypes.pythonapi.PyCode_NewEmpty.restype = ctypes.py_object
    code = ctypes.pythonapi.PyCode_NewEmpty(b"compiled.pyx", b"work", 7)
    assert interruption._is_compiled(code.co_code)
    assert not interruption._is_compiled(span.__code__.co_code)


def test_error_before_the_first_bytecode() -> None:
    """What another thread set is from outside in front of a function's first bytecode too.

    Python 3.10 raises it there; newer ones begin a function with a bytecode of its own.
    """
    entry = TracebackType(None, sys._getframe(), -2, 1)
    assert is_from_outside(LateError().with_traceback(entry))


def test_removed_handler_is_known(folder: Path) -> None:
    """A handler that was removed meanwhile is recognized.

    A handler that puts the previous one back before it raises is none of those that are installed now.
    """

    def ring(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        raise LateError("too late")

    def work() -> None:
        signal.raise_signal(signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(LateError, match="too late"):
            try:
                work()
            except own_failure():
                pass
        signal.signal(signal.SIGALRM, ring)
        with pytest.raises(LateError, match="too late"), suppress_own(Exception):
            work()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_own_failure_of_named_kinds() -> None:
    """`own_failure` catches the kinds that are named.

    Other errors of ours pass, as in any `except`.
    """
    with pytest.raises(ValueError, match="invalid literal"), suppress_own(OSError):
        int("x")
    with pytest.raises(ValueError, match="invalid literal"):
        try:
            int("x")
        except own_failure(OSError, KeyError):
            pass
    with suppress_own(ValueError):
        int("x")


# ---------------------------------------------------------------- real timers


TIMER = """
import signal, sys, time
import rltrace

fired = [0]
deepest = [0]
depth = [0]

def ring(number, frame):
    depth[0] += 1
    deepest[0] = max(deepest[0], depth[0])
    with rltrace.span("ring") as opened:
        fired[0] += type(opened).__name__ == "LiveSpan"  # it records already
    depth[0] -= 1

signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
rltrace.start(sys.argv[1])
until = time.monotonic() + 0.5
while time.monotonic() < until:
    with rltrace.span("work"):
        pass
signal.setitimer(signal.ITIMER_REAL, 0)
rltrace.stop()
print(fired[0], deepest[0])
"""


def test_fast_timers_spans_do_not_nest(folder: Path) -> None:
    """Spans of a fast timer do not nest endlessly.

    A handler that fires faster than a segment is made records all the same, and its program goes on.
    """
    done = subprocess.run(  # noqa: PLW1510
        [sys.executable, "-c", TIMER, str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    fired, deepest = map(int, done.stdout.split())
    assert fired > 50 and deepest < 20
    (process,) = Recording.open(folder).processes
    rings = [event for event in process.events() if isinstance(event, Span) and event.name == "ring"]
    assert process.lost_events == 0
    assert len(rings) == fired
    assert all(event.end_ns is not None for event in rings)


FILE_LIMIT = """
import resource, signal, sys
import rltrace

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
rltrace.start(sys.argv[1])
for _ in range(3):
    with rltrace.span("work"):
        pass
print("alive")
rltrace.stop()
"""


@pytest.mark.parametrize("limit_bytes", [0, 100, 20_000, 50_000])
def test_file_size_limit_does_not_kill(folder: Path, limit_bytes: int) -> None:
    """A limit on the size of files does not kill.

    The kernel answers a write beyond RLIMIT_FSIZE with SIGXFSZ, whose default is death.
    """
    command = [sys.executable, "-c", FILE_LIMIT, str(folder), str(limit_bytes)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr[-2000:]


def test_interrupted_segments_leave_no_files(folder: Path, interrupter: Any) -> None:
    """An error from outside while a segment is made leaves at most the one file that the next call takes."""

    def threads() -> None:
        for n in itertools.count(1):
            KEPT.append(spans._local)
            spans._local = threading.local()
            with suppress(LateError):
                # Where Python really interrupts: elsewhere the lock would stay held, which `with` cannot help.
                interrupter.start(OURS, n, None, LateError)
                rltrace.counter("value", n)
                for _ in range(2):
                    pass
            if not interrupter.stop():
                break
            interrupted.append(n)
            rltrace.counter("value", -n)

    interrupted: list[int] = []
    rltrace.start(folder)
    rltrace.counter("value", 0)
    in_a_thread(threads)
    files = list(folder.glob("processes/*/*.seg"))
    KEPT.clear()
    rltrace.stop()
    assert len(interrupted) > 100
    assert len(files) <= len(interrupted) + 10  # each of these "threads" has one of its own in the end
    assert not list(folder.glob("processes/*/*.seg.*"))
