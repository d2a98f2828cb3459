"""Errors that nobody catches: a process that dies of one about memory says first who held what.

Phases have hooks that tell of an error that passes them; code outside of all phases has none.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rltrace.hooks.hook import After, Before, Hook
from rltrace.hooks.patching import PatchSet
from rltrace.hooks.wrapping import wrap_function
from rltrace.host import memory

Tell = Callable[[BaseException], None]


def watch_uncaught(patches: PatchSet, tell: Tell) -> None:
    """Have `tell` called with every error about memory that ends a thread or this process, before it is printed.

    Only processes that use torch are watched, from the end of its import on.
    """
    patches.when_imported("torch", lambda hook: _watch(hook, tell))


def _watch(hook: Hook, tell: Tell) -> Callable[[], None]:
    """Wrap what Python calls for an error that nobody catches; what the program has put there is still called."""
    from multiprocessing.process import BaseProcess  # torch has imported it; this process may never have otherwise

    def of_main(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        _tell_of(args[1], tell)

    def of_thread(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        _tell_of(args[0].exc_value, tell)

    def of_child(_token: Any, _result: Any, error: BaseException | None) -> None:
        _tell_of(error, tell)

    undos = [
        _wrap(sys, "excepthook", hook, of_main, _nothing_after),
        _wrap(threading, "excepthook", hook, of_thread, _nothing_after),
        # A child of multiprocessing prints what ended it itself.
        _wrap(BaseProcess, "run", hook, _nothing_before, of_child),
    ]

    def undo() -> None:
        for take_back in undos:
            take_back()

    return undo


def _wrap(owner: Any, attr: str, hook: Hook, before: Before, after: After) -> Callable[[], None]:
    """Put the two around whatever can be called there, a function or not; return what undoes it."""
    original = getattr(owner, attr)
    replacement = wrap_function(original, hook, before, after)
    setattr(owner, attr, replacement)

    def undo() -> None:
        if getattr(owner, attr) is replacement:  # else somebody calls it from theirs, and it only passes calls on
            setattr(owner, attr, original)

    return undo


def _tell_of(error: BaseException | None, tell: Tell) -> None:
    """Tell of an error about memory, or of one behind the error."""
    about_memory = next(filter(memory.is_out_of_memory, _causes(error)), None)
    if about_memory is not None:
        tell(about_memory)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Return an error, and the errors behind it as its traceback would show them."""
    met: set[int] = set()
    while error is not None and id(error) not in met:
        met.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _nothing_before(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """Do nothing: all is done afterwards."""


def _nothing_after(_token: Any, _result: Any, _error: BaseException | None) -> None:
    """Do nothing: all was done before."""
