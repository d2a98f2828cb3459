"""Every error that comes from outside in the middle of our code reaches the program."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import bytecode_tracer
import pytest

import rltrace
from rltrace import patching, recorder
from rltrace.events import Span
from rltrace.interruption import is_from_outside, own_failure, suppress_own
from rltrace.recording import Recording

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
    hook = patching.Hook("ours", "json:loads")
    hook.bind(True)
    before, after = patching._span_hooks("hooked", lambda: {"bytes": 1}, lambda _: {"late": Loss()}, None, None)
    call = patching.wrap_function(lambda: None, hook, before, after)
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
    KEPT.append(recorder._local)
    recorder._local = threading.local()
    rltrace.counter("value", 1)


async def one_task() -> None:
    async with rltrace.span("task"):
        pass


def task() -> None:
    """Driven as an event loop would."""
    with suppress(StopIteration):
        one_task().send(None)


@pytest.mark.parametrize(
    "made", [LateError, LateWithTextError, TimeoutError, ValueError, QuietError, KeyboardInterrupt]
)
@pytest.mark.parametrize("way", ["handler", "thread"])
def test_every_bytecode(folder: Path, interrupter: Any, way: str, made: type[BaseException]) -> None:
    """An error at any bytecode of ours goes to the program, and the next span is recorded in good order."""

    def ring(_number: int, _frame: object) -> None:
        raise made("late") if made in (TimeoutError, ValueError) else made()

    hook = hooked()
    works = [span, typed, flow, phase, traced, refused, hook, task, first_of_thread, lambda: rltrace.counter("c", 1)]
    rltrace.start(folder)
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
        assert passed > 10
    with rltrace.span("afterwards"):
        pass
    rltrace.stop()
    KEPT.clear()
    assert hook.hook.failures == 0  # type: ignore[attr-defined]
    (process,) = Recording.open(folder).processes
    spans = [event for event in process.events() if isinstance(event, Span)]
    assert sum(event.end_ns is None for event in spans if event.name == "work") < 10, "interrupted spans stay open"
    assert [event.end_ns is not None for event in spans if event.name == "afterwards"] == [True]
