"""`rltrace why` on the screen and as JSON, and the lines with which the summary opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from planted_runs import PlantedRun
from recordings import Written, span

from rltrace.cli import main


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="rltrace")


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose rank 1 is slow in the update."""
    folder = tmp_path_factory.mktemp("slow") / "run"
    run = PlantedRun(folder)
    run.longer["actor.update", 1] = lambda step: 0.5
    run.write()
    return folder


def test_screen_has_every_part(slow: Path) -> None:
    """A finding has a price with its interval, a bound, a setting, why it may be less, and where to look."""
    done = call("why", slow)
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert "1. rank 1 is slow in actor.update in 8 of 8 steps" in said
    for part in (
        "95 % interval",
        "to gain",
        "confidence high",
        "change (your cluster)",
        "may gain less:",
        "Not judged",
    ):
        assert part in said
    assert f"see: rltrace view {slow} --steps".replace(" ", "") in said.replace(" ", "")  # a long path is broken


def test_json_has_the_keys(slow: Path) -> None:
    """The JSON has what programs read of each finding."""
    found: dict[str, Any] = json.loads(call("why", slow, "--json").stdout)
    first = found["findings"][0]
    keys = {"id", "title", "seconds_per_step", "bytes", "share", "confidence", "evidence", "settings", "bound_seconds"}
    assert keys <= first.keys()
    assert first["id"] == "slow_rank" and first["evidence"]["ranks"] == [1]


def test_summary_opens_with_the_largest(slow: Path) -> None:
    """The summary names what costs most before it shows where the seconds went."""
    lines = call("summary", slow).stdout.splitlines()
    (told,) = [at for at, line in enumerate(lines) if "rank 1 is slow in actor.update" in line]
    assert told < next(at for at, line in enumerate(lines) if line.startswith("Mean step"))


def test_nothing_to_report(tmp_path: Path) -> None:
    """A Recording with nothing to report says so, and what it could not judge, with reasons."""
    Written(tmp_path / "run").process("p", span("work", 0, 1), role="worker", ended_s=2)
    done = call("why", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert "Nothing was found" in done.stdout and "no step is marked" in done.stdout


def test_summary_opens_with_nothing_slight(tmp_path: Path) -> None:
    """What costs less than 1 % of a step is left to `why`; the summary says that nothing costs more."""
    run = PlantedRun(tmp_path / "run")
    run.longer["reward", -1] = lambda step: 0.05
    run.write()
    said = " ".join(call("summary", tmp_path / "run").stdout.split())
    assert "Nothing was found that costs 1% of a step or more" in said
    assert "rltrace why has 1 smaller finding, and what could not be judged" in said
    assert "All ranks wait for the driver's reward for 70 ms of a step" in " ".join(
        call("why", tmp_path / "run").stdout.split()
    )


def test_short_costs_have_digits(tmp_path: Path) -> None:
    """What takes milliseconds is written in milliseconds, on both screens."""
    written = Written(tmp_path / "run")
    steps = [span("step", 0.1 * n, 0.1 * n + 0.1, step=n) for n in range(4)]
    syncs = [span("weight_sync", 0.1 * n, 0.1 * n + 0.015) for n in range(4)]
    sends = [span("weight_sync.send", 0.1 * n, 0.1 * n + 0.01, bytes=10**6) for n in range(4)]
    written.process("w", *steps, *syncs, *sends, role="worker", rank=0, ended_s=0.4)
    written.read()
    for command in ("why", "summary"):
        said = " ".join(call(command, tmp_path / "run").stdout.split())
        assert "5.0 ms of a weight sync of 15 ms are in none of its stages" in said
        assert "0.00 s" not in said and "0.01 s" not in said
