"""The packages that rltrace needs inside a traced program, whatever the program has under the same names.

A program may have a `msgspec.py` of its own. It imports that one, traced or not, and ours is loaded beside it. So this
is the only module that imports msgspec and wrapt for what runs in a traced process.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType
from typing import TYPE_CHECKING

_apart: dict[str, ModuleType] = {}
"""Modules of ours that `sys.modules` does not hold, because the program has others of their names."""


def own(name: str, needed: str) -> ModuleType:
    """Return the package of a distribution, whatever else the program imports by its name.

    Args:
        name: Name of the package, and of its distribution.
        needed: A name in the package by which it is recognized.

    Raises:
        ImportError: there is none, or only another module of this name.
    """
    home = _home(name)
    module = import_module(name) if home is None else _import_apart(name, home)
    if not hasattr(module, needed):
        where = getattr(module, "__file__", None) or "a module without a file"
        raise ImportError(f"{name} is {where} here, and not the package that rltrace needs: pip install {name}")
    return module


def put_installed_first() -> None:
    """Let nothing of PYTHONPATH, the script's or the working folder hide what is installed, in a process of ours.

    The variable itself stays as it is, for the program that is started.
    """
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if not getattr(sys.flags, "safe_path", False):  # new in Python 3.11
        path += sys.path[:1]
    theirs = {os.path.realpath(entry) for entry in path} - {os.path.realpath(entry) for entry in site.getsitepackages()}
    sys.path.sort(key=lambda entry: os.path.realpath(entry) in theirs)
    sys.modules.update(_apart)


def _home(name: str) -> str | None:
    """Return the folder that has a distribution, if `import` would find something else; None if it would find that."""
    found_in = _folder_of(name)
    if found_in is not None and _holds(found_in, name):
        return None
    if found_in is None and name not in sys.modules:  # nowhere, or by a finder of another kind
        return None
    return next((entry for entry in sys.path if _holds(entry, name)), None)


def _folder_of(name: str) -> str | None:
    """Return the folder on the path of a package that is imported, or would be."""
    is_imported = name in sys.modules
    spec = getattr(sys.modules[name], "__spec__", None) if is_imported else PathFinder.find_spec(name)
    origin = getattr(spec, "origin", None)
    if not isinstance(origin, str):
        return None
    folder = os.path.dirname(origin)
    return os.path.dirname(folder) if getattr(spec, "submodule_search_locations", None) else folder


def _holds(folder: str, name: str) -> bool:
    """Return whether a folder on the path has the distribution, by what its installer wrote beside it."""
    try:
        entries = os.listdir(folder or os.curdir)
    except OSError:
        return False
    said = any(entry.startswith((f"{name}-", f"{name}.")) and entry.endswith("-info") for entry in entries)
    return said and name in entries


def _import_apart(name: str, home: str) -> ModuleType:
    """Import a package from a folder, and leave the program's own modules of all names as they were."""
    hidden = _taken(key for key in list(sys.modules) if key.partition(".")[0] == name)
    before = set(sys.modules)
    sys.path.insert(0, home)
    try:
        return import_module(name)
    finally:
        sys.path.remove(home)
        new = set(sys.modules) - before
        _apart.update(_taken(key for key in new if key.partition(".")[0] not in sys.stdlib_module_names))
        sys.modules.update(hidden)


def _taken(keys: Iterable[str]) -> dict[str, ModuleType]:
    return {key: sys.modules.pop(key) for key in keys}


if TYPE_CHECKING:
    import msgspec as msgspec
else:
    msgspec = own("msgspec", "Struct")
