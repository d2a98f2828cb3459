"""`--steps`, `--ranks`, `--time` and `--depth`: the options by which every reader selects a part of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from rltrace.read import selection
from rltrace.read.selection import Numbers, Seconds

Command = TypeVar("Command", bound=Callable[..., Any])


class _Text(click.ParamType):  # type: ignore[type-arg]
    """A parameter type that a parser of `read/selection.py` converts."""

    def __init__(self, name: str, parse: Callable[[str], Numbers | Seconds]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


STEPS, RANKS = _Text("STEPS", selection.numbers), _Text("RANKS", selection.numbers)
TIME = _Text("A:B", selection.seconds)

_STEPS = click.option("--steps", type=STEPS, metavar="STEPS", help="Only these steps: 3, 100-110 or 1,5-7.")
_RANKS = click.option("--ranks", type=RANKS, metavar="RANKS", help="Only these ranks: 0,8-15.")
_TIME = click.option(
    "--time", type=TIME, metavar="A:B", help="Only from second A to second B of the run; A: and :B work too."
)
_TIME_OF_STEPS = click.option(
    "--time", type=TIME, metavar="A:B", help="Only the steps between second A and second B of the run, as a whole."
)
_DEPTH = click.option(
    "--depth",
    type=click.IntRange(1),
    metavar="N",
    help="Only spans inside of fewer than N others of their thread; steps and phases always.",
)


def of_figures(command: Command) -> Command:
    """Add the options of a command that computes figures; it gets `steps`, `ranks` and `time`."""
    return _STEPS(_RANKS(_TIME_OF_STEPS(command)))


def of_tables(command: Command) -> Command:
    """Add the options of a command that has figures and events side by side; it gets `steps`, `ranks` and `time`."""
    return _STEPS(_RANKS(_TIME(command)))


def of_events(command: Command) -> Command:
    """Add the options of a command that shows events; it gets `depth` too."""
    return _STEPS(_RANKS(_TIME(_DEPTH(command))))
