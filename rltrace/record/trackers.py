"""What trackers are told of steps: whether they are, by which names, and the file where others say more of a step."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "RLTRACE_TRACKERS"
"""Environment variable: `1` for yes. It is off unless the environment says so."""

FILE = "steps.jsonl"
"""File in a Recording: one line per step, of what all its processes did."""

PREFIX = "rltrace/"
STEP_NUMBER = f"{PREFIX}step"
"""The number of the step, for trackers whose own steps count something else."""
STEP_SECONDS = f"{PREFIX}step_seconds"

GIB = 1 << 30


def are_wanted(environment: Mapping[str, str]) -> bool:
    """Return whether an environment asks for it."""
    return environment.get(VARIABLE, "").strip() not in ("", "0")


def of_phase(name: str) -> str:
    """Return what the seconds of a phase are called."""
    return f"{PREFIX}phase/{name}_seconds"


def of_peak(owner: str) -> str:
    """Return what the peak of an owner is called."""
    return f"{PREFIX}memory/{owner}_peak_gib"


def of_finding(name: str) -> str:
    """Return what the price of a finding is called."""
    return f"{PREFIX}finding/{name}_seconds"
