"""Large runs in short: what stands out among many ranks, steps and clocks, and what is left out because it is alike."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import msgspec
from recordings import Written, sample, span
from rich.console import Console

from rltrace.analysis import summarize
from rltrace.analysis.clocks import ClockFigures
from rltrace.analysis.encoded import as_builtins
from rltrace.analysis.folding import MOST_RANKS, for_programs, ranks_apart
from rltrace.analysis.selected import selected
from rltrace.analysis.summary import Summary
from rltrace.cli.tables import WIDTH, show
from rltrace.cli.tables.fit import MANY, visible_figures
from rltrace.cli.tables.problems import clock_lines
from rltrace.events import Span
from rltrace.read.selection import ALL, Selection, numbers


def printed(summary: Summary, selection: Selection = ALL, *, whole: bool = False) -> str:
    screen = Console(width=WIDTH, file=(out := io.StringIO()))
    show(summary, screen, whole=whole, selection=selection)
    return out.getvalue()


def long_run(folder: Path) -> Written:
    """Two hundred steps of which one is long."""
    lengths = [4.0 if number == 57 else 1 + number % 7 / 100 for number in range(200)]
    begins = [sum(lengths[:number]) for number in range(200)]
    steps = [span("step", begins[number], begins[number] + lengths[number], step=number) for number in range(200)]
    return Written(folder).process("d", *steps, role="driver", ended_s=300)


def many_ranks(folder: Path, steps: int = 1) -> Written:
    """Forty ranks of which one is slow."""
    driver = [span("step", 10 * step, 10 * step + 10, step=step) for step in range(steps)]
    written = Written(folder).process("d", *driver, role="driver", ended_s=10 * steps)
    for rank in range(40):
        took = 8 if rank == 23 else 2 + rank % 5 / 1000
        events = [
            event
            for step in range(steps)
            for event in (
                span("actor.update", 10 * step, 10 * step + took),
                sample("actor.params_bytes", 10 * step + 1, 1e9),
            )
        ]
        device = {"uuid": f"GPU-{rank}"}
        written.process(f"w{rank}", *events, role="worker", rank=rank, device=device, ended_s=10 * steps)
    return written


def test_long_run_trend_outliers_last_steps(tmp_path: Path) -> None:
    """A long run shows how its steps went on the whole, the steps that stand out, and the last ones."""
    summary = summarize(long_run(tmp_path / "run").read())
    lines = printed(summary, whole=True).splitlines()
    table = lines[lines.index("Steps") + 3 :]
    table = table[: next(at for at, line in enumerate(table) if line.startswith("several steps"))]
    rows = [line.split() for line in table if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows[:10]] == [f"{first}-{first + 18}" for first in range(0, 190, 19)]
    assert [row[0] for row in rows[10:]] == ["57", *map(str, range(190, 200))]
    block = [step.seconds for step in summary.steps[57:76]]
    assert rows[3][1] == f"{sum(block) / len(block):.3f}" and rows[10][1] == "4.000"
    assert "What stands out, 5 deviations or more from the median: step 57 (4.000 s, median 1.030 s)" in printed(
        summary
    )


def test_many_ranks_are_folded(tmp_path: Path) -> None:
    """Of many ranks a screen has those that stand out, and says so; a rank that is asked for is there."""
    recording = many_ranks(tmp_path / "run").read()
    summary = summarize(recording)
    assert "What stands out, 5 deviations or more from the median: rank 23 (" in printed(summary)
    text = printed(summary, whole=True)
    shown = [line.split()[3] for line in text.splitlines() if re.match(r"Memory of rank \d+ \(", line)]
    assert shown == ["0", "1", "2", "3", "4", "5", "6", "23"]
    assert "have 8 of 40 ranks (0-6, 23)" in text and "--ranks 39" in text
    asked = Selection(ranks=numbers("0-38"))
    text = printed(summarize(selected(recording, asked)), asked, whole=True)
    assert "Memory of rank 38 (" in text and "The others are alike" not in text


def test_json_of_many_ranks_and_steps_is_folded(tmp_path: Path) -> None:
    """Items of ranks and steps that are alike are left out of the JSON, which says so; means and steps are whole."""
    summary = summarize(many_ranks(tmp_path / "run", steps=50).read())
    found = for_programs(summary)
    ranks, steps = found.folded
    assert (ranks.of, ranks.there, len(ranks.kept)) == ("ranks", 40, MOST_RANKS) and 23 in ranks.kept
    assert (steps.of, steps.there, steps.kept) == ("steps", 50, [0, 1, 2, *range(40, 50)])
    assert {row.rank for row in found.phases if row.rank is not None} == {*ranks.kept}
    assert {row.step for row in found.phases if row.step is not None} == {*steps.kept}
    assert {device.rank for device in found.memory} == {*ranks.kept}
    assert len(found.steps) == 50 and found.steady == summary.steady
    assert len(json.dumps(as_builtins(found))) < len(json.dumps(as_builtins(summary))) / 4
    few = summarize(many_ranks(tmp_path / "few").read())
    assert for_programs(few) is few and few.folded == []


def test_ranks_that_differ_by_chance_do_not_stand_out(tmp_path: Path) -> None:
    """Only the slow rank stands out, in its phase or in the idle time that follows from it."""
    apart = ranks_apart(summarize(many_ranks(tmp_path / "run").read()))
    assert [one.number for one in apart] == [23]


def test_many_clocks_share_a_line() -> None:
    """Clocks that were aligned share a line if they are many; the worst is named."""
    clocks = [clock(f"node{number}", bound_seconds=number / 1e4, drift_ppm=number - 3) for number in range(1, 7)]
    assert clock_lines([clock("home", is_reference=True), *clocks]) == [
        "Clocks of 6 other hosts: aligned within ±600 µs (node6 has the largest bound), drift -2.0 to +3.0 ppm, "
        "5 readings each."
    ]
    assert len(clock_lines(clocks[:4])) == 4


def clock(host: str, **differs: Any) -> ClockFigures:
    usual: dict[str, Any] = {
        "boot_id": host, "time_namespace": "t", "hosts": [host], "processes": 8, "is_reference": False,
        "aligned": True, "readings": 5, "offset_seconds": 1.0, "drift_ppm": 0.0, "drift_error_ppm": 0.1,
        "bound_seconds": 1e-4,
    }  # fmt: skip
    return ClockFigures(**usual | differs)


def test_many_plain_records_are_shown_as_they_are(tmp_path: Path) -> None:
    """A list of many records is kept as it is if all are plain, and a single control character in it is made visible
    all the same."""
    steps = summarize(long_run(tmp_path / "run").read()).steps
    assert len(steps) > MANY
    assert visible_figures(steps) == steps
    for text, shown in (("a\x1b[31m", r"a\x1b[31m"), ("a\x7f", r"a\x7f"), ("a\u202e", r"a\u202e"), ("é", "é")):
        steps[100] = msgspec.structs.replace(steps[100], error=text)
        found = visible_figures(steps)
        assert found[100].error == shown
        assert found[:100] + found[101:] == steps[:100] + steps[101:]


def test_deep_arguments_of_many_spans_end_in_dots() -> None:
    """Arguments of a program may be of any depth: they are cut also in a list of many spans."""
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    spans = [Span("a", 1, 0, number, None, {"deep": deep}, (), ()) for number in range(MANY)]
    assert "..." in str(visible_figures(spans)[0])
