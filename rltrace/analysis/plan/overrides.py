"""Settings that were written as `key=value`, as YAML, or as `--key value`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

Flat = dict[str, Any]


def flat(values: Mapping[str, Any], prefix: str = "") -> Flat:
    """Return nested settings by their dotted names."""
    found: Flat = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def hydra(words: Iterable[str]) -> Flat:
    """Return what `a.b=1 +c.d=2` sets; words of another kind are left out."""
    found: Flat = {}
    for word in words:
        name, sign, text = word.partition("=")
        name = name.lstrip("+~")
        if sign and name and not name.startswith("-") and "/" not in name:
            found[name] = value_of(text)
    return found


def options(words: Iterable[str]) -> Flat:
    """Return what `--key value`, `--key=value` and a bare `--key` set."""
    found: Flat = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, sign, text = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = value_of(text) if sign else True
        elif name and found.get(name) is True:
            found[name] = value_of(word)
    return found


def words_of(script: str) -> list[str]:
    """Return the words of a shell script; comments and continued lines are understood."""
    words: list[str] = []
    for line in script.replace("\\\n", " ").splitlines():
        try:
            words += shlex.split(line, comments=True)
        except ValueError:  # a quote that ends lines later
            words += line.split()
    return words


def value_of(text: str) -> Any:
    """Return a number, a truth value or nothing where the text is one."""
    lowered = text.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in ("null", "none", ""):
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip("'\"")
