"""Python's collector of cycles, while so much is made that stays that to look at all of it would take long."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection(*, of_a_program: bool = False) -> Iterator[None]:
    """Hold back the collector for a while, if it is on.

    Args:
        of_a_program: The process is that of a traced program, and what it has frozen stays so. Elsewhere what was made
            is old afterwards: the next collection does not begin with all of it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not of_a_program:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
