"""An error from outside that meets a hook at any of its bytecodes leaves no span open."""

from __future__ import annotations

import contextlib
import dis
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import bytecode_tracer
import pytest
from bytecode_tracer import in_a_thread

import rltrace
from rltrace.events import Span
from rltrace.hooks import patching, wrapping
from rltrace.hooks.held_span import HeldSpan
from rltrace.hooks.hook import Hook
from rltrace.read.recording import Recording
from rltrace.record import spans

OURS = str(Path(rltrace.__file__).parent)


class LateError(Exception):
    """The timeout of a program."""


@pytest.fixture(scope="module")
def interrupter(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return bytecode_tracer.build(tmp_path_factory.mktemp("interrupter"))


# ---------------------------------------------------------------- one call through each kind of wrapper


def work(*_: Any) -> int:
    return 7


async def work_later(*_: Any) -> int:
    return 7


def items(*_: Any) -> Iterator[int]:
    yield from range(2)


async def items_later(*_: Any) -> AsyncIterator[int]:
    for item in range(2):
        yield item


@contextlib.contextmanager
def block(*_: Any) -> Iterator[None]:
    yield


@contextlib.asynccontextmanager
async def block_later(*_: Any) -> AsyncIterator[None]:
    yield


def drive(coroutine: Any) -> None:
    """Run a coroutine that waits for nothing."""
    with contextlib.suppress(StopIteration):
        coroutine.send(None)
    coroutine.close()


async def await_it(function: Callable[..., Any]) -> None:
    await function(1)


async def iterate(function: Callable[..., Any]) -> None:
    async for _ in function(1):
        pass


async def enter_later(function: Callable[..., Any]) -> None:
    async with function(1):
        pass


def enter(function: Callable[..., Any]) -> None:
    with function(1):
        pass


def fail(*_: Any) -> None:
    raise KeyError("of the program")


def fails(function: Callable[..., Any]) -> None:
    with contextlib.suppress(KeyError):
        function(1)


KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[Callable[..., Any]], None]]] = {
    "function": (wrapping.wrap_same_kind, work, lambda call: call(1)),
    "function that fails": (wrapping.wrap_same_kind, fail, fails),
    "function of a coroutine": (wrapping.wrap_function, work_later, lambda call: drive(await_it(call))),
    "coroutine": (wrapping.wrap_same_kind, work_later, lambda call: drive(await_it(call))),
    "generator": (wrapping.wrap_same_kind, items, lambda call: [*call(1)]),
    "each item": (wrapping.wrap_each_item, items, lambda call: [*call(1)]),
    "async generator": (wrapping.wrap_same_kind, items_later, lambda call: drive(iterate(call))),
    "context manager": (wrapping.wrap_same_kind, block, enter),
    "async context manager": (wrapping.wrap_same_kind, block_later, lambda call: drive(enter_later(call))),
}

INTERRUPTIBLE = ("CALL", "PRECALL", "RESUME", "YIELD", "SEND", "JUMP_BACKWARD", "FOR_ITER")
"""Where Python looks for signals and for what another thread has set; a trace function can raise elsewhere too."""

HELD = HeldSpan()


def begin_tuple(_args: Any, _kwargs: Any) -> Any:
    opened = spans.automatic_span("hooked").__enter__()
    return sorted("ab"), opened


def end_tuple(token: Any, result: Any, error: BaseException | None) -> None:
    sorted("ab")
    patching.end_span(token[1], result, error)


def begin_held(_args: Any, _kwargs: Any) -> None:
    HELD.open("hooked")


def end_held(_token: Any, _result: Any, error: BaseException | None) -> None:
    HELD.close(error)


HOOKS = {
    "span": patching._span_hooks("hooked", None, None, None, None),
    "phase": patching._at_boundaries(
        *patching._span_hooks("hooked", lambda *_: {"a": 1}, None, None, None), ("reward",)
    ),
    "late arguments": patching._span_hooks(
        "hooked", lambda *_: {"a": 1}, lambda *_: {"late": 2}, lambda *_: "key", lambda *_: "other"
    ),
    "token with more": (begin_tuple, end_tuple),
    "held": (begin_held, end_held),
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["handler", "thread"])
@pytest.mark.usefixtures("recording_way")
def test_no_span_stays_open(
    request: pytest.FixtureRequest, folder: Path, interrupter: Any, way: str, kind: str
) -> None:
    """Wherever the error comes, the program gets it, and the hook's span has ended, or never began."""
    if (way, kind) == ("thread", "function of a coroutine"):
        reason = "an error that comes when the coroutine is first awaited comes before its first statement"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    rltrace.start(folder)
    in_a_thread(lambda: interrupt_everywhere(kind, interrupter, way))
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    read = [event for event in process.events() if isinstance(event, Span)]
    around = {event.start_ns: event.args["at"] for event in read if event.name == "around"}
    left = [event.start_ns for event in read if event.name == "hooked" and event.end_ns is None]
    places = [around[max(start_ns for start_ns in around if start_ns < opened_ns)] for opened_ns in left]
    assert len(around) > 100
    assert not [place for place in places if place.startswith(INTERRUPTIBLE)]
    assert process.orphans == 0, "an end was written twice"


def interrupt_everywhere(kind: str, interrupter: Any, way: str) -> None:
    """Interrupt calls through a wrapper and each of the hooks at their first bytecode, their second, and so on."""
    wrap, original, call = KINDS[kind]
    place = ""

    def ring(_number: int, frame: Any) -> None:
        nonlocal place
        place = f"{dis.opname[frame.f_code.co_code[frame.f_lasti]]} in {frame.f_code.co_name}"
        raise LateError

    for name, (before, after) in HOOKS.items():
        hook = Hook("ours", f"{kind}:{name}")
        hook.bind(True)
        wrapped = wrap(original, hook, before, after)
        call(wrapped)
        for n in itertools.count(1):
            place, has_raised = "CALL, by another thread", False
            with rltrace.span("around") as around:
                try:
                    interrupter.start(OURS, n, ring, LateError if way == "thread" else None)
                    call(wrapped)
                    for _ in range(2):  # what another thread sets comes where a function begins or a loop goes on
                        pass
                except LateError:
                    has_raised = True
                is_over = not interrupter.stop()
                around.set(at=f"{place}, {name} {n}")
            if is_over:
                break
            assert has_raised, f"swallowed at bytecode {n} of {name}: {place}"
        assert hook.failures == 0
