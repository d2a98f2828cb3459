"""`docs/json.md` says what the JSON has: it is written from the fields themselves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_page_is_up_to_date() -> None:
    """Each field of the figures is a row with its docstring; `make docs` writes the page anew."""
    made = subprocess.run(
        [sys.executable, "-c", "import json_keys; print(json_keys.page(), end='')"],
        check=True, cwd=ROOT / "docs", capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip
    assert (ROOT / "docs" / "json.md").read_text() == made, "docs/json.md is stale: run `make docs`"
    assert made.count("\n| `") > 200


UNITS = ("seconds", "seconds_per_step", "bytes", "bytes_per_second", "ppm", "share")
WITHOUT_UNIT = {"phases", "unlabelled", "idle"}  # of `coverage`, whose parts are shares
WITHOUT_UNIT |= {"count", "mean", "least", "most", "ratio", "reward_mean", "tokens", "tokens_per_second"}
WITHOUT_UNIT |= {"value", "limit", "baseline", "a", "b", "p50", "p95", "p99", "maximum"}
WITHOUT_UNIT |= {"running", "waiting", "most_over_mean"}
WITHOUT_UNIT |= {"now", "largest", "recommended"}  # of a setting, which has its `unit` beside
"""Counts, ratios, what a program or a sampler has named itself, and figures that have their unit in a key beside."""


def test_units_are_in_the_keys() -> None:
    """A number that is no count says in its key what it is."""
    page = (ROOT / "docs" / "json.md").read_text()
    numbers = set(re.findall(r"^\| `(\w+)` \| number", page, re.MULTILINE)) - WITHOUT_UNIT
    assert numbers and all(name.endswith(UNITS) for name in numbers), numbers
