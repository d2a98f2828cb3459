"""What the screens say of steps in brief, and of steps that are gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from recordings import Written, span

from rltrace.cli import main


def said(*command: object) -> str:
    """Return what a command prints, on one line."""
    done = CliRunner().invoke(main, [str(word) for word in command], env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@pytest.fixture
def chosen(tmp_path: Path) -> Path:
    """Five steps of which the first two were recorded in full."""
    spans: list[Any] = []
    for n in range(5):
        spans += [
            span("step", 10 * n, 10 * n + 9, step=n, **({} if n < 2 else {"brief": True})),
            span("actor.update", 10 * n, 10 * n + 3, phase=True),
            span("reward", 10 * n + 7, 10 * n + 9, phase=True),
        ]
        spans += [span("own", 10 * n + 3, 10 * n + 7)] if n < 2 else []
    return Written(tmp_path / "run").process("p", *spans).read().path


def test_steps_in_brief_are_counted(chosen: Path) -> None:
    """The header says how many steps are in brief, and the mean's title why they are not in it."""
    shown = said("summary", chosen)
    assert shown.startswith("5 steps (3 in brief) ·")
    assert "Step 1 (step 0 excluded as warm-up; 3 in brief, not among --record-steps, excluded)" in shown


def test_a_step_in_brief_has_no_gap(chosen: Path) -> None:
    """Of a step without its spans nobody says that nothing computes in it, but that they were not kept."""
    shown = said("summary", chosen, "--steps", 3)
    assert "Step 3 (in brief, not among --record-steps: other spans were not kept, so idle may be work)" in shown
    judged = said("why", chosen, "--steps", 3)
    assert "between_phases: the steps are in brief" in judged and "Doubt: its steps are in brief" in judged
    assert "nothing computes" not in shown + judged
    assert "nothing computes" in said("why", chosen, "--steps", 1)
