"""Python's collector of cycles, while so much is made that stays that to look at all of it would take long."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Hold back the collector for a while, if it is on; what the process itself has frozen stays so."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # what was made is old now: the next collection does not begin with all of it
            gc.enable()
