"""The source of a target, read from its file and without importing anything: where it is, and what it does.

The digest of a function is of its syntax tree, so that neither comments, layout, docstrings nor annotations are in it.
It is made of what all Pythons from 3.10 on agree about: `ast.dump` is not.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_LEFT_OUT = frozenset({"annotation", "ctx", "decorator_list", "kind", "returns", "type_comment", "type_params"})
"""Fields of a syntax tree that say nothing of what a function does, or that only some Pythons have."""


# ---- digests ----------------------------------------------------------------------------------------------------


def digest(node: ast.AST) -> str:
    """Return what two definitions that do the same in the same way have in common."""
    return hashlib.sha256(normal_form(node).encode()).hexdigest()[:12]


def normal_form(node: ast.AST) -> str:
    """Return a syntax tree as a text, which is the same for CPython 3.10 to 3.14."""
    if isinstance(node, ast.Constant):
        return f"{type(node.value).__name__} {node.value!r}"
    fields = (f"{name}={_form_of(value)}" for name, value in _fields(node) if value not in (None, []))
    return f"{type(node).__name__}({' '.join(fields)})"


def _form_of(value: object) -> str:
    if isinstance(value, list):
        return f"[{' '.join(map(_form_of, value))}]"
    return normal_form(value) if isinstance(value, ast.AST) else repr(value)


def _fields(node: ast.AST) -> Iterator[tuple[str, Any]]:
    for name, value in ast.iter_fields(node):
        if name in _LEFT_OUT:
            continue
        if name == "body" and isinstance(node, _DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            yield name, value[1:]
        elif name == "values" and isinstance(node, ast.JoinedStr):  # Python 3.12 has split its text elsewhere than 3.11
            yield name, list(_joined(value))
        else:
            yield name, value


def _joined(parts: Iterable[ast.expr]) -> Iterator[ast.expr]:
    """Put the texts of an f-string that follow one another together."""
    text = ""
    for part in parts:
        if isinstance(part, ast.Constant):
            text += part.value  # type: ignore[operator]
            continue
        if text:
            yield ast.Constant(text)
        text = ""
        yield part
    if text:
        yield ast.Constant(text)


# ---- parameters -------------------------------------------------------------------------------------------------


class Parameters(NamedTuple):
    """The parameters of a function, by how they can be passed."""

    by_place: tuple[str, ...]
    by_name_only: frozenset[str]
    takes_any_places: bool
    takes_any_names: bool

    @classmethod
    def of(cls, node: Function) -> Parameters:
        """Return those of a definition."""
        found = node.args
        by_place = tuple(one.arg for one in (*found.posonlyargs, *found.args))
        by_name_only = frozenset(one.arg for one in found.kwonlyargs)
        return cls(by_place, by_name_only, found.vararg is not None, found.kwarg is not None)


# ---- files ------------------------------------------------------------------------------------------------------


class ModuleText(NamedTuple):
    """The source of a module."""

    text: str
    is_package: bool


def text_of_module(name: str) -> ModuleText | None:
    """Return the source of a module that is imported, or that lies beside one that is; None if there is none."""
    spec: Any = getattr(sys.modules.get(name), "__spec__", None) or _spec(name)
    if spec is None or not hasattr(spec.loader, "get_source"):
        return None
    text = spec.loader.get_source(name)
    return None if text is None else ModuleText(text, spec.submodule_search_locations is not None)


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    package = name.rpartition(".")[0]
    path = getattr(sys.modules.get(package), "__path__", None)
    return None if package and path is None else importlib.machinery.PathFinder.find_spec(name, path)


_IMPORT = re.compile(r"^[ \t]*from\s+(\S+)\s+import\s+(?:\(([^)]*)\)|([^\n]*))", re.MULTILINE)
_COMMENT = re.compile(r"#[^\n]*")


class Source:
    """The modules of one release.

    Args:
        read: Returns the source of a module by its name; None where there is none, as of an extension.
    """

    def __init__(self, read: Callable[[str], ModuleText | None] = text_of_module) -> None:
        # Few at a time: the next target is mostly in the same module, and a traced program should not keep them.
        self._read = functools.lru_cache(maxsize=4)(read)
        self._of_class = functools.lru_cache(maxsize=256)(self._read_class)
        self._sought: set[tuple[str, str]] = set()

    def has(self, module: str) -> bool:
        """Tell whether there is source of a module."""
        return self._read(module) is not None

    def find(self, target: str) -> ast.AST | None:
        """Return the definition of "module:Class.attr", followed through imports, base classes and other names."""
        module, _, path = target.partition(":")
        first, *rest = path.split(".")
        if len(rest) == 1:
            method = self._method(module, first, rest[0])
            if method is not None:
                return method
            of_class = self._of_class(module, first)
            if of_class is not None:
                return self._member(module, first, of_class, rest[0])
        found = self._top_level(module, first)
        if found is not None:
            return _within(found, rest)
        if rest and self.has(f"{module}.{first}"):
            return self.find(f"{module}.{first}:{'.'.join(rest)}")
        imported = self._find_imported(module, first, rest)
        return imported if imported is not None else _within(self._conditional(module, first), rest)

    def has_attribute(self, target: str) -> bool:
        """Tell whether the class of "module:Class.attr" or one below it defines it, or sets it of its objects."""
        if self.find(target) is not None:
            return True
        owner_name, _, attr = target.rpartition(".")
        if ":" not in owner_name:
            return False
        module, _, name = self._home(owner_name).partition(":")
        owner = self._of_class(module, name)
        if owner is None:
            return False
        return self._is_set(module, name, attr) or any(
            self._inherits(module, base, attr) for base in owner.bases if base != name
        )

    def _inherits(self, module: str, base: str, attr: str) -> bool:
        return self.find(f"{module}:{base}") is not None and self.has_attribute(f"{module}:{base}.{attr}")

    def _home(self, target: str) -> str:
        """Return what a target names by the module that defines it, from which it may be imported."""
        module, _, name = target.partition(":")
        if self._of_class(module, name) is not None:
            return target
        origins = (origin for origin in self._origins(module, name) if self.find(origin) is not None)
        origin = next(origins, None)
        return target if origin is None else self._home(origin)

    def _find_imported(self, module: str, first: str, rest: list[str]) -> ast.AST | None:
        """Return what a module has from another one, or from one below it."""
        if (module, first) in self._sought:  # two modules that import all of each other
            return None
        self._sought.add((module, first))
        try:
            found = (self.find(".".join([origin, *rest])) for origin in self._origins(module, first))
            return next((node for node in found if node is not None), None)
        finally:
            self._sought.discard((module, first))

    def _origins(self, module: str, name: str) -> Iterator[str]:
        """Return where a module may have a name from, those that say so before those that import all there is."""
        found = self._read(module)
        if found is None:
            return
        package = module if found.is_package else module.rpartition(".")[0]
        whole = []
        for match in _IMPORT.finditer(found.text):
            origin = _absolute(match[1], package)
            for imported in _COMMENT.sub("", match[2] or match[3] or "").split(","):
                original, _, alias = (word.strip() for word in imported.partition(" as "))
                if (alias or original) == name:
                    yield f"{origin}:{original}"
                elif original == "*":
                    whole.append(f"{origin}:{name}")
        yield from whole

    def _member(self, module: str, name: str, owner: _Class, attr: str) -> ast.AST | None:
        """Return what a class defines or inherits."""
        if attr in owner.defines:
            return _within(self._top_level(module, name) or self._conditional(module, name), [attr])
        inherited = (self.find(f"{module}:{base}.{attr}") for base in owner.bases if base != name)
        return next((found for found in inherited if found is not None), None)

    def _method(self, module: str, name: str, attr: str) -> ast.AST | None:
        """Return a method of a class, without a look at the rest of it."""
        found = self._read(module)
        owner = None if found is None else _last_block(found.text, name)
        block = None if owner is None else _last_block(owner, attr, indent=4)
        return None if block is None else _parsed(textwrap.dedent(block))

    def _read_class(self, module: str, name: str) -> _Class | None:
        """Read what a class has: its tree takes too much memory to be kept in a traced program."""
        tree = self._top_level(module, name) or self._conditional(module, name, "class")
        if not isinstance(tree, ast.ClassDef):
            return None
        return _Class(tuple(_bases(tree)), frozenset(_all_defined(tree.body)))

    def _is_set(self, module: str, name: str, attr: str) -> bool:
        """Tell whether a class sets an attribute, of whatever object: by its lines, or by its tree, which is slow."""
        found = self._read(module)
        lines = None if found is None else _last_block(found.text, name)
        if lines is not None and re.search(rf"^\s+self\.{attr}\b\s*(?::[^=\n]+)?=[^=]", lines, re.MULTILINE):
            return True
        tree = self._top_level(module, name) or self._conditional(module, name)
        nodes = () if tree is None else ast.walk(tree)
        return any(isinstance(node, ast.Attribute) and node.attr == attr and _is_stored(node) for node in nodes)

    def _top_level(self, module: str, name: str) -> ast.AST | None:
        """Return the last definition of a name at a module's margin, which alone is parsed."""
        found = self._read(module)
        return None if found is None else _parsed(_last_block(found.text, name) or "")

    def _conditional(self, module: str, name: str, kind: str = r"(?:async\s+)?def|class") -> ast.AST | None:
        """Return a definition that is not so simple: under a condition, or a name that is assigned."""
        found = self._read(module)
        defines = rf"^[ \t]*(?:(?:{kind})\s+{name}\b|{name}\s*(?::[^=\n]+)?=[^=])"
        if found is None or not re.search(defines, found.text, re.MULTILINE):
            return None
        return _definition(ast.parse(found.text).body, name)


class _Class(NamedTuple):
    """What a class has."""

    bases: tuple[str, ...]
    defines: frozenset[str]
    """The names in its body."""


def _last_block(text: str, name: str, *, indent: int = 0) -> str | None:
    """Return the lines of the last definition of a name at this margin; None if there is none."""
    margin = " " * indent
    defines = re.compile(rf"^{margin}(?:async\s+def|def|class)\s+{re.escape(name)}\b", re.MULTILINE)
    *_, last = [None, *defines.finditer(text)]
    if last is None:
        return None
    ends = re.compile(rf"^ {{0,{indent}}}[^\s#)\]}}]", re.MULTILINE)
    following = ends.search(text, text.index("\n", last.start()) + 1)
    return text[last.start() : following.start() if following else len(text)]


def _parsed(block: str) -> ast.AST | None:
    """Return the tree of a definition; None of a block whose end is in the middle of a text or of a bracket."""
    try:
        body = ast.parse(block).body
    except SyntaxError:
        return None
    return body[0] if body else None


def _within(found: ast.AST | None, path: list[str]) -> ast.AST | None:
    """Return what lies in a class, by its names."""
    for attr in path:
        own = _definition(found.body, attr) if isinstance(found, ast.ClassDef) else None
        named = None if own is None else _name_of_value(own)  # `__call__ = _call_impl`
        found = own if named is None or not isinstance(found, ast.ClassDef) else _definition(found.body, named) or own
    return found


def _all_defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        yield from _names_defined(node)
        if isinstance(node, ast.If | ast.Try):
            yield from _all_defined(node.body + node.orelse)


def _definition(body: list[ast.stmt], name: str) -> ast.AST | None:
    """Return the last definition of a name in a body, that under a condition too."""
    found: ast.AST | None = None
    for node in body:
        if name in _names_defined(node):
            found = node
        elif isinstance(node, ast.If | ast.Try):
            found = _definition(node.body + node.orelse, name) or found
    return found


def _names_defined(node: ast.stmt) -> list[str]:
    if isinstance(node, _DEFINITIONS):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _name_of_value(node: ast.AST) -> str | None:
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    return value.id if isinstance(value, ast.Name) else None


def _is_stored(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def _bases(owner: ast.ClassDef) -> list[str]:
    return [base.id for base in owner.bases if isinstance(base, ast.Name)]


def _absolute(module: str, package: str) -> str:
    """Return the full name of a module that a `from` names, in a module of this package."""
    dots = len(module) - len(module.lstrip("."))
    if not dots:
        return module
    parents = package.split(".")[: len(package.split(".")) - dots + 1]
    return ".".join([*parents, *filter(None, [module.lstrip(".")])])
