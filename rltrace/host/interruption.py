"""Tells an error of ours from one that Python raised in the middle of our code on behalf of the program.

Between any two bytecodes of whatever code runs, Python may run a signal handler, or raise what another thread set by
`PyThreadState_SetAsyncExc`. The timeout of a reward is such an error: if we took it for a failure of ours, the program
would never time out. So code that runs in a traced process catches with `except own_failure():`, which lets every error
from outside pass.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the enums
import dis
import signal
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar, overload

E = TypeVar("E", bound=Exception)

_SIGNALS = tuple(map(int, signal.valid_signals()))
_RAISE = dis.opmap["RAISE_VARARGS"]
_RAISED_BARE = (MemoryError, StopIteration, StopAsyncIteration)
"""Errors that the interpreter itself raises without arguments."""


@overload
def own_failure() -> tuple[type[Exception], ...]: ...
@overload
def own_failure(*kinds: type[E]) -> tuple[type[E], ...]: ...
def own_failure(*kinds: type[Exception]) -> tuple[type[Exception], ...]:
    """Return what an `except` clause should catch of the error at hand.

    Args:
        *kinds: Classes of errors to catch; every `Exception` by default.

    Returns:
        `kinds` if a statement of ours raised the error, else nothing, so that the error goes on to the program.
    """
    error = sys.exc_info()[1]
    if not isinstance(error, Exception) or is_from_outside(error):
        return ()
    return kinds or (Exception,)


class suppress_own:  # noqa: N801 - used as `contextlib.suppress` is
    """`contextlib.suppress` for code in a traced process: errors from outside pass."""

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        return isinstance(error, self._kinds) and not is_from_outside(error)


def is_from_outside(error: BaseException) -> bool:
    """Return whether an error was raised by a signal handler, a trace function or another thread, and not by a
    statement."""
    entries = list(_entries(error.__traceback__))
    if not entries:
        return False
    frames = [entry.tb_frame for entry in entries]
    if len(frames) > 1 and _is_of_interrupting_function(frames):
        return True
    return not _is_of_statement(entries[-1]) and _is_made_of_nothing(error)


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_of_interrupting_function(frames: list[FrameType]) -> bool:
    """Return whether Python called one of the frames between two bytecodes of the frame before it.

    Python passes the interrupted frame to a signal handler and to a trace function. A handler may have rebound that
    argument; then it is recognized by its code, if it is still in place.
    """
    handlers = _handlers()
    return any(
        frame.f_code in handlers
        or any(caller is argument for argument in _arguments(frame) for caller in frames[:depth])
        for depth, frame in enumerate(frames)
        if depth
    )


def _arguments(frame: FrameType) -> list[Any]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    values = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    if code.co_flags & 0x04:  # CO_VARARGS
        rest = frame.f_locals.get(code.co_varnames[count])
        values += rest if isinstance(rest, tuple) else ()
    return values


def _handlers() -> set[CodeType]:
    """Return the code of all handlers in place. `signal.getsignal` makes an enum of each that is none, for 3 µs."""
    handlers = [_signal.getsignal(number) for number in _SIGNALS]
    found = [_code_of(handler) for handler in handlers if handler is not None and not isinstance(handler, int)]
    return {code for code in found if code is not None}


def _code_of(handler: Any) -> CodeType | None:
    """Return the code of a function, a method, a partial or a callable object."""
    handler = getattr(handler, "func", handler)
    for found in (handler, type(handler).__call__):
        code = getattr(found, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None


def _is_of_statement(entry: TracebackType) -> bool:
    """Return whether a `raise` or `assert` raised the error; otherwise a function in C did, or it came from outside.

    Python 3.10 raises what another thread set in front of a function's first bytecode, where `tb_lasti` is negative.
    """
    code = entry.tb_frame.f_code.co_code
    return _is_compiled(code) or (entry.tb_lasti >= 0 and code[entry.tb_lasti] == _RAISE)


def _is_compiled(code: bytes) -> bool:
    """Return whether this is the placeholder of a function that Cython compiled, which Python never interrupts."""
    return len(code) <= 8 and code[-2:-1] in (b"", bytes([_RAISE]))


def _is_made_of_nothing(error: BaseException) -> bool:
    """Return whether the error is what its class makes without arguments, as one that another thread sets is.

    Functions in C give their errors a message.
    """
    if isinstance(error, _RAISED_BARE):
        return False
    if not error.args:
        return True
    if type(error).__module__ == "builtins":
        return False
    try:
        return type(error)().args == error.args
    except Exception:
        return False
