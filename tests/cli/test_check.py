"""`rltrace check`: exit codes, the lines that broke, and what other programs read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from junitparser import Error, Failure, JUnitXml
from planted_runs import PlantedRun

from rltrace.cli import main


def call(*words: object, **variables: str | None) -> Result:
    environment = {"GITHUB_ACTIONS": None, **variables}
    return CliRunner().invoke(main, ["check", *map(str, words)], prog_name="rltrace", env=environment)


def code(done: Result) -> int:
    """The exit code; the command returns it, and `main` exits with it."""
    return int(done.return_value) if done.exit_code == 0 and isinstance(done.return_value, int) else done.exit_code


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that is well, and one whose rank 1 is slow by a second of ten."""
    folder = tmp_path_factory.mktemp("runs")
    PlantedRun(folder / "good").write()
    slow = PlantedRun(folder / "slow")
    slow.longer["actor.update", 1] = lambda step: 1.0
    slow.write()
    return folder / "good", folder / "slow"


def test_exit_codes(runs: tuple[Path, Path]) -> None:
    """0 is kept, 10 is broken, 11 cannot be judged, and broken goes first; a wrong option is 2."""
    good, slow = runs
    assert call(good, "--max", "step=20s").exit_code == 0
    assert call(good, "--max", "step=5s").exit_code == 10
    assert call(good, "--max", "memory.ref.params=1GiB").exit_code == 11
    assert call(good, "--max", "memory.ref.params=1GiB", "--max", "step=5s").exit_code == 10
    assert call(slow, "--baseline", good, "--fail-over", "step=5%").exit_code == 10
    assert call(good, "--baseline", slow, "--fail-over", "step=5%").exit_code == 0
    assert call(good).exit_code == 2
    assert call(good, "--max", "step=fast").exit_code == 2
    assert call(good / "no", "--max", "step=1s").exit_code == 3


def test_broken_lines_come_first(runs: tuple[Path, Path]) -> None:
    """The screen names what broke, with both values, before what did not."""
    done = call(runs[1], "--max", "reward=1s", "--max", "step=10s", "--max", "actor.update=50%")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    said = " ".join(lines)  # the path of the run, in front, may take several lines
    assert "broken step 11." in said and "of at most 10s" in said
    assert said.index("broken step") < said.index("ok reward")
    assert lines[-1] == "1 limit broken, of 4"
    assert any(line.startswith("ok reward") for line in lines)


def test_junit(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """JUnit's XML has a case for each limit: a broken one failed, and one that cannot be judged is an error."""
    file = tmp_path / "check.xml"
    done = call(runs[1], "--max", "reward=1s", "--max", "step=10s", "--max", "memory.ref.params=1GiB", "--junit", file)
    assert done.exit_code == 10
    (suite,) = JUnitXml.fromfile(str(file))
    assert (suite.tests, suite.failures, suite.errors) == (4, 1, 1)
    found = {case.name: [type(one) for one in case.result] for case in suite}
    assert found["step"] == [Failure] and found["memory.ref.params"] == [Error]
    assert found["complete"] == found["reward"] == []
    (failure,) = next(case for case in suite if case.name == "step").result
    assert failure.message.startswith("11.") and "of at most 10s" in failure.message


def test_junit_survives_any_name(tmp_path: Path) -> None:
    """A name that XML cannot hold is shown, as on the screen."""
    name = "a\x01b<&>\udce9"
    PlantedRun(tmp_path / name).write()
    file = tmp_path / "check.xml"
    assert call(tmp_path / name, "--max", "step=20s", "--junit", file).exit_code == 0
    (suite,) = JUnitXml.fromfile(str(file))
    assert all("a\\x01b<&>?" in case.classname for case in suite)


def test_junit_that_cannot_be_written(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """A file that cannot be written is said in one line, with its own code."""
    done = call(runs[0], "--max", "step=20s", "--junit", tmp_path / "no" / "check.xml")
    assert done.exit_code == 7 or "cannot be written" in str(done.exception)


def test_annotations(runs: tuple[Path, Path]) -> None:
    """GitHub shows an error for what broke and a warning for what cannot be judged; by itself there."""
    words = (runs[1], "--max", "step=10s", "--max", "memory.ref.params=1GiB", "--max", "actor.update=10%")
    plain = call(*words)
    assert "::error" not in plain.stdout
    for done in (call(*words, "--github"), call(*words, GITHUB_ACTIONS="true")):
        said = [line for line in done.stdout.splitlines() if line.startswith("::")]
        assert [line.partition(" ")[0] for line in said] == ["::error", "::warning", "::error"]
        assert said[0].startswith("::error title=rltrace check%3A step::step: 11.")
        assert "%25" in said[2] and "10%," not in said[2]


def test_json(runs: tuple[Path, Path]) -> None:
    """The JSON has each limit with its state and both values, and no annotation."""
    done = call(runs[1], "--baseline", runs[0], "--fail-over", "step=5%", "--json", GITHUB_ACTIONS="true")
    found = json.loads(done.stdout)
    (step,) = [one for one in found["checks"] if one["name"] == "step"]
    assert found["state"] == step["state"] == "broken"
    assert step["value"] > step["baseline"] and step["change"]["least_share"] > 0


def test_part_of_a_run(runs: tuple[Path, Path]) -> None:
    """Limits can be about some steps of a run."""
    done = call(runs[0], "--max", "step=20s", "--steps", "2-4")
    assert done.exit_code == 0 and "mean of 3 steps" in " ".join(done.stdout.split())
    assert call(runs[0], "--max", "step=20s", "--steps", "99").exit_code == 2
