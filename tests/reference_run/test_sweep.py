"""What a sweep is asked: values of a setting. That it runs what can fit is in test_reference_tiny.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reference_runs as runs
from rltrace_reference import sweep


@pytest.mark.parametrize(
    ("over", "values"),
    [
        ("rollout.gpu_memory_utilization=0.2:0.6:0.05", [0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6]),
        ("actor.micro_batch=8:20:8", [8, 16]),
        ("rollout.wake_up=all,staged", ["all", "staged"]),
        ("actor.offload=true,false", [True, False]),
    ],
)
def test_values_as_written(over: str, values: list[Any]) -> None:
    """Ranges include their end, without rounding errors; lists hold what YAML reads."""
    assert sweep.parse(over) == (over.partition("=")[0], values)


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ("rollout.n", "has no SETTING=VALUES"),
        ("=1,2", "has no SETTING=VALUES"),
        ("rollout.n=1:x:2", "is no START:STOP:STEP of numbers"),
        ("rollout.n=2:8", "is no START:STOP:STEP of numbers"),
        ("rollout.n=8:2:1", "give a STEP above 0, upwards"),
        ("rollout.n=2:8:0", "give a STEP above 0, upwards"),
        ("rollout.n=nan:8:1", "is no START:STOP:STEP of numbers"),
        ("rollout.n=2:9999:1", "has 65 values; give 1 to 64"),
        ("rollout.nn=2,3", "rollout.nn: unknown key; use one of: n, max_tokens"),
        ("rollout.n=1,2", "rollout.n: Expected `int` >= 2, found 1"),
        ("steps.more=2", "steps: is 24, which has no keys; name a key such as rollout.n"),
    ],
)
def test_bad_values_are_one_line(over: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A key or a value that is none is one line, before anything runs."""
    assert sweep.main([str(runs.LAPTOP), "--over", over, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1
