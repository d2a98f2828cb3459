"""The wheel: three packages under one distribution, whole, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {
    "rltrace": ROOT / "rltrace",
    "rltrace_exporters": ROOT / "exporters" / "rltrace_exporters",
    "rltrace_reference": ROOT / "reference_run" / "rltrace_reference",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    return zipfile.ZipFile(path)


def test_wheel_holds_three_packages(wheel: zipfile.ZipFile) -> None:
    """The wheel holds the three packages and nothing else.

    A plain `exporters` or `tests` would overwrite another project's on install.
    """
    top = {name.split("/")[0] for name in wheel.namelist()}
    (info,) = (name for name in top if name.endswith(".dist-info"))
    assert top - {info} == set(SOURCES) | {"rltrace-startup.pth"}
    assert info.startswith("rltrace_toolkit-")


def test_wheel_holds_every_file(wheel: zipfile.ZipFile) -> None:
    """The wheel holds every file of the packages.

    Those that are no Python too: what a start-up hook or a report is made of.
    """
    moved = {"rltrace-startup.pth": "rltrace/hooks/startup/rltrace-startup.pth"}  # Python reads it at the top only
    inside = {moved.get(name, name) for name in wheel.namelist() if ".dist-info/" not in name}
    source = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in SOURCES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    assert inside == source
    assert "rltrace/py.typed" in inside


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    """The wheel says what it needs and what it runs."""
    texts = {Path(name).name: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    assert "rltrace = rltrace.__main__:main" in texts["entry_points.txt"]
    assert "[verl.plugins]\nrltrace = rltrace.verl_plugin" in texts["entry_points.txt"]
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        assert f"[{group}]\nrltrace = rltrace.instrument:join_run" in texts["entry_points.txt"]
    needed = [
        line for line in texts["METADATA"].splitlines() if line.startswith("Requires-Dist") and "extra" not in line
    ]
    assert not [line for line in needed if any(f" {name}" in line for name in ("torch", "ray", "vllm", "protobuf"))]
