"""Packages that cannot be here, as far as importing them goes: all that they are asked for is there, and raises."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock


class Absent(ModuleType):
    """A module of such a package: a name that begins as a class's does is one, to derive from; others are functions."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        is_class = name.lstrip("_")[:1].isupper() and not name.isupper()
        found = type(name, (), {}) if is_class else MagicMock(name=name, side_effect=NotImplementedError(name))
        setattr(self, name, found)
        return found


class Finder(MetaPathFinder, Loader):
    """Finds every module of a package."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, fullname, path=None, target=None):
        """A spec, whatever the module is called."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{self.package}.") else None

    def create_module(self, spec):
        """An empty one."""
        return Absent(spec.name)

    def exec_module(self, module):
        """There is nothing to run."""


def stand_in(package):
    """Make a package, which is being imported, one that is absent."""
    sys.meta_path.append(Finder(package))  # behind the hooks' own finder, which looks for modules in those after it
    sys.modules[package].__class__ = Absent
