"""Reads settings by name, with the framework's defaults, and says in one line what is wrong with one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rltrace.errors import ConfigError


class Values:
    """Settings by their dotted names."""

    def __init__(self, said: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self.said, self.defaults, self.where = said, defaults, where

    def of(self, name: str) -> Any:
        """Return a setting, or its default."""
        value = self.said.get(name)
        return self.defaults.get(name) if value is None else value

    def whole(self, name: str) -> int:
        """Return a whole number of at least 1.

        Raises:
            ConfigError: it is none.
        """
        value = self.of(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 1 or value != int(value):
            raise ConfigError(f"{self.where}: {name} is {value!r}; give a whole number of at least 1")
        return int(value)

    def whole_or(self, name: str, otherwise: int) -> int:
        """Return a whole number, or another if there is none."""
        return otherwise if self.of(name) is None else self.whole(name)

    def share(self, name: str) -> float:
        """Return a part of the card.

        Raises:
            ConfigError: it is none.
        """
        value = self.of(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
            raise ConfigError(f"{self.where}: {name} is {value!r}; give a share of the card above 0 and up to 1")
        return float(value)

    def is_on(self, name: str) -> bool:
        """Return whether a switch is on."""
        value = self.of(name)
        return value if isinstance(value, bool) else bool(value) and str(value).lower() != "false"

    def text(self, name: str) -> str:
        """Return a text in lower case."""
        return str(self.of(name)).lower()

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str:
        """Return one of some words.

        Raises:
            ConfigError: it is another.
        """
        value = self.text(name)
        if value not in allowed:
            raise ConfigError(f"{self.where}: {name} is {value!r}; plan knows {', '.join(allowed)}: give one of them")
        return value
