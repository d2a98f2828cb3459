"""`--json` prints figures for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from rltrace.host.control_characters import in_json


def echo_json(found: Any) -> None:
    """Print figures as JSON; `?` replaces what is no text, as a folder's name may contain."""
    import msgspec

    from rltrace.analysis.encoded import as_builtins, as_json

    try:
        encoded = as_json(found)
    except UnicodeEncodeError:
        encoded = as_json(_as_text(as_builtins(found)))
    click.echo(in_json(msgspec.json.format(encoded, indent=2).decode()))


def echo_json_list(items: Iterable[str]) -> None:
    """Print a list of items that are JSON already, a line each, as they come."""
    click.echo("[", nl=False)
    for number, item in enumerate(items):
        click.echo(f"{',' if number else ''}\n{in_json(item)}", nl=False)
    click.echo("\n]")


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_as_text(key): _as_text(item) for key, item in value.items()}
    return [_as_text(item) for item in value] if isinstance(value, (list, tuple)) else value
