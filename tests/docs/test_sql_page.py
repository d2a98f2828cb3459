"""`docs/sql.md` names every column with its unit, and its questions have the answers of `summary --json`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from click.testing import CliRunner
from documents import ROOT, blocks
from shipped import QWEN, VERL, opened

from rltrace.cli import main
from rltrace.frames.tables import Tables

PAGE = ROOT / "docs" / "sql.md"

Json = dict[str, Any]
Rows = list[Json]


def test_page_is_up_to_date() -> None:
    """Each column is a row with its type, its unit and its meaning; `make docs` writes them anew."""
    made = subprocess.run(
        [sys.executable, "-c", "import sql_tables; print(sql_tables.page(), end='')"],
        check=True, cwd=ROOT / "docs", capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip
    assert PAGE.read_text() == made, "docs/sql.md is stale: run `make docs`"
    columns = re.findall(r"^\| `\w+` \| \w+.* \| .* \| .+ \|$", made, re.MULTILINE)
    assert len(columns) > 150


@cache
def summary_of(run: Path) -> Json:
    """What `summary --json` prints."""
    done = CliRunner().invoke(main, ["summary", str(run), "--json"], prog_name="rltrace")
    assert done.exit_code == 0, done.output
    summary: Json = json.loads(done.stdout)
    return summary


@cache
def tables_of(run: Path) -> Tables:
    return Tables(opened(run))


def steady(summary: Json, section: str = "steps") -> Rows:
    return [row for row in summary[section] if row["steady"]]


def lanes(summary: Json) -> Rows:
    return [lane for lane in summary["steady"]["lanes"] if lane["rank"] is not None]


def length_of_a_step(summary: Json) -> Rows:
    length = summary["steady"]["seconds"]
    names = {"mean": "mean_seconds", "median": "median_seconds", "least": "least_seconds", "most": "most_seconds"}
    return [{"steps": len(summary["steady"]["steps"]), **{name: length[key] for name, key in names.items()}}]


def first_step(summary: Json) -> Rows:
    return [{"more_seconds": summary["steps"][0]["seconds"] - summary["steady"]["seconds"]["mean_seconds"]}]


def phases(summary: Json) -> Rows:
    names = {name for lane in lanes(summary) for name in lane["phases"]}
    means = {
        name: fmean(lane["phases"][name]["mean_seconds"] if name in lane["phases"] else 0.0 for lane in lanes(summary))
        for name in names
    }
    return [{"phase": name, "mean_seconds": mean} for name, mean in means.items()]


def slow_rank(summary: Json) -> Rows:
    updates = {lane["rank"]: lane["phases"]["actor.update"] for lane in lanes(summary)}
    return [
        {"rank": rank, **{key: of[key] for key in ("mean_seconds", "most_seconds")}} for rank, of in updates.items()
    ]


def of_nobody(summary: Json) -> Rows:
    found = []
    for lane in lanes(summary):
        sums = {name: lane["phases"][name]["mean_seconds"] * len(steady(summary)) for name in ("idle", "unlabelled")}
        found.append({"rank": lane["rank"], **{f"{name}_seconds": seconds for name, seconds in sums.items()}})
    return found


def rewards(summary: Json) -> Rows:
    return [
        {
            **{key: step[key] for key in ("step", "reward_mean", "tokens_per_second")},
            "grad_norm": step["figures"]["grad_norm"],
        }
        for step in summary["steps"]
    ]


def weight_sync(summary: Json) -> Rows:
    keys = ("step", "rank", "seconds", "gigabytes_per_second", "rest_seconds")
    return [{key: sync[key] for key in keys} for sync in summary["weight_sync"]]


def stages(summary: Json) -> Rows:
    syncs = [sync for sync in summary["weight_sync"] if sync["step"] == 2]
    found = []
    for stage in syncs[0]["stages"]:
        most, rank = max((sync["stages"][stage]["seconds"], sync["rank"]) for sync in syncs)
        found.append({"stage": stage, "most_seconds": most, "rank": rank})
    return found


def fullest(summary: Json) -> Rows:
    return [
        {"lane": device["lane"], "owner": owner, "bytes": held}
        for device in summary["memory"]
        for owner, held in device["at_peak_bytes"].items()
        if held > 0 and owner != "free"
    ]


def full_in_steps(summary: Json) -> Rows:
    return [
        {"rank": device["rank"], "step": step["step"], "most_bytes": step["used_bytes"]}
        for device in summary["memory"]
        for step in device["steps"]
    ]


def left_by_sleep(summary: Json) -> Rows:
    return [
        {"step": boundary["step"], "rank": device["rank"], "owner": owner, "bytes": held}
        for device in summary["memory"]
        for boundary in device["boundaries"]
        if (boundary["phase"], boundary["side"]) == ("rollout.sleep", "end")
        for owner, held in boundary["bytes"].items()
        if owner.startswith("rollout.") and held > 0
    ]


def ownerless(summary: Json) -> Rows:
    return [{"lane": one["lane"], "worst_bytes": one["residual"]["worst_bytes"]} for one in summary["memory"]]


def requests(summary: Json) -> Rows:
    (figures,) = summary["requests"]
    return [
        {
            "requests": figures["count"], "mean": figures["mean_seconds"], "p95": figures["p95_seconds"],
            "in_agent_loop": figures["stages"]["agent_loop"]["mean_seconds"],
            "in_engine": figures["stages"]["engine"]["mean_seconds"],
        }
    ]  # fmt: skip


def calls(summary: Json) -> Rows:
    found = [span for span in summary["hook_spans"] if span["name"] == "ray.call"]
    by_method = groupby(sorted(found, key=lambda span: span["method"]), key=lambda span: span["method"])
    return [
        {
            "method": method,
            "calls": sum(span["count"] for span in spans),
            "all_seconds": sum(span["seconds"] for span in spans),
            "longest": max(span["max_seconds"] for span in spans),
        }
        for method, spans in ((method, [*group]) for method, group in by_method)
        if sum(span["count"] for span in spans)
    ]


def power(summary: Json) -> Rows:
    gpus = summary["samples"][0]["gpus"]
    drawn = {gpu: counters["gpu.power_watts"] for gpu, counters in gpus.items()}
    return [{"gpu": gpu, "mean_watts": watts["mean"], "most_watts": watts["most"]} for gpu, watts in drawn.items()]


ANSWERS: dict[str, tuple[Callable[[Json], Rows], Path]] = {
    "How long is a step?": (length_of_a_step, QWEN),
    "What does the first step cost more?": (first_step, QWEN),
    "Where does a step's time go?": (phases, QWEN),
    "Which rank is slow in a phase?": (slow_rank, QWEN),
    "How much of each rank's time is nobody's?": (of_nobody, VERL),
    "How did the reward and the loss go?": (rewards, QWEN),
    "How fast are the weights synced?": (weight_sync, QWEN),
    "Which stage of the sync takes longest?": (stages, QWEN),
    "Who holds a device's memory when it is fullest?": (fullest, QWEN),
    "How full is a device in each step?": (full_in_steps, VERL),
    "What does the sleeping engine leave behind?": (left_by_sleep, QWEN),
    "How many bytes has nobody accounted for?": (ownerless, VERL),
    "Where does the time of a request go?": (requests, VERL),
    "Which calls of Ray take longest?": (calls, VERL),
    "How much power does each GPU draw?": (power, QWEN),
}


def questions() -> dict[str, str]:
    """The query below each heading of the page."""
    text = PAGE.read_text()
    lines = text.splitlines()
    found = {}
    for block in blocks(text):
        if block.language == "sql":
            heading = next(line for line in reversed(lines[: block.line]) if line.startswith("#"))
            found[heading.lstrip("# ")] = block.text
    return found


def test_fifteen_questions() -> None:
    """Each question of the page has an answer to compare with."""
    assert questions().keys() == ANSWERS.keys() and len(ANSWERS) == 15


@pytest.mark.parametrize("question", ANSWERS)
def test_answers_are_those_of_the_summary(question: str) -> None:
    """SQL and `summary --json` say the same of a Recording that ships."""
    answer, run = ANSWERS[question]
    found = tables_of(run).sql(questions()[question]).to_pylist()
    expected = answer(summary_of(run))
    assert found and _ordered(found) == [_nearly(row) for row in _ordered(expected)]


def _ordered(rows: Rows) -> Rows:
    return sorted(rows, key=lambda row: [str(value) for value in row.values() if not isinstance(value, float)])


def _nearly(row: Json) -> Json:
    def near(value: Any) -> Any:
        return pytest.approx(value, rel=1e-9, abs=1e-9) if isinstance(value, float) else value

    return {key: near(value) for key, value in row.items()}
