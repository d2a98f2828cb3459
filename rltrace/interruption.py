"""Whether an error came from a signal handler of the program: Python runs it wherever it is, in the middle of ours too.

The timeout of a reward is such an error, raised by the handler of SIGALRM; who takes it for a failure of ours loses it.
"""

from __future__ import annotations

import signal
from types import CodeType
from typing import Any


def is_of_handler(error: BaseException) -> bool:
    """Whether a handler that is in place now has raised it, or let it pass."""
    traceback = error.__traceback__
    if traceback is None or traceback.tb_next is None:  # raised in the very frame that has caught it
        return False
    handlers = _handlers()
    while traceback is not None:
        if traceback.tb_frame.f_code in handlers:
            return True
        traceback = traceback.tb_next
    return False


def _handlers() -> set[CodeType]:
    return {code for number in signal.valid_signals() if (code := _code_of(signal.getsignal(number))) is not None}


def _code_of(handler: Any) -> CodeType | None:
    """Of a function, a method, a partial or an object that is called."""
    handler = getattr(handler, "func", handler)
    for found in (handler, type(handler).__call__):
        code = getattr(found, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None
