"""The arguments of a call that a hook is around: a program passes the same one by its place or by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_REQUIRED = object()


def argument(name: str, position: int, args: tuple[Any, ...], kwargs: dict[str, Any], default: Any = _REQUIRED) -> Any:
    """Return one argument of a call.

    Args:
        name: Of the parameter.
        position: Its place, from 0; `self` is counted.
        args: What was passed by place.
        kwargs: What was passed by name.
        default: What the parameter is if nobody passes it.

    Raises:
        TypeError: Nobody passed it, and there is no default.
    """
    if name in kwargs:
        return kwargs[name]
    if position < len(args):
        return args[position]
    if default is _REQUIRED:
        raise TypeError(f"{name!r} was passed neither by name nor among {len(args)} positional arguments")
    return default


def with_argument(name: str, position: int, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Arguments:
    """Return the arguments of a call with another value for one that was passed, in the same way as before."""
    if name in kwargs:
        return args, {**kwargs, name: value}
    return (*args[:position], value, *args[position + 1 :]), kwargs


def attributes(owner: str, *names: str) -> tuple[str, ...]:
    """Return attributes of a class or a module as a hook declares that it reads them.

    Args:
        owner: "module:Class", or "module:".
        names: Of its attributes, be they methods or set by its methods.
    """
    between = "" if owner.endswith(":") else "."
    return tuple(f"{owner}{between}{name}" for name in names)


def keep(name: str, position: int) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Return a `before` that keeps one argument for its `after`."""
    return lambda args, kwargs: argument(name, position, args, kwargs)


def keep_self(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Keep the object whose method is called: a `before`."""
    return args[0]
