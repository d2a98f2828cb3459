"""What a function that is being called has at the moment, seen from what it calls."""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any


def variable(frame: FrameType, name: str, default: Any = None) -> Any:
    """Return what a function's variable or parameter is; nothing that the function has is kept alive.

    Args:
        frame: Of the call.
        name: Of the variable.
        default: What is returned where the function has none of that name, or has deleted it.
    """
    names = frame.f_locals
    found = names.get(name, default)
    if type(names) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        names.clear()  # up to Python 3.12 it is a copy, which would keep alive all that the function had
    return found
