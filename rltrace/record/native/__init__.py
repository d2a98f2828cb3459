"""The native hot ways of `rltrace/record/repeated.py`, where they were built: `repeated.c`, a module of Python's.

In: when a hook begins and ends, and what its span says. Out: records in the memory of the thread's segment.

Everything else is left to `repeated.py`, and where there is no library, all is: it writes the same bytes, and takes
twice as long. `rltrace/host/native_library.py` compiles the library for the wheel, and `make native` in a working tree.
It uses the stable interface of Python, and so serves every CPython from 3.10 on but the free-threaded ones, which leave
it alone.

To add a kind of record, write it in `repeated.py` first; then a type of `repeated.c` with the same ways, which is said
in `repeated.pyi`. `tests/record/test_repeated.py` runs both and compares their bytes.
"""

from __future__ import annotations

from types import BuiltinFunctionType, MethodWrapperType
from typing import Any

from rltrace.host.native import module_of
from rltrace.host.native_library import REPEATED

LIBRARY: Any = module_of(REPEATED)
"""The library; None where everything is done in Python."""


def are_native(*functions: Any) -> bool:
    """Return whether all of these functions are in C, so that no error from outside can come inside of a call."""
    return all(isinstance(function, (BuiltinFunctionType, MethodWrapperType)) for function in functions)
