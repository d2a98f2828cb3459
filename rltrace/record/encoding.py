"""Encodes records; what msgpack refuses of one becomes text, so that the rest of it is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rltrace.dependencies import msgspec
from rltrace.events import AUTOMATIC
from rltrace.host.interruption import own_failure

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


def _plain(value: Any) -> Any:
    """What an argument that msgpack does not know is recorded as: a number or text if it is one, else its print."""
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
"""A record as bytes."""


def encode_anyhow(record: Any) -> bytes:
    """Encode a record; what msgpack refuses of its texts and arguments (an int of 65 bits) becomes text that it takes.

    Raises:
        Exception: what it consists of besides, such as a time, cannot be encoded.
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
    """Of a record: its arguments, or a text such as its name."""
    if isinstance(part, dict):
        return {_sayable(key): _sayable(value) for key, value in part.items()}
    return plain_text(part) if isinstance(part, str) else part


def _sayable(value: Any) -> Any:
    return sayable(value, encode)
