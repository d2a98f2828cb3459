"""A run of a configuration under `rltrace run`: made once, and read as often as somebody asks.

Beside the Recording `NAME/` lie `NAME.yaml`, the whole configuration, and `NAME.json`, how the run ended. A run without
the last one was stopped, and is made again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import yaml

from rltrace.errors import ConfigError, RltraceError, RunError
from rltrace_reference.config import Config


class Ending(msgspec.Struct, frozen=True):
    """How a run ended."""

    returncode: int
    said: str
    """What it said on stderr; empty if it ended well."""
    seconds: float
    """From its start to its end."""
    limit_bytes: int | None
    """The memory of a rank's device: the limit of the configuration, or the size of the GPU."""


class RecordedRun:
    """A configuration, and what became of it."""

    def __init__(self, folder: Path, name: str, values: dict[str, Any]) -> None:
        """Args:
        folder: Of all runs that are made together.
        name: Of this one.
        values: The whole configuration.
        """
        self.name, self.values = name, values
        self.recording = folder / name
        self.config_file, self._ending_file = folder / f"{name}.yaml", folder / f"{name}.json"

    @property
    def ending(self) -> Ending | None:
        """How it ended; None if it has not, or was stopped."""
        if not self._ending_file.exists():
            return None
        return msgspec.json.decode(self._ending_file.read_bytes(), type=Ending)

    def write_config(self) -> None:
        """Write the configuration.

        Raises:
            ConfigError: there is another one of this name.
        """
        text = yaml.safe_dump(self.values, sort_keys=False)
        if self.config_file.exists() and self.config_file.read_text() != text:
            raise ConfigError(
                f"--out: {self.config_file} is another configuration than this one; name another folder, or remove it"
            )
        self.config_file.parent.mkdir(parents=True, exist_ok=True)
        self.config_file.write_text(text)

    def make(self, config: Config, *, force: bool = False) -> Ending:
        """Make the run, and say how it ended; what a stopped one left is removed.

        Args:
            config: The same configuration, after it was checked.
            force: As of `rltrace run`.
        """
        if self.recording.exists():
            shutil.rmtree(self.recording)
        start = time.monotonic()
        command = [sys.executable, "-m", "rltrace", "run", str(self.config_file), "--out", str(self.recording)]
        done = subprocess.run([*command, *(["--force"] if force else [])], check=False, capture_output=True, text=True)
        if done.returncode < 0 or done.returncode > 128:
            raise RunError(f"{self.name}: the run was stopped (exit code {done.returncode}); start again to go on")
        ending = Ending(done.returncode, done.stderr.strip(), time.monotonic() - start, limit_bytes(config))
        if not self.recording.exists():
            raise RltraceError(f"{self.name}: {ending.said or 'nothing was recorded'}")
        self._ending_file.write_bytes(msgspec.json.encode(ending))
        return ending

    def summary(self) -> bytes:
        """Return what `rltrace summary --json` says of it.

        Raises:
            RunError: the Recording cannot be read.
        """
        command = [sys.executable, "-m", "rltrace", "summary", "--json", str(self.recording)]
        done = subprocess.run(command, check=False, capture_output=True)
        if done.returncode != 0:
            raise RunError(f"{self.name}: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout


def limit_bytes(config: Config) -> int | None:
    """Return the memory of a rank's device: the limit of the configuration, or the size of the GPU."""
    if config.device == "cpu":
        return config.memory_limit_bytes
    from rltrace_reference import device  # imports torch

    return device.total_bytes()


def merged(common: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with changes; a section's keys are changed one by one.

    Raises:
        ConfigError: something is changed as a section that is none.
    """
    values = dict(common)
    for key, value in changes.items():
        if isinstance(value, dict) and not isinstance(values.get(key, {}), dict):
            raise ConfigError(f"{key}: is {values[key]!r}, which has no keys; name a key such as rollout.n")
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return values


def read_values(file: Path) -> dict[str, Any]:
    """Return the values in a YAML file.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    from rltrace_reference.config import read_yaml

    values = read_yaml(file)
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: holds {type(values).__name__}, not keys; write keys such as `steps: 24`")
    return values
