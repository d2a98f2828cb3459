"""What is installed of each of our extras, as our own distribution names them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata

DISTRIBUTION = "rltrace-toolkit"

FOR_DEVELOPERS = frozenset({"dev", "docs"})

_REQUIREMENT = re.compile(r"""(?P<name>[\w.-]+)[^;]*;\s*extra\s*==\s*["'](?P<extra>[\w-]+)["']""")


def lines() -> Iterator[str]:
    """Yield a line for each extra: which of its packages there are, in which version, and which are missing."""
    for extra, names in sorted(packages().items()):
        yield f"[{extra}]: {', '.join(map(_installed, names))}"


def packages() -> dict[str, list[str]]:
    """Return the packages of each extra that users may want."""
    found: dict[str, list[str]] = {}
    for text in metadata.requires(DISTRIBUTION) or []:
        said = _REQUIREMENT.fullmatch(text)
        if said is not None and said["extra"] not in FOR_DEVELOPERS:
            found.setdefault(said["extra"], []).append(said["name"])
    return found


def _installed(name: str) -> str:
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f"{name} is missing"
