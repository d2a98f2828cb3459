"""The manifest of a Recording: what was run. The process that owns the run writes it once."""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rltrace.events import VERSION
from rltrace.host import clock, regular_file
from rltrace.host.interruption import own_failure
from rltrace.host.mapped_file import require_size
from rltrace.record import checksum, redaction

FILE = "manifest.json"
PROCESSES = "processes"
LINES = "process.jsonl"
"""File in each process's folder: what the process says about itself."""

UNTRACED = "untraced.jsonl"
"""File in the Recording: processes of the run that were not traced, each with the reason."""

VERSIONED = (
    "rltrace-toolkit", "torch", "ray", "vllm", "sglang", "transformers", "peft", "deepspeed", "verl", "trl", "openrlhf",
    "areal", "skyrl", "opentelemetry-api", "opentelemetry-sdk", "msgspec",
)  # fmt: skip
"""Packages whose versions a reader needs to understand a run."""


def create(folder: Path, *, owner: str | None, command: list[str], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Make `folder` a Recording that belongs to this process.

    Args:
        folder: Created with its parents if it does not exist.
        owner: Folder name of the owning process under `processes/`; None if the owner itself is not traced.
        command: Its command line; values of secret options are redacted.
        config: Configuration of the run; secrets are redacted.

    Returns:
        The manifest as written.

    Raises:
        FileExistsError: the folder holds a manifest already.
        OSError: the folder cannot be written.
    """
    manifest = {
        "version": VERSION,
        "run_id": uuid.uuid4().hex,
        "created_unix_ns": time.time_ns(),
        "host": host_name(),
        "clock_domain": clock.domain(),
        "owner": owner,
        "owner_pid": os.getpid(),
        "owner_start_ticks": started_ticks(os.getpid()),
        "command": redaction.command(command),
        "config": _redact_config(config),
        "versions": installed_versions(),
    }
    (folder / PROCESSES).mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{FILE}.{os.getpid()}"
    text = checksum.signed(to_json(manifest, indent=1))
    require_size(unfinished, len(text))
    unfinished.write_text(text)
    try:
        os.link(unfinished, folder / FILE)  # whole or not at all, and never over another one
    finally:
        unfinished.unlink()
    return manifest


def host_name() -> str:
    """Return the name of this host as text; the kernel accepts any bytes as one."""
    return socket.gethostname().encode(errors="replace").decode()


def to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON that can be read and printed everywhere: `?` replaces bytes of a command line that are not text."""
    said = json.dumps(value, indent=indent, default=str)
    if "\\ud" in said:  # half of a pair without the other half, it may be; such a text is not often there
        plain = json.dumps(value, default=str, ensure_ascii=False).encode(errors="replace")
        said = json.dumps(json.loads(plain), indent=indent)
    return said


def is_live(folder: Path) -> bool:
    """Return whether the run in `folder` goes on: its owner is alive, on this host, and has not ended its part."""
    try:
        said = json.loads(regular_file.read(folder / FILE))
        return does_owner_live(said) and (
            said["owner"] is None or not _has_ended(folder / PROCESSES / str(said["owner"]))
        )
    except own_failure(OSError, ValueError, KeyError, TypeError):
        return False


def does_owner_live(said: Mapping[str, Any]) -> bool:
    """Return whether the process that owns a run, as its manifest says, is alive on this host."""
    try:
        ticks = started_ticks(int(said["owner_pid"]))
        return ticks is not None and ticks == said["owner_start_ticks"] and said["host"] == host_name()
    except own_failure(ValueError, KeyError, TypeError):
        return False


def _has_ended(process_folder: Path) -> bool:
    try:
        return b'\n{"kind": "end"' in regular_file.read(process_folder / LINES)
    except own_failure(OSError):  # it has not begun
        return False


def started_ticks(pid: int) -> int | None:
    """Return when a process of this host started, in clock ticks since boot. With the pid, which may be reused, it is
    an identity.

    Returns:
        Field 22 of `/proc/<pid>/stat`; None if the process has ended (a zombie has) or there is no `/proc`.
    """
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if after_name[0] in "ZX" else int(after_name[19])
    except own_failure(OSError, IndexError, ValueError):
        return None


def installed_versions() -> dict[str, str]:
    """Return the version of each package of `VERSIONED` that is installed, without importing it."""
    from importlib import metadata  # takes a sixth of what `import rltrace` does, and few processes ask

    return dict(_versions_on(tuple(sys.path), metadata.version))


@functools.lru_cache(maxsize=4)
def _versions_on(_path: tuple[str, ...], version: Callable[[str], str]) -> dict[str, str]:
    """Look once for each path: it takes 15 ms, and a process may make more than one Recording."""
    from importlib import metadata

    versions = {}
    for package in VERSIONED:
        try:
            versions[package] = version(package)
        except metadata.PackageNotFoundError:
            pass
    return versions


def _redact_config(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Redact a configuration; one that cannot be read (a missing value, a cycle) must not keep the run from being
    recorded."""
    try:
        redacted = redaction.value(config or {})
        json.dumps(redacted, default=str)
        return dict(redacted)
    except own_failure() as error:
        return {"unreadable": f"{type(error).__name__}: {error}"[:256]}
