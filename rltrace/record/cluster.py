"""A run on several hosts: where a process of another host records, and what it must know to do so.

Every process appends to a disk of its own host. On the Recording's host that is the Recording; elsewhere it is a folder
in the host's temporary folder, from where `rltrace collect` fetches it. This needs the standard library only, because
every process loads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from rltrace.host import regular_file
from rltrace.host.interruption import own_failure
from rltrace.record import manifest

DIR_VARIABLE = "RLTRACE_DIR"
"""Environment variable naming the Recording that a process joins."""

OFF_VARIABLE = "RLTRACE_OFF"
"""Environment variable that switches all of rltrace off: no process joins, starts a recording or installs a hook."""

PARENT_VARIABLE = "RLTRACE_PARENT"
"""Environment variable naming the process (its folder) that started this one."""

HOOKS_VARIABLE = "RLTRACE_HOOKS"
"""Environment variable that a process with hooks sets, so that the processes it starts get hooks too."""

RUN_ID_VARIABLE = "RLTRACE_RUN_ID"
"""Environment variable with the Recording's run_id: a folder of the same path on another host is not the Recording."""

FILE = "cluster.json"
"""File in a Recording that names the Ray cluster which its driver joined and did not start itself."""

AUTHENTICATION_VARIABLE = "RAY_AUTH_MODE"
"""Whether Ray authenticates. Ray 2.60 sets this in a driver that finds its machine's cluster, if there is a token."""


def is_off() -> bool:
    """Return whether the user has switched rltrace off; `hooks/startup/` asks the same, where nothing is imported."""
    return os.environ.get(OFF_VARIABLE, "") not in ("", "0")


def recording_here(environment: Mapping[str, str]) -> Path:
    """Return where a process with this environment records.

    Args:
        environment: Variables with `RLTRACE_DIR`.

    Returns:
        The Recording on its own host. On another host, the spool, even if both hosts see the Recording on a shared
        disk.
    """
    recording = Path(environment[DIR_VARIABLE])
    run_id = environment.get(RUN_ID_VARIABLE)
    return recording if run_id is None or _is_home(recording, run_id) else spool(run_id)


def spool(run_id: str) -> Path:
    """Return the folder of a run on a host other than its Recording's."""
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"rltrace-{run_id}"


def recording_variables() -> dict[str, str]:
    """Return the variables, if any, that tell a process, even on another host, which Recording this process writes."""
    if DIR_VARIABLE not in os.environ:
        return {}
    told = {name: value for name, value in os.environ.items() if name.startswith("RLTRACE_")}
    try:
        told.setdefault(RUN_ID_VARIABLE, _manifest(Path(told[DIR_VARIABLE]))["run_id"])
    except own_failure(
        OSError, ValueError, KeyError
    ):  # this host is not the Recording's: whoever started this process knew
        pass
    return told


def say(recording: Path, address: str) -> None:
    """Note in the Recording which Ray cluster its driver joined; the first note stands.

    Raises:
        OSError: it cannot be written.
    """
    try:
        with (recording / FILE).open("x") as file:
            said = {"ray_address": address, "ray_auth_mode": os.environ.get(AUTHENTICATION_VARIABLE)}
            file.write(json.dumps(said) + "\n")
    except FileExistsError:
        pass


def ray_address(recording: Path) -> str | None:
    """Return the address of the Ray cluster that the run's driver joined; None if it joined none."""
    return _said(recording, "ray_address")


def ray_authentication(recording: Path) -> str | None:
    """Return how the run's driver authenticated there; None if it did not say."""
    return _said(recording, "ray_auth_mode")


def _said(recording: Path, name: str) -> str | None:
    try:
        value = json.loads(regular_file.read(recording / FILE))[name]
        return None if value is None else str(value)
    except own_failure(OSError, ValueError, KeyError, TypeError):
        return None


def _is_home(recording: Path, run_id: str) -> bool:
    try:
        said = _manifest(recording)
        return bool(said["run_id"] == run_id and said["host"] == manifest.host_name())
    except own_failure(OSError, ValueError, KeyError):
        return False


def _manifest(recording: Path) -> dict[str, str]:
    said: dict[str, str] = json.loads(regular_file.read(recording / manifest.FILE))
    return said
