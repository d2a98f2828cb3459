"""What an exception says, for the end of the span that it left."""

from __future__ import annotations

from typing import Any

from rltrace.record import redaction
from rltrace.record.encoding import text_of


def error_args(error: BaseException) -> dict[str, Any]:
    """Return the arguments of a span that an exception left: its type, and what it says."""
    return {"error": type(error).__name__, **message_of(error)}


def message_of(error: object) -> dict[str, Any]:
    """Return the first line of an exception's message, redacted, as an argument of a span; nothing if it is empty.

    A tensor is not printed, because that would wait for its GPU.
    """
    if error is None or any(hasattr(type(arg), "__dlpack__") for arg in getattr(error, "args", ())):
        return {}
    line = text_of(error).strip().partition("\n")[0].rstrip()
    return {"error_message": redaction.text(line)} if line else {}
