"""Ten thousand damaged Recordings: no traceback, no hang, and no figure that is wrong without a word."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mutations
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import Run

MANY, SOME, FEW = 9_000, 1_000, 100
"""Folders, archives, and those that the command itself reads; the seeds are the same in every run."""

seeds = st.integers(0, 2**48)
ways = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


@pytest.fixture(scope="module")
def runs() -> Iterator[list[Run]]:
    with tempfile.TemporaryDirectory(prefix="rltrace-hostile-") as folder:
        yield Run.of_each_kind(Path(folder))


@settings(ways, max_examples=MANY)
@given(seed=seeds)
def test_a_damaged_folder(runs: list[Run], seed: int) -> None:
    """Every reader reads it or refuses it in words, within seconds; what is wrong by more than twice is warned of."""
    mutations.check(runs[seed % len(runs)], random.Random(seed))


@settings(ways, max_examples=SOME)
@given(seed=seeds)
def test_a_damaged_archive(runs: list[Run], seed: int) -> None:
    """The same of the bytes of a zip file, or of what is in one that is whole."""
    mutations.check_archive(runs[seed % len(runs)], random.Random(seed))


@settings(ways, max_examples=FEW)
@given(seed=seeds)
def test_the_command(runs: list[Run], seed: int) -> None:
    """It ends by itself, with an exit code of its own and without a traceback."""
    chance = random.Random(seed)
    with runs[seed % len(runs)].copied() as copy:
        done = mutations.damage(copy, chance)
        out = copy.with_name("out")
        for command in (
            ["summary", copy], ["summary", "--all", copy], ["summary", "--json", copy], ["why", copy],
            ["why", "--json", copy], ["diff", copy, copy], ["check", copy, "--max", "step=1s", "--baseline", copy],
            ["export", "--to", chance.choice(["perfetto", "memory", "archive"]), "-o", out, "--force", copy],
        ):  # fmt: skip
            words = [sys.executable, "-m", "rltrace", *map(str, command)]
            ended = subprocess.run(words, check=False, capture_output=True, text=True, timeout=300)
            assert ended.returncode in {*range(8), 10, 11} and "Traceback" not in ended.stderr, (
                done,
                command,
                ended.stderr,
            )
