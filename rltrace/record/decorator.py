"""`@traced` makes each call of a function a span."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

from rltrace.record.spans import span

_F = TypeVar("_F", bound=Callable[..., Any])


@overload
def traced(function: _F, /) -> _F: ...
@overload
def traced(name: str | None = None, /, **args: Any) -> Callable[[_F], _F]: ...
def traced(name: Any = None, /, **args: Any) -> Any:
    """Decorate a function, coroutine, generator or async generator: each call is a span.

    Args:
        name: Name of the span; by default the function's qualified name. `@traced` works without brackets.
        **args: Recorded with every call.

    Raises:
        TypeError: the decorated object is not a function but, for example, a class or a property.
    """
    if name is None or isinstance(name, str):
        return lambda function: _traced(function, name, args)
    return _traced(name, None, {})


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__  # a partial has none


def _traced(function: Any, name: str | None, args: dict[str, Any]) -> Any:
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(_traced(function.__func__, name, args))
    if isinstance(function, type) or not callable(function):
        raise TypeError(
            f"rltrace.traced: {function!r} is a {type(function).__name__}, not a function; "
            "decorate its methods, or the function inside the property"
        )
    return _traced_call(function, name or _name_of(function), args)


def _traced_call(function: Callable[..., Any], name: str, args: dict[str, Any]) -> Callable[..., Any]:
    # A wrapper is of the same kind as what it wraps: frameworks inspect it.
    if inspect.iscoroutinefunction(function):
        wrapper = _traced_coroutine(function, name, args)
    elif inspect.isasyncgenfunction(function):
        wrapper = _traced_async_generator(function, name, args)
    elif inspect.isgeneratorfunction(function):
        wrapper = _traced_generator(function, name, args)
    else:
        wrapper = _traced_function(function, name, args)
    return functools.wraps(function)(wrapper)


def _traced_function(function: Callable[..., Any], name: str, args: dict[str, Any]) -> Callable[..., Any]:
    def wrapper(*a: Any, **k: Any) -> Any:
        with span(name, **args):
            return function(*a, **k)

    return wrapper


def _traced_coroutine(function: Callable[..., Any], name: str, args: dict[str, Any]) -> Callable[..., Any]:
    async def wrapper(*a: Any, **k: Any) -> Any:
        with span(name, **args):
            return await function(*a, **k)

    return wrapper


def _traced_generator(function: Callable[..., Any], name: str, args: dict[str, Any]) -> Callable[..., Any]:
    def wrapper(*a: Any, **k: Any) -> Any:
        with span(name, **args):
            return (yield from function(*a, **k))

    return wrapper


def _traced_async_generator(function: Callable[..., Any], name: str, args: dict[str, Any]) -> Callable[..., Any]:
    async def wrapper(*a: Any, **k: Any) -> Any:
        with span(name, **args):
            generator = function(*a, **k)
            try:
                item = await generator.__anext__()
                while True:
                    try:
                        sent = yield item
                    except GeneratorExit:
                        await generator.aclose()
                        raise
                    except BaseException as error:
                        item = await generator.athrow(error)
                    else:
                        item = await generator.asend(sent)
            except StopAsyncIteration:
                pass

    return wrapper
