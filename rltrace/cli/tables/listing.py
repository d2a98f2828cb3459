"""The runs of a folder, one row each."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from rich.console import RenderableType

from rltrace.analysis.listing import ListedRun
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, words

COMMAND_LETTERS = 60

_STYLES = {"running": "green", "failed": "red", "incomplete": "yellow"}


def run_table(runs: Sequence[ListedRun]) -> RenderableType:
    """Draw when each began, how it went, and how large it is."""
    table = Figures(
        Column("run", is_left=True),
        Column("began (UTC)", is_left=True),
        Column("state", is_left=True),
        "ranks",
        "steps",
        "mean step (s)",
        Column("size", worth=2),
        words("command", worth=1),
    )
    for run in runs:
        length = run.mean_step_seconds
        table.add_row(
            Path(run.path).name,
            _minute(run.created_unix_seconds),
            f"exit {run.exit_code}" if run.state == "failed" else run.state,
            str(run.ranks or ""),
            f"{run.steps:,}{'' if run.all_steps_seen else '+'}" if run.steps or not run.all_steps_seen else "",
            "" if length is None else figures.seconds(length),
            figures.size(run.size_bytes),
            _shortened(shlex.join(run.command)),
            style=_STYLES.get(run.state),
        )
    return table


def _minute(unix_seconds: float | None) -> str:
    if unix_seconds is None:
        return ""
    return datetime.fromtimestamp(unix_seconds, timezone.utc).strftime("%Y-%m-%d %H:%M")


def _shortened(command: str) -> str:
    return command if len(command) <= COMMAND_LETTERS else f"{command[: COMMAND_LETTERS - 3]}..."
