"""Figures as JSON, where boundaries are a list of values, and as what is kept of them, where they stay columns."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from rltrace.analysis.moments import Boundaries

Figures = TypeVar("Figures")


def as_json(figures: Any) -> bytes:
    """Return figures as JSON.

    Raises:
        UnicodeEncodeError: a text is none, as a folder's name may be.
    """
    return msgspec.json.encode(figures, enc_hook=_as_list)


def as_builtins(figures: Any) -> Any:
    """Return figures as dictionaries, lists, texts and numbers."""
    return msgspec.to_builtins(figures, enc_hook=_as_list)


def to_keep(figures: Any) -> bytes:
    """Return figures as `from_kept` takes them."""
    return msgspec.msgpack.encode(figures, enc_hook=_as_columns)


def from_kept(content: bytes, kind: type[Figures]) -> Figures:
    """Return figures of a kind from what was kept of them.

    Raises:
        msgspec.DecodeError: they are of another kind.
    """
    return msgspec.msgpack.decode(content, type=kind, dec_hook=_from_columns)


def _as_list(value: Any) -> list[Any]:
    return list(_boundaries(value))


def _as_columns(value: Any) -> tuple[Any, ...]:
    return _boundaries(value).kept()


def _boundaries(value: Any) -> Boundaries:
    if isinstance(value, Boundaries):
        return value
    raise NotImplementedError(f"{type(value).__name__} is no figure")  # as msgspec wants it of such a function


def _from_columns(kind: type, kept: Any) -> Any:
    if kind is Boundaries:
        return Boundaries.of_kept(kept)
    raise NotImplementedError(f"{kind.__name__} is no figure")
