"""The sources of releases in a folder, and the hooks that an instrumentation would name there, without importing any.

An instrumentation may ask a framework what it has before it names its hooks. Stand-ins answer, from the sources.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from rltrace import plugins
from rltrace.hooks.patching import PatchSet
from rltrace.hooks.sources import ModuleText, Source
from rltrace.instrument.memory import allocation_owners, cuda_memory
from rltrace.instrument.sglang import allocations as sglang_allocations
from rltrace.instrument.torch import cuda_time
from rltrace.instrument.vllm import allocations as vllm_allocations
from rltrace.record import allocation_steps, chosen_steps, trackers

OF_GPUS = (allocation_owners, cuda_memory, cuda_time, sglang_allocations, vllm_allocations)
"""Modules whose instrumentations name hooks only where there is a driver."""

ASKED = ("verl", "sglang", "trl", "ray", "vllm")
"""Packages that instrumentations ask, once they are imported, what they have."""


class Releases:
    """One release of each of several packages.

    Args:
        folders: Of their sources, by package.
        versions: Theirs.
    """

    def __init__(self, folders: Mapping[str, Path], versions: Mapping[str, str]) -> None:
        self.versions = versions
        self._folders = folders
        self.source = Source(self.read)

    def has(self, package: str) -> bool:
        """Whether the package is among them."""
        return package in self._folders

    def read(self, module: str) -> ModuleText | None:
        """The source of a module."""
        folder = self._folders.get(module.partition(".")[0])
        if folder is None:
            return None
        path = folder.joinpath(*module.split("."))
        for file, is_package in ((path / "__init__.py", True), (path.with_suffix(".py"), False)):
            if file.exists():
                return ModuleText(file.read_text(), is_package)
        is_extension = any(path.parent.glob(f"{path.name}.*.so"))  # beside a folder of its types, as torch._C
        return ModuleText("", is_package=True) if path.is_dir() and not is_extension else None

    def hooks(self, name: str) -> PatchSet:
        """The hooks that an instrumentation names for these releases; none of them is put in place."""
        patches = PatchSet(name, Rows())
        patches.refuse("only named")
        with self._stand_ins(), with_driver():
            plugins.load(plugins.INSTRUMENTATIONS[name])().install(patches)
            for module, function in patches.awaiting:
                package = module.partition(".")[0]
                if package in ASKED and self.read(module) is not None:
                    function(mock.Mock())
        return patches

    @contextlib.contextmanager
    def _stand_ins(self) -> Iterator[None]:
        """Have every import of these packages find a stand-in."""
        before = dict(sys.modules)
        for module in before:
            if self.has(module.partition(".")[0]):
                del sys.modules[module]
        finder = StandIns(self)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            for module in set(sys.modules) - set(before):
                if self.has(module.partition(".")[0]):
                    del sys.modules[module]
            sys.modules.update(before)


@contextlib.contextmanager
def with_driver() -> Iterator[None]:
    """Name the hooks that are named on a machine with a GPU, where steps are chosen, and where trackers are wanted."""
    with contextlib.ExitStack() as patched:
        for needing in OF_GPUS:
            patched.enter_context(mock.patch.object(needing, "DRIVER", Path("/dev/null")))
        wanted = {allocation_steps.KERNELS_VARIABLE: "3", chosen_steps.STEPS_VARIABLE: "3", trackers.VARIABLE: "1"}
        patched.enter_context(mock.patch.dict(os.environ, wanted))
        yield


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that have what the sources define."""

    def __init__(self, releases: Releases) -> None:
        self._releases = releases

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        found = self._releases.read(name)
        return None if found is None else importlib.machinery.ModuleSpec(name, self, is_package=found.is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = StandIn(spec.name)
        module.__dict__.update(_source=self._releases.source, __version__=self._releases.versions.get(spec.name))
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


class StandIn(ModuleType):
    """A module, or what it defines, that has the names which its source defines."""

    def __getattr__(self, name: str) -> Any:
        at = f"{self.__name__}.{name}" if ":" in self.__name__ else f"{self.__name__}:{name}"
        if name.startswith("__") or self._source.find(at) is None:
            raise AttributeError(at)
        found = StandIn(at)
        found.__dict__["_source"] = self._source
        return found


class Rows:
    """Where hooks report to; nobody reads it."""

    def hook(self, *_args: Any, **_kwargs: Any) -> Rows:
        return self

    def fired(self) -> None:
        pass


def releases_in(folder: Path, versions: Mapping[str, str]) -> Releases:
    """These releases, whose sources are in folders `<package>-<version>`."""
    return Releases({package: folder / f"{package}-{version}" for package, version in versions.items()}, versions)
