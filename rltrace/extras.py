"""What is installed of each of our extras, as our own distribution names them, and how to install the rest."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

DISTRIBUTION = "rltrace-toolkit"

FOR_DEVELOPERS = frozenset({"dev", "docs"})

_REQUIREMENT = re.compile(r"""(?P<what>(?P<name>[\w.-]+)[^;]*?)\s*;\s*extra\s*==\s*["'](?P<extra>[\w-]+)["']""")


class Requirement(NamedTuple):
    """A package that an extra brings."""

    name: str
    what: str
    """With the versions that will do, as pip takes it."""

    def __str__(self) -> str:
        return f"{self.name} {self.version or 'is missing'}"

    @property
    def version(self) -> str | None:
        """Which version is installed; None if the package is not."""
        try:
            return metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return None


def lines() -> Iterator[str]:
    """Yield a line for each extra: which of its packages there are, in which version, and which are missing."""
    for extra, found in sorted(requirements().items()):
        yield f"[{extra}]: {', '.join(map(str, found))}"


def requirements() -> dict[str, list[Requirement]]:
    """Return the packages of each extra that users may want.

    Raises:
        PackageNotFoundError: rltrace is not installed, but on the path.
    """
    found: dict[str, list[Requirement]] = {}
    for text in metadata.requires(DISTRIBUTION) or []:
        said = _REQUIREMENT.fullmatch(text)
        if said is not None and said["extra"] not in FOR_DEVELOPERS:
            found.setdefault(said["extra"], []).append(Requirement(said["name"], said["what"]))
    return found


def how_to_install(extra: str) -> str:
    """Return the command that installs what is missing of an extra.

    It names the packages: no index has our distribution, and a wheel need not be where it was installed from.
    """
    try:
        found = requirements().get(extra, [])
    except metadata.PackageNotFoundError:
        found = []
    missing = [one.what for one in found if one.version is None] or [one.what for one in found]
    if not missing:
        return f"pip install '.[{extra}]' in a clone of rltrace"
    return f"{shlex.join(['pip', 'install', *missing])} (the extra [{extra}])"
