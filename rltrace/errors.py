"""Errors that reach a user as one line, and the exit code each ends the command with.

Raised by the readers and the command line only: nothing here is ever raised into a traced program.
"""

from __future__ import annotations


class RltraceError(Exception):
    """One line that says what is wrong, where, both values and the next step."""

    exit_code = 1


class ConfigError(RltraceError):
    """A configuration that cannot run: unknown key, wrong type, impossible combination."""

    exit_code = 2


class SelectionError(RltraceError):
    """A part of a run that does not exist: step 99 of 24."""

    exit_code = 2


class QueryError(RltraceError):
    """A query that is none, or that names a table or a column that there is not."""

    exit_code = 2


class RecordingError(RltraceError):
    """A Recording that is missing or damaged, or exists where a new one should go."""

    exit_code = 3


class RunError(RltraceError):
    """A traced run that failed: a process died, memory ran out, a check found wrong weights."""

    exit_code = 4


class ViewError(RltraceError):
    """The timeline cannot be shown: busy port, no UI installed."""

    exit_code = 5


class MissingExtraError(RltraceError):
    """A feature whose packages are not installed.

    Args:
        said: What is missing, and what for.
        extra: The extra of our distribution that brings them.
        otherwise: What works without them.
    """

    exit_code = 6

    def __init__(self, said: str, extra: str, otherwise: str = "") -> None:
        from rltrace.extras import how_to_install  # it reads what is installed, for this error alone

        super().__init__(f"{said}: {how_to_install(extra)}{otherwise}")


class OutputError(RltraceError):
    """A file that cannot be written, or that would be overwritten."""

    exit_code = 7
