"""Two runs whose findings differ: gone, new, more or less; and the verdict that a comparison opens with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from planted_runs import CLOSE, PlantedRun
from recordings import span

from rltrace.analysis.finding_changes import FindingChange, finding_changes
from rltrace.analysis.findings import Why
from rltrace.cli import main

Plant = Callable[[PlantedRun], None]


def slow(seconds: float, rank: int = 1, phase: str = "actor.update") -> Plant:
    """A rank that is slow in a phase."""
    return lambda run: run.longer.update({(phase, rank): lambda step: seconds})


def judged(folder: Path, *plants: Plant) -> Why:
    run = PlantedRun(folder)
    for plant in plants:
        plant(run)
    return run.judge()


def changes(folder: Path, a: list[Plant], b: list[Plant]) -> list[FindingChange]:
    return finding_changes(judged(folder / "a", *a), judged(folder / "b", *b))


def test_alike_runs_have_no_changes(tmp_path: Path) -> None:
    """Findings that are in both runs, and cost the same, are no change."""
    assert changes(tmp_path, [slow(0.5)], [slow(0.5)]) == []


def test_gone_and_new(tmp_path: Path) -> None:
    """A finding that only one run has is gone or new, with its price there."""
    (gone,) = changes(tmp_path / "1", [slow(0.5)], [])
    assert (gone.id, gone.change, gone.b) == ("slow_rank", "gone", None)
    assert gone.a == pytest.approx(0.5, rel=CLOSE) and gone.unit == "seconds_per_step"
    (new,) = changes(tmp_path / "2", [], [slow(0.5)])
    assert (new.id, new.change, new.a) == ("slow_rank", "new", None) and "rank 1 is slow" in new.title


@pytest.mark.parametrize(("before", "after", "change"), [(0.5, 1.0, "more"), (1.0, 0.5, "less")])
def test_more_and_less(tmp_path: Path, before: float, after: float, change: str) -> None:
    """A price that changed by more than both intervals is told with both values."""
    (found,) = changes(tmp_path, [slow(before)], [slow(after)])
    assert (found.change, found.a, found.b) == (
        change, pytest.approx(before, rel=CLOSE), pytest.approx(after, rel=CLOSE),
    )  # fmt: skip


def test_phases_tell_findings_apart(tmp_path: Path) -> None:
    """Where a run has a finding in two phases, one of them can be gone."""
    (gone,) = changes(tmp_path, [slow(0.5), slow(0.3, 2, "ref.log_prob")], [slow(0.5)])
    assert (gone.change, gone.phases) == ("gone", ["ref.log_prob"])


def test_other_phase_is_no_change_of_price(tmp_path: Path) -> None:
    """A finding about another phase is another one, though its id is the same."""
    found = changes(tmp_path, [slow(0.5)], [slow(1.0, phase="ref.log_prob")])
    assert {(one.change, *one.phases) for one in found} == {("gone", "actor.update"), ("new", "ref.log_prob")}
    assert all(one.a is None or one.b is None for one in found)


def test_what_one_could_not_judge_is_no_change(tmp_path: Path) -> None:
    """A finding that only one of the runs could have had is neither new nor gone."""

    def tools(run: PlantedRun) -> None:
        run.gap["rollout.sleep"] = 0.5
        run.elsewhere = lambda run, step, begin, end: [span("agent_loop.tool_call", end, end + 0.5)]

    with_tools = judged(tmp_path / "b", tools)
    assert "slow_tools" in [one.id for one in with_tools.findings]
    without = judged(tmp_path / "a")
    assert "slow_tools" in [one.id for one in without.unjudged]
    assert "slow_tools" not in [one.id for one in finding_changes(without, with_tools)]


def test_gone_with_its_phase(tmp_path: Path) -> None:
    """A finding about a phase that the other run does not have is gone with it, though nobody could judge it there."""

    def tools(run: PlantedRun) -> None:
        run.gap["rollout.sleep"] = 0.5
        run.elsewhere = lambda run, step, begin, end: [span("agent_loop.tool_call", end, end + 0.5)]

    with_tools, without = judged(tmp_path / "a", tools), judged(tmp_path / "b")
    (finding,) = [one for one in with_tools.findings if one.id == "slow_tools"]
    about = set(finding.evidence.phases)
    assert about
    others = {"actor.update", "ref.log_prob"} - about
    for before, after, phases, change in (
        (with_tools, without, (about | others, others), "gone"),
        (without, with_tools, (others, about | others), "new"),
    ):
        found = [one.change for one in finding_changes(before, after, phases) if one.id == "slow_tools"]
        assert found == [change]
    both = (about | others, about | others)
    assert "slow_tools" not in [one.id for one in finding_changes(with_tools, without, both)]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (0.0, 2.0, "B is slower: a typical step is 2"),
        (2.0, 0.0, "B is faster: a typical step is 1"),
        (0.0, 0.0, "No difference beyond noise: +0.0%; with these steps +"),
    ],
)
def test_verdict(tmp_path: Path, before: float, after: float, said: str) -> None:
    """A comparison opens with whether B is slower, and with the findings that changed."""
    for name, seconds in (("a", before), ("b", after)):
        run = PlantedRun(tmp_path / name)
        slow(seconds)(run)
        run.write()
    done = CliRunner().invoke(main, ["diff", str(tmp_path / "a"), str(tmp_path / "b")], prog_name="rltrace")
    lines = done.output.splitlines()
    verdict = next(place for place, line in enumerate(lines) if not line.strip()) + 1
    assert lines[verdict].startswith(said)
    if after > before:
        assert lines[verdict + 1].startswith("new  rank 1 is slow in actor.update")


def test_few_steps_have_no_verdict(tmp_path: Path) -> None:
    """With fewer than five steady steps of a run nobody is called slower; how many are needed is told."""
    PlantedRun(tmp_path / "a").write()
    PlantedRun(tmp_path / "b", steps=4).write()
    done = CliRunner().invoke(main, ["diff", str(tmp_path / "a"), str(tmp_path / "b")], prog_name="rltrace")
    assert "8 and 3 steps are too few to tell that from noise: 5 are needed" in " ".join(done.output.split())


def test_json_has_both(tmp_path: Path) -> None:
    """The JSON has the change of the steps with its bounds, and the findings that changed."""
    PlantedRun(tmp_path / "a").write()
    run = PlantedRun(tmp_path / "b")
    slow(2.0)(run)
    run.write()
    words = ["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]
    found = json.loads(CliRunner().invoke(main, words, prog_name="rltrace").output)
    assert found["step_change"]["least_share"] > 0.1
    assert [one["id"] for one in found["findings"]] == ["slow_rank"]
