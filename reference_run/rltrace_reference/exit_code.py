"""What a command of the reference run ends with."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rltrace.errors import RltraceError


def exit_code_of(work: Callable[[], None]) -> int:
    """Do the work of a command and return its exit code; an error of ours is one line on stderr."""
    try:
        work()
    except RltraceError as error:
        print(f"rltrace: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0
