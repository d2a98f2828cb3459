"""What a hook reads of the arguments of a call, by the source of its functions.

A function that is given `(args, kwargs)` says it by `argument(...)`, `keep(...)` and `args[1]`, one that is called as
the target is by its own parameters. What it hands on is followed.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from rltrace.hooks.arguments import argument, with_argument
from rltrace.hooks.patching import Reader
from rltrace.hooks.sources import Parameters
from rltrace.hooks.wrapping import wrap_arguments, wrap_function


class Read(NamedTuple):
    """One argument that is read."""

    name: str | None
    """None: whatever it is called."""
    place: int | None
    """None: it is read by its name alone."""
    is_own_name: bool = False
    """Whether the name is that of a parameter of ours."""
    is_required: bool = False
    """Whether the hook fails without it."""


Environment = dict[str, Any]
"""What the names in a function stand for, as far as that is known."""

_UNKNOWN = object()


def reads_of(reader: Reader) -> set[Read]:
    """What one function of a hook reads."""
    how, function = reader
    if function is None:
        return set()
    if how in ("call", "change"):
        return set(_of_call(function, [_UNKNOWN] * (how == "change")))
    if how in ("described", "result"):
        return set(_described(function, skipped=how == "result"))
    return set(_of_wrappers(function))


def wanted(reads: set[Read], there: Parameters) -> dict[str, int | None]:
    """The parameters that are read, by the names and places that they have in a release.

    Raises:
        LookupError: One is at another place there, or is not there and the hook fails without it.
    """
    found: dict[str, int | None] = {}
    for read in sorted(reads, key=lambda read: (read.place is not None, str(read.name))):  # a place is more than a name
        at = None if read.place is None or read.place >= len(there.by_place) else there.by_place[read.place]
        if read.name is None or (read.is_own_name and at is not None):
            if at is not None and (read.place or at != "self"):
                found[at] = read.place
        elif at == read.name:
            found[read.name] = read.place
        elif read.name in there.by_name_only or (read.place is None and read.name in there.by_place):
            found[read.name] = None
        elif there.takes_any_names or there.takes_any_places:
            continue
        elif at is not None or read.name in there.by_place or read.is_required:
            raise LookupError(f"`{read.name}` is read at place {read.place}; there is {there.by_place}")
    return dict(sorted(found.items(), key=lambda item: (item[1] is None, item[1], item[0])))


# ---- functions of ours ------------------------------------------------------------------------------------------


def _of_call(function: Any, handed: list[Any]) -> Iterator[Read]:
    """Of a function that gets `(args, kwargs)` behind what is handed to it."""
    found = _unbound(function, handed)
    if found is None:
        return
    node, environment, free = found
    if isinstance(node, ast.Lambda | ast.FunctionDef) and len(free) >= 2:
        yield from _within(node, environment, free[0], free[1])
    elif node.args.vararg is not None and not free:
        yield from _handed_on(node, environment, node.args.vararg.arg)


def _described(function: Any, *, skipped: bool) -> Iterator[Read]:
    """Of a function that is called as the target is, with the result in front of that or not."""
    found = _unbound(function, [_UNKNOWN] * skipped)
    if found is None:
        return
    node, environment, free = found
    for place, name in enumerate(free):
        if not name.startswith("_"):
            yield Read(name, place, is_own_name=True)
    yield from (Read(one.arg, None) for one in node.args.kwonlyargs)
    if node.args.vararg is not None and node.args.kwarg is not None and not free:
        yield from _within(node, environment, node.args.vararg.arg, node.args.kwarg.arg)


def _of_wrappers(make: Any) -> Iterator[Read]:
    """Of what a function puts in the place of the target: what is in it and wraps the original, or is called before."""
    found = _unbound(make, [])
    if found is None:
        return
    node, environment, _ = found
    for inner in ast.walk(node):
        wrapper = _value(inner.func, environment) if isinstance(inner, ast.Call) else None
        if wrapper is wrap_function or wrapper is wrap_arguments:
            yield from _of_call(_value(_untimed(inner.args[2]), environment), [_UNKNOWN] * (wrapper is wrap_arguments))
        if not isinstance(inner, ast.FunctionDef) or not inner.decorator_list:
            continue
        for place, one in enumerate(inner.args.args):
            if not one.arg.startswith("_"):
                yield Read(one.arg, place, is_own_name=True)
        if inner.args.vararg is not None and inner.args.kwarg is not None:
            yield from _within(inner, environment, inner.args.vararg.arg, inner.args.kwarg.arg)


def _untimed(node: ast.expr) -> ast.expr:
    """The function in `hook.timed(function)`."""
    return node.args[0] if isinstance(node, ast.Call) and len(node.args) == 1 else node


def _unbound(function: Any, handed: list[Any]) -> tuple[Any, Environment, list[str]] | None:
    """The definition of a function, what its names stand for, and those of its parameters that are not given yet."""
    given: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        handed, given = [*function.args, *handed], {**function.keywords, **given}
        function = function.func
    if isinstance(function, MethodType):
        handed, function = [function.__self__, *handed], function.__func__
    elif not isinstance(function, FunctionType):
        call = inspect.getattr_static(type(function), "__call__", None)
        if not isinstance(call, FunctionType):
            return None
        handed, function = [function, *handed], call
    function = inspect.unwrap(function)
    node = _definition_of(function)
    names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
    closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    environment = dict(function.__globals__) | {name: _content(cell) for name, cell in closure}
    environment |= dict(zip(names, handed, strict=False)) | given
    return node, environment, [name for name in names[len(handed) :] if name not in given]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _UNKNOWN


def _definition_of(function: FunctionType) -> Any:
    code = function.__code__
    for node in ast.walk(_tree(code.co_filename)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            if code.co_firstlineno in (node.lineno, *(one.lineno for one in node.decorator_list)):
                return node
        elif isinstance(node, ast.Lambda) and code.co_name == "<lambda>" and node.lineno == code.co_firstlineno:
            arguments = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
            if arguments == list(code.co_varnames[: code.co_argcount]):
                return node
    raise LookupError(f"{code.co_filename}:{code.co_firstlineno} defines no {code.co_name}")


@functools.cache
def _tree(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text())


def _within(node: Any, environment: Environment, args: str, kwargs: str) -> Iterator[Read]:
    """What a body reads of its two parameters."""
    for inner in _walk(node.body, args):
        if isinstance(inner, ast.Subscript):
            yield from _indexed(inner, args, kwargs)
        elif isinstance(inner, ast.Call):
            yield from _called(inner, environment, args, kwargs)


def _walk(node: Any, args: str) -> Iterator[ast.AST]:
    """All of a body but functions in it that have a parameter of the same name."""
    for inner in node if isinstance(node, list) else [node]:
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            own = (*inner.args.args, inner.args.vararg)
            if any(one is not None and one.arg == args for one in own):
                continue
        yield inner
        yield from _walk(list(ast.iter_child_nodes(inner)), args)


def _indexed(node: ast.Subscript, args: str, kwargs: str) -> Iterator[Read]:
    if not isinstance(node.value, ast.Name) or not isinstance(node.slice, ast.Constant):
        return
    if node.value.id == args and isinstance(node.slice.value, int):
        yield Read(None, node.slice.value)
    elif node.value.id == kwargs:
        yield Read(node.slice.value, None)


def _called(node: ast.Call, environment: Environment, args: str, kwargs: str) -> Iterator[Read]:
    """What a call in the body reads, which may hand the arguments on."""
    function = _value(node.func, environment)
    passed = [one.id if isinstance(one, ast.Name) else None for one in node.args]
    if function in (argument, with_argument):
        name, place = (_value(one, environment) for one in node.args[:2])
        if passed[2:4] == [args, kwargs] and name:
            has_default = len(node.args) > 4 or bool(node.keywords) or function is with_argument
            yield Read(name, place, is_required=not has_default)
    elif args in passed and kwargs in passed and callable(function):
        yield from _of_call(function, [_value(one, environment) for one in node.args[: passed.index(args)]])
    elif callable(function) and _hands_on(node, args, kwargs):
        yield from _described(function, skipped=False)


def _hands_on(node: ast.Call, args: str, kwargs: str) -> bool:
    """Whether a call is made as that of the target: `function(*args, **kwargs)`."""
    places = [one.value.id for one in node.args if isinstance(one, ast.Starred) and isinstance(one.value, ast.Name)]
    names = [one.value.id for one in node.keywords if one.arg is None and isinstance(one.value, ast.Name)]
    return len(node.args) == 1 and places == [args] and names == [kwargs]


def _handed_on(node: Any, environment: Environment, call: str) -> Iterator[Read]:
    """Of a function that hands on all that it gets: `self._is_watched(*call)`."""
    for inner in _walk(node.body, ""):
        if isinstance(inner, ast.Call) and [ast.unparse(one) for one in inner.args] == [f"*{call}"]:
            function = _value(inner.func, environment)
            if callable(function):
                yield from _of_call(function, [])


def _value(node: ast.AST, environment: Environment) -> Any:
    """What an expression stands for, if that is a constant, a name or an attribute."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return environment.get(node.id, _UNKNOWN)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, environment)
        return _UNKNOWN if owner is _UNKNOWN else getattr(owner, node.attr, _UNKNOWN)
    return _UNKNOWN
