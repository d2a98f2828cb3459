"""Builds the native decoder into the wheel, where there is a C compiler; without one the wheel is pure Python."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

IN_WHEEL = "rltrace/read/native/decoder.so"


class DecoderHook(BuildHookInterface):  # type: ignore[type-arg]
    """One library serves every Python of a platform, because it does not use Python's API."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile it, in place for an editable install."""
        decoder = self._decoder()
        if version == "editable":
            self._say(decoder.build(decoder.LIBRARY))
            return
        self.folder = tempfile.mkdtemp()
        library = Path(self.folder) / "decoder.so"
        refused = decoder.build(library)
        self._say(refused)
        if refused is None:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
            build_data["pure_python"] = False
            build_data["force_include"][str(library)] = IN_WHEEL

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what is in the wheel now."""
        if version != "editable":
            shutil.rmtree(self.folder)

    def _decoder(self) -> Any:
        """Load the file that compiles it; rltrace itself may lack what it needs here."""
        spec = importlib.util.spec_from_file_location("build", Path(self.root) / "rltrace/read/native/build.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def _say(self, refused: str | None) -> None:
        if refused is not None:
            self.app.display_warning(f"segments will be decoded in Python, which takes longer: {refused}")
