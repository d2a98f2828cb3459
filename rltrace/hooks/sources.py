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
        self._top_level = functools.lru_cache(maxsize=4)(self._parse_top_level)
        self._sought: set[tuple[str, str]] = set()

    def has(self, module: str) -> bool:
        """Tell whether there is source of a module."""
        return self._read(module) is not None

    def find(self, target: str) -> ast.AST | None:
        """Return the definition of "module:Class.attr", followed through imports, base classes and other names."""
        module, _, path = target.partition(":")
        first, *rest = path.split(".")
        found = self._top_level(module, first)
        if found is None:
            if rest and self.has(f"{module}.{first}"):
                return self.find(f"{module}.{first}:{'.'.join(rest)}")
            return self._find_imported(module, first, rest)
        for attr in rest:
            found = self._attribute(module, found, attr) if isinstance(found, ast.ClassDef) else None
        return found

    def has_attribute(self, target: str) -> bool:
        """Tell whether the class of "module:Class.attr" or one below it defines it, or sets it of its objects."""
        owner_name, _, attr = target.rpartition(".")
        if self.find(target) is not None:
            return True
        owner = self.find(owner_name) if ":" in owner_name else None
        if not isinstance(owner, ast.ClassDef):
            return False
        if any(isinstance(node, ast.Attribute) and node.attr == attr and _is_set(node) for node in ast.walk(owner)):
            return True
        module = self._module_of(owner_name)
        return any(self._inherits(module, base, attr) for base in _bases(owner))

    def _inherits(self, module: str, base: str, attr: str) -> bool:
        return self.find(f"{module}:{base}") is not None and self.has_attribute(f"{module}:{base}.{attr}")

    def _module_of(self, target: str) -> str:
        """Return the module that defines what a target names, which may be imported from there."""
        module, _, path = target.partition(":")
        first, _, rest = path.partition(".")
        if self._top_level(module, first) is not None:
            return module
        for origin in self._origins(module, first):
            imported = ".".join(filter(None, [origin, rest]))
            if self.find(imported) is not None:
                return self._module_of(imported)
        return module

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

    def _attribute(self, module: str, owner: ast.ClassDef, attr: str) -> ast.AST | None:
        own = _definition(owner.body, attr)
        if own is not None:
            named = _name_of_value(own)  # `__call__ = _call_impl`
            return own if named is None else _definition(owner.body, named) or own
        inherited = (self.find(f"{module}:{base}.{attr}") for base in _bases(owner) if base != owner.name)
        return next((found for found in inherited if found is not None), None)

    def _parse_top_level(self, module: str, name: str) -> ast.AST | None:
        """Return the last definition of a name in a module; of a long module only that definition is parsed."""
        found = self._read(module)
        if found is None or not re.search(rf"\b{re.escape(name)}\b", found.text):
            return None
        text = found.text
        *_, last = [None, *re.finditer(rf"^(?:async\s+def|def|class)\s+{re.escape(name)}\b", text, re.MULTILINE)]
        if last is not None:
            try:
                return ast.parse(_block(text, last.start())).body[0]
            except SyntaxError:  # what looks like its end is in the middle of a text or of a bracket
                pass
        return _definition(ast.parse(text).body, name)


def _block(text: str, start: int) -> str:
    """Return the lines from one that begins at the margin up to the next one that does."""
    following = re.compile(r"^[^\s#)\]}]", re.MULTILINE).search(text, text.index("\n", start) + 1)
    return text[start : following.start() if following else len(text)]


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


def _is_set(node: ast.Attribute) -> bool:
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
