"""The native hot ways of `spans.py` and `repeated.py` of `rltrace/record`, where they were built: a module of Python's.

In: when a span begins and ends, and what it says. Out: records in the memory of the thread's segment (`segment.c`).

Everything else is left to these two, and where there is no library, all is: they write the same bytes, and take twice
as long. `rltrace/host/native_library.py` compiles the library for the wheel, and `make native` in a working tree.
It uses the stable interface of Python, and so serves every CPython from 3.10 on but the free-threaded ones, which leave
it alone.

To add a kind of record, write it in `spans.py` or `repeated.py` first; then a function of `spans.c` or a type of
`repeated.c` with the same ways, which is said in `records.pyi`. `tests/record/test_spans.py` and `test_repeated.py` run
both, and `tests/record/sanitized_records.py` compares bytes.
"""

from __future__ import annotations

from types import BuiltinFunctionType, MethodWrapperType
from typing import Any

from rltrace.host.clock import now_ns
from rltrace.host.native import module_of
from rltrace.host.native_library import RECORDS


def are_native(*functions: Any) -> bool:
    """Return whether all of these functions are in C, so that no error from outside can come inside of a call."""
    return all(isinstance(function, (BuiltinFunctionType, MethodWrapperType)) for function in functions)


LIBRARY: Any = module_of(RECORDS) if are_native(now_ns) else None
"""The library; None where everything is done in Python, as where a program has put a clock of its own in the place of
the system's, which the library asks."""


def forget_segment() -> None:
    """Have the library ask again which segment this thread writes to."""
    if LIBRARY is not None:
        LIBRARY.forget()


def remember_segment() -> None:
    """Have the library write to this thread's segment without asking, in the thread's next calls of Python too."""
    if LIBRARY is not None:
        LIBRARY.remember()
