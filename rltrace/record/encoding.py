"""Encodes records. What msgpack refuses becomes text, so that the rest of the record is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rltrace.dependencies import msgspec
from rltrace.events import AUTOMATIC
from rltrace.host.interruption import own_failure

MOST_LETTERS = 256
"""Longest text that stands for something else."""


def sayable(value: Any, encode: Callable[[Any], bytes]) -> Any:
    """Return the value itself if it can be encoded, else its text.

    Args:
        value: An argument, or the key of one.
        encode: Raises if it cannot encode the value.
    """
    try:
        encode(value)
        return value
    except own_failure():
        return text_of(value)


def text_of(value: Any) -> str:
    """Return how a value prints, cut to a length; its type if it does not print, as a list a thousand deep does not."""
    try:
        text = str(value)
    except own_failure():
        text = f"<{type(value).__qualname__}>"
    return plain_text(text[:MOST_LETTERS])


def plain_text(text: str) -> str:
    """Return a text that can be encoded: `?` replaces half a surrogate pair, which a file name has for a byte that is
    not UTF-8."""
    return text.encode(errors="replace").decode()


def _plain(value: Any) -> Any:
    """Return how an argument that msgpack does not know is recorded: as a number or text if it is one, else as it
    prints."""
    item = getattr(value, "item", None)
    if item is not None:
        try:
            number = item()
            if isinstance(number, (int, float, str)):
                return number
        except own_failure():  # a tensor of several elements
            pass
    return str(value)[:MOST_LETTERS]


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
"""Encode a record as bytes."""


def encode_anyhow(record: Any) -> bytes:
    """Encode a record, with text in place of texts and arguments that msgpack refuses (such as an int of 65 bits).

    Raises:
        Exception: another part of it, such as a time, cannot be encoded.
    """
    try:
        return encode(record)
    except own_failure():
        pass
    if isinstance(record, msgspec.Struct):
        number = record.__struct_config__.tag
        fields = msgspec.structs.astuple(record)
        if number not in (None, AUTOMATIC):  # of a typed span
            return encode((number, *map(_sayable, fields)))
        record = fields if number is None else (number, *fields)
    return encode([_sayable_part(part) for part in record])


def _sayable_part(part: Any) -> Any:
    """Return the part of a record that may become text: its arguments, or a text such as its name."""
    if isinstance(part, dict):
        return {_sayable(key): _sayable(value) for key, value in part.items()}
    return plain_text(part) if isinstance(part, str) else part


def _sayable(value: Any) -> Any:
    return sayable(value, encode)
