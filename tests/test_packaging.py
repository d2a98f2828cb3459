"""The wheel: three packages under one distribution, whole, and nothing else."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import installed
import pytest
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from rltrace.host.native_library import DECODER, LIBRARIES, NativeLibrary

ROOT = Path(__file__).parent.parent
SOURCES = {
    "rltrace": ROOT / "rltrace",
    "rltrace_exporters": ROOT / "exporters" / "rltrace_exporters",
    "rltrace_reference": ROOT / "reference_run" / "rltrace_reference",
}
NATIVE = {f"rltrace/{library.name}" for library in LIBRARIES}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(installed.wheel(tmp_path_factory.mktemp("wheel")))


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
    assert inside == source | NATIVE
    assert "rltrace/py.typed" in inside


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler: cc")
def test_decoder_in_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """The wheel has the decoder of its own source, for any Python of its platform."""
    assert Path(str(wheel.filename)).name.split("-")[2:4] == ["py3", "none"]
    library = ctypes.CDLL(wheel.extract("rltrace/read/native/decoder.so", tmp_path))
    library.rltrace_source.restype = ctypes.c_uint32
    sources = (wheel.read(f"rltrace/read/native/{file.name}") for file in DECODER.files)
    assert library.rltrace_source() == zlib.crc32(b"".join(sources))


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler: cc")
def test_wheel_says_which_glibc_it_needs(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """An index takes the wheel, installers here do too, and its libraries need neither a newer glibc nor another
    library."""
    (tag,) = parse_wheel_filename(Path(str(wheel.filename)).name)[3]
    named = re.fullmatch(r"manylinux_(\d+)_(\d+)_\w+", tag.platform)
    assert named and tag in sys_tags()
    for name in sorted(NATIVE):
        said = subprocess.run(
            ["objdump", "-p", wheel.extract(name, tmp_path)], capture_output=True, text=True, check=True
        )
        needed = [library.partition(".")[0] for library in re.findall(r"NEEDED +(\S+)", said.stdout)]
        assert {library.partition("-")[0] for library in needed} <= {"libc", "ld"}, "the C library and its loader"
        versions = {tuple(map(int, found)) for found in re.findall(r"GLIBC_(\d+)\.(\d+)", said.stdout)}
        assert max(versions, default=(0, 0)) <= tuple(map(int, named.groups()))


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler: cc")
@pytest.mark.parametrize("built", [library for library in LIBRARIES if library.is_module], ids=lambda one: one.name)
def test_modules_in_wheel(built: NativeLibrary, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """The wheel has each native module of its own source, which this Python loads."""
    spec = importlib.util.spec_from_file_location(built.module_name, wheel.extract(f"rltrace/{built.name}", tmp_path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = built.name.rpartition("/")[0]
    sources = (wheel.read(f"rltrace/{folder}/{file.name}") for file in built.files)
    assert zlib.crc32(b"".join(sources)) == module.SOURCE


def test_wheel_without_compiler(tmp_path: Path) -> None:
    """Without a compiler the wheel is one for every platform, and has no library."""
    path = installed.build(tmp_path, CC="no-such-compiler")
    assert path.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(path).namelist() if name.endswith(".so")]


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


def _copied(folder: Path, at_s: int) -> Path:
    """What the repository keeps, elsewhere and with other times."""
    kept = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, kept.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
            os.utime(folder / name, (at_s, at_s))
    return folder


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no clone: git knows what belongs to it")
def test_builds_are_reproducible(tmp_path: Path) -> None:
    """Wheel and sdist are the same bytes, wherever and whenever they are built; `SOURCE_DATE_EPOCH` dates them."""
    built: dict[str, list[bytes]] = {}
    for place, at_s, zone, umask in (("a", 10**9, "UTC", 0o022), ("b/deeper", 1_600_000_000, "Asia/Tokyo", 0o077)):
        folder = _copied(tmp_path / place, at_s)
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path / f"{place}.out")]
        environment = {**os.environ, "TZ": zone, "SOURCE_DATE_EPOCH": "1750000000"}
        subprocess.run(command, cwd=folder, check=True, capture_output=True, env=environment, umask=umask)
        for file in (tmp_path / f"{place}.out").iterdir():
            built.setdefault(file.name, []).append(file.read_bytes())
    assert sorted(Path(name).suffix for name in built) == [".gz", ".whl"]
    assert all(one == other for one, other in built.values())
    (name,) = (name for name in built if name.endswith(".whl"))
    dates = {one.date_time[:3] for one in zipfile.ZipFile(tmp_path / "a.out" / name).infolist()}
    assert dates == {(2025, 6, 15)}


def test_readers_get_what_they_need() -> None:
    """Who follows the README, or says `make run`, can use every command that it names."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    extras = re.search(r"(?s)\[project\.optional-dependencies\](.*?)\n\[", pyproject)
    assert extras is not None
    readers = set(re.findall(r"(?m)^(\w+) = \[", extras[1])) - {"run", "docs", "dev"}
    for file in ("README.md", "Makefile"):
        said = re.search(r"'\.\[(.*?)\]'", (ROOT / file).read_text())
        assert said is not None and set(said[1].split(",")) - {"run"} == readers, file
