"""rltrace as a user has it: its wheel, installed into an environment of its own."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec

from rltrace.events import COLLECTION
from rltrace.read.recording import Recording

ROOT = Path(__file__).parents[1]
OURS = Path(msgspec.__file__).parents[1]
"""Where the packages are that the tests run with: torch, Ray, what rltrace needs."""


@dataclass
class Environment:
    """A virtual environment with our wheel in it; everything else is that of the tests."""

    path: Path

    @property
    def python(self) -> str:
        return str(self.path / "bin" / "python")

    @property
    def site(self) -> Path:
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.path)}))

    @property
    def others(self) -> Path:
        """Says where all other packages are; written when all else is there."""
        return self.site / "others.pth"

    def variables(self, **added: str) -> dict[str, str]:
        """The tests' own variables without those that make rltrace importable, or trace."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("RLTRACE_") and name not in ("PYTHONPATH", "RAY_RUNTIME_ENV_HOOK", "RAY_ADDRESS")
        }
        path = os.pathsep.join([str(self.path / "bin"), os.environ["PATH"]])
        return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", **added}

    def pip_install(self, *arguments: str) -> None:
        """Install packages into it."""
        command = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def run(self, *command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it."""
        return subprocess.run(
            [str(word) for word in command], env=self.variables(**variables), cwd=cwd, check=False,
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip

    @property
    def script(self) -> Path:
        """The command as pip installs it."""
        return self.path / "bin" / "rltrace"

    def rltrace(self, *words: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run our command line in it."""
        cli = "from rltrace.cli import main; main(prog_name='rltrace')"
        return self.run(self.python, "-c", cli, *words, cwd=cwd, **variables)


def make_bare(folder: Path) -> Environment:
    """Where rltrace is only on the path: no wheel, so no `.pth` of ours is read."""
    environment = _empty(folder)
    environment.others.write_text(f"{OURS}\n{ROOT}\n")
    return environment


def make(folder: Path) -> Environment:
    """Return an environment with the wheel, made once for all processes of a run of the tests: none may change it.

    Args:
        folder: One of pytest's, in that of this process.
    """
    built = wheel(folder)
    with _shared(folder, "rltrace_environment") as shared:
        made = Environment(shared / "venv")
        return made if made.others.exists() else _with_wheel(shared, built)


def make_without(folder: Path, *names: str) -> Environment:
    """Return an environment with the wheel where packages whose names begin so are not there."""
    return _copied(folder, make(folder), _linked(folder, _all_but(names)))


def make_core(folder: Path) -> Environment:
    """Return an environment with the wheel and what it needs, and with none of its extras."""
    return _copied(folder, make(folder), _linked(folder, _needed("rltrace-toolkit")))


def build(folder: Path, **environment: str) -> Path:
    """Build our wheel into an empty folder, with more environment."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    return path


def wheel(folder: Path) -> Path:
    """Return our wheel, which is built once for all processes of a run of the tests.

    Args:
        folder: One of pytest's, in that of this process.
    """
    with _shared(folder, "rltrace_wheel") as shared:
        return next(shared.glob("*.whl"), None) or build(shared)


@contextmanager
def _shared(folder: Path, name: str) -> Iterator[Path]:
    """A folder of all processes of a run of the tests, while this one has it for itself."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ  # whose folder is in that of the run
    shared = folder.parents[1 if is_worker else 0] / name
    with shared.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield shared


def _empty(folder: Path) -> Environment:
    """Make an environment without packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    return Environment(folder / "venv")


def _with_wheel(folder: Path, built: Path) -> Environment:
    """Install our wheel into an environment that has the tests' own packages beside it."""
    environment = _empty(folder)
    environment.pip_install("--no-deps", str(built))
    # Packages only: a .pth of that folder, such as our own editable one, is not read from here.
    environment.others.write_text(f"{OURS}\n")
    return environment


def _copied(folder: Path, made: Environment, others: Path) -> Environment:
    """Copy an environment, which takes less than to install our wheel again, and give it other packages."""
    environment = _empty(folder)
    shutil.copytree(made.site, environment.site, dirs_exist_ok=True)
    shutil.copy(made.script, environment.script)
    environment.script.write_text(made.script.read_text().replace(str(made.path), str(environment.path)))
    environment.others.write_text(f"{others}\n")
    return environment


def _all_but(names: tuple[str, ...]) -> set[str]:
    return {entry.name for entry in OURS.iterdir() if not entry.name.startswith(names)}


def _needed(distribution: str) -> set[str]:
    """The files and folders of what a distribution needs, and of what that needs, without extras."""
    found: set[str] = set()
    for said in metadata.requires(distribution) or []:
        if "extra ==" not in said and (name := re.match(r"[\w.-]+", said)) is not None:
            files = metadata.files(name[0]) or []
            found |= {file.parts[0] for file in files if file.parts[0] != ".."} | _needed(name[0])
    return found


def _linked(folder: Path, names: set[str]) -> Path:
    """A folder with some of the packages that the tests run with."""
    others = folder / "others"
    others.mkdir()
    for name in names:
        (others / name).symlink_to(OURS / name)
    return others


def span_names(folder: Path) -> list[str]:
    """Names of all spans of a Recording, process by process; not of garbage collections, which come when they come."""
    events = [event for process in Recording.open(folder).processes for event in process.events()]
    return [event.name for event in events if hasattr(event, "start_ns") and event.name != COLLECTION]
