"""Makes what the tests of real frameworks need: an environment of each, and the sources of releases to read.

    python tests/frameworks/environments.py FOLDER [--sources]

Each part is made once. A wheel is taken apart for its Python files and deleted before the next one comes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from rltrace.hooks.versions import DISTRIBUTIONS

FOLDER_VARIABLE = "RLTRACE_FRAMEWORKS"
"""Environment variable that tells the tests where all of it is."""

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

OPENTELEMETRY = ("1.20.0", "1.30.0", "1.45.2")
"""Releases of its API and SDK in which our tests of it run."""

REQUIREMENTS = {
    # A lock: pip takes minutes to resolve what vLLM asks for.
    "vllm": ["--no-deps", "--requirement", str(HERE / "vllm.txt")],
    # Its lock is of what it imports on a CPU: in full it is CUDA's, and says so of torch too.
    "sglang": ["--no-deps", "--requirement", str(HERE / "sglang.txt")],
    # DeepSpeed comes as source alone, which imports torch to be built; its kernels are compiled when they are needed.
    # accelerate asks for the version of transformers before it uses it.
    "deepspeed": ["--no-build-isolation", "accelerate==1.15.0", "deepspeed==0.19.8", "transformers==5.24.0"],
    # Locks too, of vLLM's CPU build on torch 2.13. The trainers name as much again that nothing here imports.
    "openrlhf": ["--no-deps", "--no-build-isolation", "--requirement", str(HERE / "openrlhf.txt")],
    "skyrl": ["--no-deps", "--no-build-isolation", "--requirement", str(HERE / "skyrl.txt")],
    "trl": ["--constraint", str(ROOT / "constraints.txt"), "trl==1.16.0", "peft==0.21.2", "torch_memory_saver==0.0.10"],
    **{f"opentelemetry-{version}": [f"opentelemetry-sdk=={version}"] for version in OPENTELEMETRY},
}
"""What pip installs into each environment, besides us and pytest."""

WITH_TORCH = ["--constraint", str(ROOT / "constraints.txt"), "torch", "setuptools<81", "wheel"]
BUILT_WITH = {"deepspeed": WITH_TORCH, "openrlhf": WITH_TORCH, "skyrl": WITH_TORCH, "vllm": WITH_TORCH}
"""What has to be there before that."""

RELEASES = {
    "vllm": [
        "0.8.5", "0.9.2", "0.10.2", "0.11.0", "0.12.0", "0.13.0", "0.14.1", "0.15.1", "0.16.0", "0.17.1", "0.18.1",
        "0.19.1", "0.20.2", "0.21.0", "0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0",
        "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0",
    ],
    "sglang": ["0.4.6.post5", "0.4.9", "0.5.3", "0.5.9", "0.5.12", "0.5.23"],
    "torch_memory_saver": ["0.0.10"],
    "torch": ["2.6.0", "2.9.1", "2.11.0", "2.13.0", "2.14.1", "2.15.0"],
    "transformers": ["5.24.0"],
    "peft": ["0.21.2"],
    "trl": ["1.11.0", "1.12.0", "1.13.0", "1.14.2", "1.15.0", "1.16.0"],
    "ray": ["2.41.0", "2.60.0"],
    "verl": ["0.9.1"],
    "openrlhf": ["0.11.2"],
    "areal": ["1.0.4"],
    "skyrl": ["0.3.0"],
    "opentelemetry": list(OPENTELEMETRY),
    "tensorboard": ["2.10.0", "2.21.0"],
    "tensorboardX": ["2.5", "2.6.5"],
    "wandb": ["0.16.0", "0.31.0"],
}  # fmt: skip
"""Releases whose sources are read, the last one last: one of each of vLLM's and TRL's lines. Tests of verl's releases
read the older ones."""

PYTHONS = {"openrlhf": "3.11", "skyrl": "3.12"}
"""Of OpenRLHF there are wheels for 3.11 only, and SkyRL's classes cannot be read by pydantic before 3.12."""

PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 24, 17)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64", "any"]


def main(folder: Path, *, only_sources: bool = False) -> None:
    """Make everything that is not there yet."""
    for name, requirements in () if only_sources else REQUIREMENTS.items():
        make_environment(folder / name, requirements)
    for package, versions in RELEASES.items():
        for version in versions:
            fetch_sources(package, version, folder / "sources" / f"{package}-{version}")


def make_environment(folder: Path, requirements: Iterable[str]) -> None:
    """A virtual environment with these requirements, us and pytest."""
    done = folder / "made"
    if done.exists():
        return
    python = python_for(folder.name)
    if python is None:
        print(f"no {folder}: there is no Python {PYTHONS[folder.name]}", flush=True)
        return
    print(f"making {folder}", flush=True)
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if folder.name in BUILT_WITH:
        subprocess.run([*pip, *BUILT_WITH[folder.name]], check=True)
    subprocess.run([*pip, *requirements], check=True)
    subprocess.run([*pip, "pytest", "pytest-timeout", "--editable", str(ROOT)], check=True)
    done.touch()


def python_for(name: str) -> str | None:
    """A Python of the version that an environment needs: this one, one on the path, or one of pyenv's."""
    version = PYTHONS.get(name)
    if version is None or sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for candidate in (f"python{version}", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))):
        if (
            shutil.which(candidate)
            and subprocess.run([candidate, "-V"], check=False, capture_output=True).returncode == 0
        ):
            return candidate
    return None


def fetch_sources(package: str, version: str, folder: Path) -> None:
    """The Python files of a release's wheel for Linux."""
    if folder.exists():
        return
    print(f"reading {package} {version}", flush=True)
    folder.parents[1].mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parents[1]) as download:
        where = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        only = ["--only-binary", ":all:", "--python-version", PYTHONS.get(package, "3.12"), "--dest", download]
        wheels = [f"{name}=={version}" for name in DISTRIBUTIONS.get(package, (package,))]
        subprocess.run([*pip, *only, *where, *wheels], check=True)
        taken = Path(download, "taken")
        for wheel in Path(download).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(taken, [name for name in archive.namelist() if name.endswith(".py")])
        for libraries in list(taken.glob("*.data/purelib/*")):  # pip puts these beside the others
            libraries.rename(taken / libraries.name)
        folder.parent.mkdir(exist_ok=True)
        taken.rename(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), only_sources="--sources" in sys.argv)
