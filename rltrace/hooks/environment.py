"""The environment variables by which the processes of a run join its Recording."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rltrace.record.cluster import DIR_VARIABLE, HOOKS_VARIABLE, PARENT_VARIABLE

STARTUP = Path(__file__).parent / "startup"
"""Holds the `sitecustomize` that joins every Python process to the Recording."""

RAY_HOOK_VARIABLE = "RAY_RUNTIME_ENV_HOOK"
"""Ray calls the function that this variable names with the runtime environment of every job."""

RAY_HOOK = "rltrace.instrument.ray.runtime_env_hook"

NEXT_RAY_HOOK_VARIABLE = "RLTRACE_NEXT_RAY_RUNTIME_ENV_HOOK"
"""This variable names the function that `RAY_RUNTIME_ENV_HOOK` would name without us; ours calls it first."""

TRACE_CONTEXT_VARIABLE = "RLTRACE_TRACE_CONTEXT"
"""This variable says when the context of a trace is sent with calls and requests: 0 never, 1 always, else where the
program has one."""


def traced_environment(recording: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment whose Python processes join the Recording.

    Args:
        recording: Its folder.
        environment: Of the command, else unchanged.
    """
    python_path = with_startup(environment.get("PYTHONPATH", ""))
    traced = {**environment, DIR_VARIABLE: str(recording.absolute()), "PYTHONPATH": python_path}
    traced.pop(PARENT_VARIABLE, None)
    return traced


def with_startup(python_path: str) -> str:
    """Return a PYTHONPATH that begins with our start-up folder. To Python, an empty entry is the working folder."""
    others = [entry for entry in python_path.split(os.pathsep) if entry != str(STARTUP)] if python_path else []
    return os.pathsep.join([str(STARTUP), *others])


def reach_others() -> None:
    """Let the processes that this one starts get hooks too, and the workers of a Ray cluster that it connects to.

    Not earlier than in a process that has imported us: Ray imports what it finds in the variable, or fails.
    """
    os.environ[HOOKS_VARIABLE] = "1"
    theirs = os.environ.get(RAY_HOOK_VARIABLE)
    if theirs != RAY_HOOK:
        os.environ[RAY_HOOK_VARIABLE] = RAY_HOOK
        if theirs:
            os.environ[NEXT_RAY_HOOK_VARIABLE] = theirs
