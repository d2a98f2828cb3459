"""Whether a hook may be put around what it finds, in a release that is newer than the last one whose source was read.

Up to that release all is known, and nothing is looked at. Above it a hook is put in place if everything that it reads
is still there: the parameters of its target by name and place, and the attributes that it declares. If the source
differs from the one that was read, the hook says that nobody has verified it. `digests.json` has what was read;
`make digests` writes it.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rltrace.events import UNVERIFIED
from rltrace.hooks.sources import Parameters, Source, digest
from rltrace.hooks.versions import installed_version, is_newer
from rltrace.host.interruption import own_failure


class UntouchableError(Exception):
    """No hook can be put around the target; the text says why."""


class Known(NamedTuple):
    """What was read."""

    versions: Mapping[str, str]
    """The last release that was read, by package."""
    digests: Mapping[str, str | None]
    """Of each target, and of what hooks read, the digest of its source there; None where there is none, as in C."""
    parameters: Mapping[str, Mapping[str, Mapping[str, int | None]]]
    """What each hook reads of a call, by instrumentation and target: parameters, and their places if they have one."""


@functools.cache
def known() -> Known:
    """Return what was read; only looked up where a hook is put in place."""
    return Known(**json.loads(Path(__file__).with_name("digests.json").read_text()))


def look(instrumentation: str, target: str, reads: Iterable[str], original: Any) -> str | None:
    """Look at what a hook is about to be put around.

    Args:
        instrumentation: Whose hook it is.
        target: "module:Class.attr".
        reads: The attributes that the hook reads besides, named alike.
        original: What stands there now.

    Returns:
        Why the hook is unverified; None if its source is one that was read.

    Raises:
        UntouchableError: Something that the hook reads is gone or has changed.
    """
    package = target.partition(":")[0].partition(".")[0]
    read = known().versions.get(package)
    if read is None:  # of the standard library, of ours, or of an instrumentation that others have written
        return None
    version = installed_version(package)
    if version is not None and not is_newer(version, read):
        return None
    where = f"{package} {version or 'of an unknown version'}"
    parameters = known().parameters.get(instrumentation, {}).get(target, {})
    if gone := changed_parameters(parameters, original) or missing_attributes(reads, _is_there):
        raise UntouchableError(f"{where} has changed what this hook reads since {read}: {gone}")
    others = [name for name in (target, *reads) if _digest_there(name) != known().digests.get(name)]
    return (
        f"{UNVERIFIED}: in {where} the source of {', '.join(map(_short, others))} is not {read}'s" if others else None
    )


# ---- what a hook reads ------------------------------------------------------------------------------------------


def changed_parameters(wanted: Mapping[str, int | None], original: Any) -> str | None:
    """Say which of these parameters a function does not have at their places any more."""
    if not wanted:
        return None
    function = getattr(original, "__func__", original)
    try:
        there = parameters_of(inspect.signature(function))
    except own_failure(TypeError, ValueError):
        return f"it has no signature, which would say where `{next(iter(wanted))}` is"
    return next(filter(None, (changed(there, name, place) for name, place in wanted.items())), None)


def parameters_of(signature: inspect.Signature) -> Parameters:
    """Return the parameters of a function that is there."""
    found = signature.parameters.values()
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return Parameters(
        tuple(one.name for one in found if one.kind in places),
        frozenset(one.name for one in found if one.kind is inspect.Parameter.KEYWORD_ONLY),
        any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in found),
        any(one.kind is inspect.Parameter.VAR_KEYWORD for one in found),
    )


def changed(there: Parameters, name: str, place: int | None) -> str | None:
    """Say how a parameter is not where a hook reads it.

    Args:
        there: All parameters of the function.
        name: Of the parameter.
        place: Its place, from 0; None if it is passed by its name alone.
    """
    if name in there.by_place:
        now = there.by_place.index(name)
        return None if place in (None, now) else f"parameter `{name}` is at place {now}, not {place}"
    if name in there.by_name_only:
        return None
    if place is not None and place < len(there.by_place):
        return f"parameter {place} is `{there.by_place[place]}`, not `{name}`"
    # A function that takes whatever it is passed hands it on.
    is_taken = there.takes_any_names or (place is not None and there.takes_any_places)
    return None if is_taken else f"there is no parameter `{name}`"


def missing_attributes(reads: Iterable[str], is_there: Callable[[str], bool]) -> str | None:
    """Say which of these attributes are not there any more."""
    return next((f"there is no `{_short(name)}`" for name in reads if not is_there(name)), None)


# ---- what is there, in this process -----------------------------------------------------------------------------

_SOURCE = Source()


_GONE = object()


def _is_there(name: str) -> bool:
    """Tell whether an attribute is there: by the source of its module, or by the module itself if it has none."""
    module = name.partition(":")[0]
    if _SOURCE.has(module):
        return _is_in_source(name)
    found: Any = sys.modules.get(module)
    if found is None:  # nobody has imported it, and nothing can be said against it
        return True
    for attr in name.partition(":")[2].split("."):
        found = getattr(found, attr, _GONE)  # a class may say None for what its instances set
    return found is not _GONE


@functools.lru_cache(maxsize=256)
def _is_in_source(name: str) -> bool:
    return _SOURCE.has_attribute(name)


@functools.lru_cache(maxsize=256)
def _digest_there(name: str) -> str | None:
    """Return the digest of a target or of an attribute; None if it has no source, or none that can be read."""
    try:
        found = _SOURCE.find(name)
    except own_failure(SyntaxError, OSError, UnicodeError):
        return None
    return None if found is None else digest(found)


def _short(name: str) -> str:
    return name.partition(":")[2] or name
