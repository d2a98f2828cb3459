"""Packages that cannot be here, as far as importing them goes: all that they are asked for is there, and raises."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock


class Absent(ModuleType):
    """A module of such a package."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = MagicMock(name=name, side_effect=NotImplementedError(name))
        setattr(self, name, found)
        return found


class WithClasses(Absent):
    """One whose names that begin as a class's does are classes, to derive from."""

    def __getattr__(self, name):
        if not name.lstrip("_")[:1].isupper() or name.isupper():
            return super().__getattr__(name)
        found = type(name, (), {})
        setattr(self, name, found)
        return found


class Finder(MetaPathFinder, Loader):
    """Finds every module of a package."""

    def __init__(self, package, kind):
        self.package, self.kind = package, kind

    def find_spec(self, fullname, path=None, target=None):
        """A spec, whatever the module is called."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{self.package}.") else None

    def create_module(self, spec):
        """An empty one."""
        return self.kind(spec.name)

    def exec_module(self, module):
        """There is nothing to run."""


def stand_in(package, kind=Absent):
    """Make a package, which is being imported, one that is absent."""
    sys.meta_path.append(
        Finder(package, kind)
    )  # behind the hooks' own finder, which looks for modules in those after it
    sys.modules[package].__class__ = kind
