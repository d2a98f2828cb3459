"""`docs/support.md` says what is supported: it is written from the tables of hooks, and each row was shown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rltrace.hooks.versions import unmet_support

ROOT = Path(__file__).parents[2]


def asked(code: str) -> str:
    """What docs/support.py answers."""
    command = [sys.executable, "-c", f"import json, support; {code}"]
    return subprocess.run(
        command, check=True, cwd=ROOT / "docs", capture_output=True, text=True, timeout=60
    ).stdout  # fmt: skip


def test_page_is_up_to_date() -> None:
    """The page has what the hooks emit now."""
    made = asked("print(support.page(), end='')")
    assert (ROOT / "docs" / "support.md").read_text() == made, "docs/support.md is stale: run `make docs`"


def test_every_row_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row names a release within its versions, and a file of tests that is there."""
    rows = json.loads(
        asked("print(json.dumps([(r.framework, r.versions, support.SHOWN[r.framework]) for r in support.rows()]))")
    )
    assert {"torch", "ray", "vllm", "sglang", "trl", "verl 0.9", "openrlhf", "areal", "skyrl"} <= {
        row[0] for row in rows
    }
    for framework, versions, shown in rows:
        assert shown, framework
        for version, _, file in shown:
            monkeypatch.setattr("importlib.metadata.version", lambda _package, version=version: version)
            assert unmet_support((f"{framework.split()[0]} {versions}",)) is None, (framework, version)
            assert (ROOT / file).exists(), file


def test_what_a_hook_emits_is_in_its_row() -> None:
    """A name of each kind is where one looks for it."""
    page = asked("print(support.page(), end='')")
    (line,) = [line for line in page.splitlines() if line.startswith("| openrlhf |")]
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[3] == "yes"
    assert {"`actor.old_log_prob`", "`critic.update`", "`weight_sync`"} <= set(cells[4].split(", "))
    assert {"`gather`", "`send`", "`load`"} <= set(cells[6].split(", "))
    assert {"sleep", "wake_weights", "wake_kv_cache"} <= set(cells[7].split(", "))
