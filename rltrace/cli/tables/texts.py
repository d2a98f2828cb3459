"""All different texts in many records, by what their types declare: a long run's hundred thousand have some dozen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

from msgspec import inspect

Finder = Callable[[Iterable[Any]], set[str]]
"""Returns the texts in values of one type; what is None has none."""


class UndeclaredError(Exception):
    """A type does not say what a value of it may hold, such as arguments of spans, or how deep it is."""


def texts_in(records: Sequence[Any]) -> set[str]:
    """Return all texts in records, which are structs.

    Raises:
        UndeclaredError: the type of one does not say what it holds.
    """
    found: set[str] = set()
    for kind in {*map(type, records)}:
        if find := _of_records(kind):
            found |= find([one for one in records if type(one) is kind])
    return found


@functools.cache
def _of_records(kind: type) -> Finder | None:
    declared = inspect.type_info(kind)
    if not isinstance(declared, inspect.StructType):
        raise UndeclaredError
    return _finder(declared, ())


def _finder(kind: inspect.Type, around: tuple[inspect.Type, ...]) -> Finder | None:
    """Return what finds the texts in values of a type; None if there is no text in any.

    Args:
        kind: The type.
        around: Those that it is a part of.
    """
    if kind in around:
        raise UndeclaredError

    def inner(part: inspect.Type) -> Finder | None:
        return _finder(part, (*around, kind))

    match kind:
        case inspect.IntType() | inspect.FloatType() | inspect.BoolType() | inspect.NoneType():
            return None
        case inspect.StrType():
            return lambda values: {*values} - {None}
        case inspect.UnionType(types=(one, inspect.NoneType())) | inspect.UnionType(types=(inspect.NoneType(), one)):
            return inner(one)
        case inspect.StructType(fields=fields):
            return _of_parts([(attrgetter(field.name), inner(field.type)) for field in fields])
        case inspect.TupleType(item_types=kinds):
            return _of_parts([(itemgetter(place), inner(part)) for place, part in enumerate(kinds)])
        case inspect.DictType(key_type=key, value_type=value):
            return _of_parts([(dict.keys, _of_items(inner(key))), (dict.values, _of_items(inner(value)))])
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return _of_items(inner(item))
    raise UndeclaredError


def _of_parts(parts: list[tuple[Callable[[Any], Any], Finder | None]]) -> Finder | None:
    """Return what finds the texts in parts of values, each by what gets it."""
    having = [(get, find) for get, find in parts if find is not None]

    def found(values: Iterable[Any]) -> set[str]:
        known = [value for value in values if value is not None]
        return set[str]().union(*(find(map(get, known)) for get, find in having))

    return found if having else None


def _of_items(find: Finder | None) -> Finder | None:
    """Return what finds the texts in the items of values."""
    if find is None:
        return None
    return lambda values: find(chain.from_iterable(filter(None, values)))
