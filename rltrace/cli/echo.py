"""What commands say in lines: the one way to the terminal beside tables and `--json`."""

from __future__ import annotations

import click

from rltrace.host.control_characters import visible


def echo(*lines: str, err: bool = False) -> None:
    """Print lines, in which control characters are shown and do nothing.

    Args:
        *lines: Without their ends; an end of line in a name is shown too.
        err: To stderr.
    """
    click.echo("\n".join(map(visible, lines)), err=err)
