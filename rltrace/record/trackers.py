"""Whether steps are told to the trackers that the program has open: off unless the environment says so."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "RLTRACE_TRACKERS"
"""Environment variable: `1` for yes."""


def are_wanted(environment: Mapping[str, str]) -> bool:
    """Return whether an environment asks for it."""
    return environment.get(VARIABLE, "").strip() not in ("", "0")
