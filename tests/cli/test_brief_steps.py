"""What the screens say of steps in brief, and of steps that are gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from recordings import Written, span

from rltrace.cli import main
from rltrace.record import checksum


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
    nothing = "no phase runs and nothing is seen to compute"
    assert nothing not in shown + judged and nothing in said("why", chosen, "--steps", 1)


def dropped(folder: Path, *steps: int) -> Path:
    """Return a run of which the oldest segment was dropped, and in which some steps are left."""
    spans = [span("step", 10 * n, 10 * n + (9 if n > steps[0] else 9.9), step=n) for n in steps]
    run = Written(folder).process("p", span("own", 1, 2), *spans, ended_s=100).read().path
    with (run / "processes" / "p" / "process.jsonl").open("a") as lines:
        lines.write(json.dumps({"kind": "lost", "segments": 1, "bytes": 1 << 20, "segment": "000000.seg"}) + "\n")
    return run


def test_the_first_that_is_left_is_not_the_first(tmp_path: Path) -> None:
    """Where earlier steps may be gone, no step is called the first, and nothing is said of the start-up."""
    run = dropped(tmp_path / "run", 4, 5, 6, 7)
    assert "Mean step (4–7; earlier steps may be gone)" in (shown := said("summary", run))
    judged = said("why", run)
    assert "startup, first_step: steps before step 4 may be gone" in judged.replace(
        "first_step, startup", "startup, first_step"
    )
    assert "before the first step" not in shown + judged and "first step takes" not in shown + judged
    summary = json.loads(said("summary", run, "--json"))
    assert summary["earlier_steps_lost"] and summary["steady"]["first_step"] is None
    assert not summary["steady"]["has_first"]


def test_step_0_is_the_first(tmp_path: Path) -> None:
    """Whatever was dropped before step 0, it is the first."""
    run = dropped(tmp_path / "run", 0, 1, 2)
    assert "Mean step (1–2; step 0 excluded as warm-up)" in said("summary", run)


def test_steps_that_are_gone_may_have_been_marked(tmp_path: Path) -> None:
    """Nobody is told to mark steps where those that are marked may be gone."""
    judged = said("why", dropped(tmp_path / "run"))
    assert "no step is left" in judged and "no step is marked" not in judged
    assert "no step is marked" in said("why", Written(tmp_path / "bare").process("p", span("own", 1, 2)).read().path)


def test_removed_spans_may_have_been_in_steps(tmp_path: Path) -> None:
    """Removed spans of no known step were before the first one only if that one is known."""
    total = {"spans": [[None, None, "own", None, False, None, 3, 27, 9]], "samples": 0, "flows": 0}
    lines = checksum.signed(json.dumps(total)) + "\n"
    shown = {}
    for name, steps in {"known": (0, 1), "unknown": (4, 5), "none": ()}.items():
        run = dropped(tmp_path / name, *steps)
        (run / "processes" / "p" / "removed.jsonl").write_text(lines)
        shown[name] = said("summary", run)
    assert "of 3 spans before the first step only totals are left" in shown.pop("known")
    assert all("of 3 spans only totals are left" in text for text in shown.values())


def test_steps_of_which_totals_are_left_are_gone(tmp_path: Path) -> None:
    """Steps that are known by totals only came before those that are left."""
    run = Written(tmp_path / "run").process("p", *(span("step", 10 * n, 10 * n + 9, step=n) for n in (3, 4, 5)))
    total = {"spans": [[0, 99, "step", None, False, None, 3, 27, 9]], "samples": 0, "flows": 0}
    (run.folder / "processes" / "p" / "removed.jsonl").write_text(checksum.signed(json.dumps(total)) + "\n")
    assert "earlier steps may be gone" in said("summary", run.folder)
