"""Builds the native libraries into the wheel, where there is a C compiler; without one the wheel is pure Python."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
    """One library of a kind serves every CPython of a platform: one does not use Python's interface, the other uses the
    stable one."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile them, in place for an editable install."""
        self.folder = tempfile.mkdtemp()
        built: list[bytes] = []
        for library in self._libraries():
            path = library.path if version == "editable" else Path(self.folder) / library.path.name
            refused = library.build(path)
            if refused is not None:
                self.app.display_warning(f"{library.without}: {refused}")
            elif version != "editable":
                built.append(path.read_bytes())
                build_data["force_include"][str(path)] = f"rltrace/{library.name}"
        if built:
            build_data["tag"] = f"py3-none-{platform_of(built)}"
            build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what is in the wheel now."""
        shutil.rmtree(self.folder)

    def _libraries(self) -> Any:
        """Load the file that knows them; rltrace itself may lack what it needs here."""
        file = Path(self.root) / "rltrace" / "host" / "native_library.py"
        spec = importlib.util.spec_from_file_location("native_library", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.LIBRARIES


OLDEST_GLIBC = (2, 17)
"""Of the platforms that installers know by version, as PEP 599 has it."""


def platform_of(libraries: list[bytes]) -> str:
    """Return the platform on which these libraries load: by the newest glibc that they need (PEP 600).

    They need nothing besides. A package index refuses a wheel that only says `linux`.
    """
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    needed = [
        (int(major), int(minor)) for found in libraries for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", found)
    ]
    if not needed or not platform.startswith("linux_"):  # musl has no versions
        return platform
    major, minor = max(*needed, OLDEST_GLIBC)
    return f"manylinux_{major}_{minor}_{platform.removeprefix('linux_')}"
