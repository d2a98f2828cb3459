"""What a traced process asks NVIDIA's libraries within its steps, where it was built: `driver.c`, a module of Python's.

In: where a function of theirs is, and what it is asked about. Out: its answer. Where there is no library of ours,
`rltrace/host/nvml.py` asks through ctypes.

To add a question, write a function of `driver.c`, and say in `driver.pyi` what it takes and returns.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rltrace.host.interruption import own_failure
from rltrace.host.native_library import DRIVER, NativeLibrary


def module_of(library: NativeLibrary) -> Any:
    """Return the module that a library is; None if it was not built, not for this Python, or from another source than
    the one here."""
    try:
        found = import_module(library.module_name)
        return found if library.source_crc32() == found.SOURCE else None
    except own_failure(ImportError, AttributeError, OSError):
        return None


LIBRARY: Any = module_of(DRIVER)
"""The library; None where ctypes does its work."""
