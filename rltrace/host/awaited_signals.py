"""Waits for blocked signals. A stop (Ctrl-Z, then `fg`) may come in between."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

_SIGNAL_SET_BYTES = 128
"""Size of glibc's `sigset_t`; musl's is as large."""

_libc = ctypes.CDLL(None)


class _Duration(ctypes.Structure):
    """A `timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def take_signal(numbers: Iterable[int], seconds: float) -> int | None:
    """Take one of some blocked signals, and wait for it at most so long; a stop ends the wait.

    `signal.sigtimedwait` is not used: if the process is stopped, and continues after the time is up, it returns what
    happens to lie in memory (CPython 3.11 to 3.14, Modules/signalmodule.c).

    Returns:
        The number of the signal, or None.
    """
    awaited = ctypes.create_string_buffer(_SIGNAL_SET_BYTES)
    _libc.sigemptyset(awaited)
    for number in numbers:
        _libc.sigaddset(awaited, int(number))
    whole, rest = divmod(max(0.0, seconds), 1.0)
    number = int(_libc.sigtimedwait(awaited, None, ctypes.byref(_Duration(int(whole), int(rest * 1e9)))))
    return number if number > 0 else None
