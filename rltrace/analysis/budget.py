"""What a run may take at most, and by how much it may exceed another run: limits as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rltrace.errors import ConfigError, MissingExtraError

SECONDS, BYTES, SHARE = "seconds", "bytes", "share"

UNITS: dict[str, tuple[str, float]] = {
    **{name: (SECONDS, size) for name, size in (("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0), ("min", 60.0))},
    "h": (SECONDS, 3600.0),
    "B": (BYTES, 1.0),
    **{f"{prefix}B": (BYTES, 1000.0**power) for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": (BYTES, 1024.0**power) for power, prefix in enumerate("KMGT", 1)},
    "%": (SHARE, 0.01),
}
"""What each unit is of, and its size."""

ALWAYS = ("step", "memory.used")
"""What is compared with another run if nothing else is named."""

USUAL_SHARE = 0.05
"""By how much that may be exceeded by default."""

_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)\s*([a-zA-Zµ%]+)\s*")


class Amount(NamedTuple):
    """A number with what it is of."""

    value: float
    unit: str
    text: str
    """As it was written."""


class Budget(NamedTuple):
    """Limits of one run."""

    most: dict[str, Amount]
    """By figure, the most that it may be."""
    over: dict[str, float]
    """By figure, by which share it may exceed that of the other run."""
    baseline: str | None
    """The other run; None without one."""


class BudgetFile(msgspec.Struct, forbid_unknown_fields=True, rename="kebab"):
    """A budget's file."""

    max: dict[str, str] = {}
    baseline: str | None = None
    fail_over: dict[str, str] | str | None = None


def budget(file: Path | None, most: Iterable[str], baseline: str | None, fail_over: Iterable[str]) -> Budget:
    """Return the limits of a file and of the command line, which goes first.

    Raises:
        ConfigError: one of them cannot be read, or there is none.
    """
    of_file = BudgetFile() if file is None else read(file)
    limits = {name: amount(text, f"{file}: max.{name}") for name, text in of_file.max.items()}
    limits |= {name: amount(text, f"--max {name}") for name, text in map(_pair, most)}
    other = baseline or _beside(file, of_file.baseline)
    given = of_file.fail_over
    over = given if isinstance(given, dict) else dict.fromkeys(ALWAYS, given) if given is not None else {}
    for text in fail_over:
        over = over | (dict([_pair(text)]) if "=" in text else dict.fromkeys(ALWAYS, text))
    if not limits and other is None:
        raise ConfigError("nothing to check: give --max step=10s, --budget FILE, or --baseline RUN")
    if over and other is None:
        raise ConfigError("--fail-over needs a run to compare with: give --baseline RUN")
    if other is not None and not over:
        over = dict.fromkeys(ALWAYS, f"{USUAL_SHARE:.0%}")
    return Budget(limits, {name: _share(text, name) for name, text in over.items()}, other)


def read(file: Path) -> BudgetFile:
    """Read a budget's file.

    Raises:
        ConfigError: it cannot be read, or has what nobody knows.
    """
    try:
        import yaml
    except ImportError:
        raise MissingExtraError("a budget in YAML needs the package PyYAML", "run", "; --max needs nothing") from None
    try:
        said: Any = yaml.safe_load(file.read_text())
        return msgspec.convert({} if said is None else said, BudgetFile, strict=False)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, msgspec.ValidationError) as error:
        known = ", ".join(field.encode_name for field in msgspec.structs.fields(BudgetFile))
        raise ConfigError(f"{file}: {' '.join(str(error).split())}; it may have {known}") from None


def amount(text: str, where: str) -> Amount:
    """Read a number with its unit.

    Raises:
        ConfigError: it is none.
    """
    found = _AMOUNT.fullmatch(text)
    if found is None or found[2] not in UNITS:
        raise ConfigError(f"{where}={text}: a limit is a number with its unit, such as 10s, 70GiB or 5%")
    unit, size = UNITS[found[2]]
    return Amount(float(found[1]) * size, unit, text.strip())


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise ConfigError(f"{text!r} is no limit; write it as step=10s")
    return name.strip(), value.strip()


def _share(text: str, name: str) -> float:
    found = amount(text, f"--fail-over {name}")
    if found.unit != SHARE:
        raise ConfigError(f"--fail-over {name}={text}: it is a share of the other run's, such as 5%")
    return found.value


def _beside(file: Path | None, baseline: str | None) -> str | None:
    """Return the run that a file names, relative to the file's folder."""
    return None if file is None or baseline is None else str(file.parent / baseline)
