"""The real wheels of verl, each in a folder of its own, and programs that run with one of them.

A release is put on PYTHONPATH beside the test environment's torch and Ray; what its modules import besides lies in
folders that releases share. Nothing of it is installed into the test environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".frameworks"

IMPORTED = (HERE / "imported.txt").read_text().split()
"""What importing the hooked modules needs, found by trying: dependencies of verl's would bring a torch of their own."""
BEFORE_TRANSFORMERS_5 = ["transformers==4.57.6", "huggingface_hub<1", "tokenizers==0.22.2"]
"""What the releases up to 0.7 import of transformers is not in its version 5."""


@dataclass(frozen=True)
class Release:
    """One release of verl."""

    version: str
    vllm: str
    """The vLLM that it is used with, of which the tests have placeholders only."""
    sglang: str
    """As `vllm`, by the release's own extra."""

    @property
    def line(self) -> int:
        """Its second number."""
        return int(self.version.split(".")[1])

    @property
    def folders(self) -> list[Path]:
        """What goes on PYTHONPATH, installed if need be."""
        folders = [installed(f"verl-{self.version}", [f"verl=={self.version}"])]
        if self.line <= 7:
            folders.append(installed("verl-transformers-4", BEFORE_TRANSFORMERS_5))
        return [*folders, installed("verl-imported", IMPORTED)]


RELEASES = (
    Release("0.4.1", vllm="0.8.5", sglang="0.4.6.post5"),
    Release("0.5.0", vllm="0.8.5", sglang="0.4.6.post5"),
    Release("0.6.1", vllm="0.11.0", sglang="0.5.5"),
    Release("0.7.1", vllm="0.12.0", sglang="0.5.6"),
    Release("0.8.0", vllm="0.12.0", sglang="0.5.8"),
    Release("0.9.1", vllm="0.24.0", sglang="0.5.12"),
)

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # what is called without Ray raises, and starts none
}
"""Variables of every release."""


def installed(name: str, requirements: list[str]) -> Path:
    """A folder with these packages and nothing that they depend on, made once."""
    folder, stamp = CACHE / name, CACHE / f"{name}.done"
    asked = " ".join(requirements)
    if not stamp.exists() or stamp.read_text() != asked:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--upgrade", "--target", str(folder), *requirements], check=True)
        stamp.write_text(asked)
    return folder


def environment(release: Release, scratch: Path, *behind: Path) -> dict[str, str]:
    """The environment of a program that imports this release.

    Args:
        release: Which one.
        scratch: A folder of the test's own.
        *behind: More folders for PYTHONPATH, behind the release.
    """
    metadata = scratch / "metadata" / f"vllm-{release.vllm}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release.vllm}\n")
    path = [*release.folders, HERE / "stand_in", HERE.parent / "absent", metadata.parents[1], HERE, *behind]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RLTRACE_")}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "SGLANG_VERSION": release.sglang,
        **SETTINGS,
    }


if __name__ == "__main__":
    for each in RELEASES:
        print(each.version, *each.folders)
