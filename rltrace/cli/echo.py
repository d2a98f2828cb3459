"""Prints lines: the one way to the terminal besides tables and `--json`."""

from __future__ import annotations

import click

from rltrace.host.control_characters import visible


def echo(*lines: str, err: bool = False) -> None:
    """Print lines in which control characters are shown and have no effect.

    Args:
        *lines: Without line ends; one inside of a name is shown too.
        err: Print to stderr.
    """
    click.echo("\n".join(map(visible, lines)), err=err)
