"""What is recorded in place of what msgpack refuses, so that the rest of its record is kept: text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rltrace.record.interruption import own_failure

MOST_LETTERS = 256
"""Of a text that stands for something else."""


def sayable(value: Any, encode: Callable[[Any], bytes]) -> Any:
    """The value itself where it can be encoded, else its text.

    Args:
        value: An argument, or the key of one.
        encode: Raises where it cannot.
    """
    try:
        encode(value)
        return value
    except own_failure():
        return text_of(value)


def text_of(value: Any) -> str:
    """How a value prints, cut to a length; its type where it does not, as what is nested a thousand deep."""
    try:
        text = str(value)
    except own_failure():
        text = f"<{type(value).__qualname__}>"
    return plain_text(text[:MOST_LETTERS])


def plain_text(text: str) -> str:
    """A text that can be encoded: half a surrogate pair, as a file name has for a byte that is no UTF-8, is a `?`."""
    return text.encode(errors="replace").decode()
