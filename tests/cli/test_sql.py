"""`rltrace sql` prints what a query selects, and says what the Recording lacks."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from recordings import Written, sample, span, two_ranks

from rltrace.cli import main
from rltrace.record import manifest


def call(*words: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["sql", *map(str, words)], prog_name="rltrace", input=stdin)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return two_ranks(tmp_path / "run").folder


PHASES = "select rank, phase, sum(seconds) as seconds from phases where rank is not null group by all order by all"


def test_three_formats_are_one_answer(run: Path) -> None:
    """The table, the CSV and the JSON have the same rows."""
    found = json.loads(call(run, PHASES, "--format", "json").stdout)
    assert {"rank": 1, "phase": "rollout.generate", "seconds": 5.0} in found
    (head, *lines) = csv.reader(io.StringIO(call(run, PHASES, "--format", "csv").stdout))
    assert head == ["rank", "phase", "seconds"]
    assert [{"rank": int(rank), "phase": phase, "seconds": float(seconds)} for rank, phase, seconds in lines] == found
    shown = call(run, PHASES).stdout.splitlines()[2:]
    assert [line.split() for line in shown] == [
        [str(row["rank"]), row["phase"], f"{row['seconds']:g}"] for row in found
    ]


def test_values_of_every_kind(run: Path) -> None:
    """Nothing, truth, lists and large numbers are what they are."""
    query = "select null as a, true as b, [1, 2] as c, 1::hugeint << 100 as d, 0.5::decimal(3, 2) as e, "
    query += "date '2026-01-02' as f"
    (row,) = json.loads(call(run, query, "--format", "json").stdout)
    assert row == {"a": None, "b": True, "c": [1, 2], "d": 1 << 100, "e": 0.5, "f": "2026-01-02"}
    assert call(run, query, "--format", "csv").stdout.splitlines()[1] == f',true,"[1,2]",{1 << 100},0.5,2026-01-02'
    assert call(run, query).stdout.split("\n")[2].split() == [
        "null",
        "true",
        "[1,2]",
        str(1 << 100),
        "0.5",
        "2026-01-02",
    ]


def test_newest_run_and_standard_input(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a run it is the newest; a query may come from standard input."""
    (tmp_path / "rltrace-runs").mkdir()
    run.rename(tmp_path / "rltrace-runs" / "one")
    monkeypatch.chdir(tmp_path)
    assert json.loads(call("select count(*) as n from steps", "--format", "json").stdout) == [{"n": 2}]
    assert json.loads(call("-", "--format", "json", stdin="select 1 as n").stdout) == [{"n": 1}]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, 'no query; write one such as "select * from phases"'),
        (("RUN",), 2, "no query; write one such as"),
        (("RUN", "select", "1"), 2, "'1' is too much behind RUN and QUERY; put the query in quotes"),
        (("RUN", "select * from nope"), 2, "no table nope; the tables are boundaries, counters, "),
        (("RUN", "select nope from steps"), 2, "no column nope; steps has lane, step, start_seconds, "),
        (("RUN", "select 1", "--steps", "7"), 2, "steps 7: no such step; the run has steps 0-1"),
        (("/no/such/run", "select 1"), 3, "/no/such/run: no such file or folder"),
    ],
)
def test_errors(run: Path, words: tuple[str, ...], code: int, said: str) -> None:
    """An error is one line with what there is, and an exit code."""
    done = call(*(run if word == "RUN" else word for word in words))
    assert (done.exit_code, done.stdout) == (code, "")
    (line,) = done.stderr.splitlines()
    assert said in line


def test_part_of_a_run(run: Path) -> None:
    """Steps, ranks and time choose as everywhere."""
    query = "select distinct step, rank from spans where rank is not null and step is not null"
    asked = call(run, query, "--steps", "1", "--ranks", "1", "--format", "json")
    assert json.loads(asked.stdout) == [{"step": 1, "rank": 1}]
    asked = call(run, "select max(start_ns) / 1e9 as at from spans", "--time", ":5", "--format", "json")
    assert json.loads(asked.stdout)[0]["at"] < 5


def test_columns_of_one_name(run: Path) -> None:
    """Two columns of one name are both there, with a number."""
    query = "select a.step, b.step, 1 as step_1 from steps a join steps b on b.step = a.step + 1"
    (row,) = json.loads(call(run, query, "--format", "json").stdout)
    assert row == {"step": 0, "step_1": 1, "step_1_1": 1}


def test_files_are_read_if_asked(run: Path, tmp_path: Path) -> None:
    """With --read-files a query joins with a file; without it, it cannot."""
    (tmp_path / "mine.csv").write_text("rank,place\n0,left\n1,right\n")
    query = f"select place, count(*) as n from spans join '{tmp_path}/mine.csv' using (rank) "
    query += "where name = 'actor.update' group by place order by place"
    asked = call(run, query, "--read-files", "--format", "json")
    assert json.loads(asked.stdout) == [{"place": "left", "n": 2}, {"place": "right", "n": 2}]
    refused = call(run, query)
    assert refused.exit_code == 2 and "--read-files of `rltrace sql` lets it read yours" in refused.stderr


def test_a_query_can_be_stopped(run: Path) -> None:
    """^C ends a query that would take hours, with the exit code of an interruption."""
    command = [sys.executable, "-m", "rltrace", "sql", str(run), "-"]
    asking = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert asking.stdin is not None
    asking.stdin.write("select count(*) from range(1000000000) a, range(1000000000) b where a.range + b.range = 7")
    asking.stdin.close()
    time.sleep(3)  # until it is computed; if that has not begun, it is stopped all the same
    asking.send_signal(signal.SIGINT)
    assert asking.wait(30) == 130
    assert asking.stdout is not None and asking.stdout.read() == ""


def test_long_tables_are_cut(tmp_path: Path) -> None:
    """A table has the first rows and says how many more there are; other formats have all."""
    run = Written(tmp_path / "run").process("one", *(sample("n", at, at) for at in range(600)), role="main").folder
    query = "select value from counters"
    shown = call(run, query)
    assert shown.stdout.splitlines()[-1] == "100 more rows; --format csv and json have them"
    assert len(shown.stdout.splitlines()) == 2 + 500 + 1
    assert len(call(run, query, "--format", "csv").stdout.splitlines()) == 601


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    """An empty table says why; a run that goes on, and a damaged one, say so."""
    alive = {"pid": os.getpid(), "start_ticks": manifest.started_ticks(os.getpid())}
    run = Written(tmp_path / "run").process("one", span("work", 1, 2), role="main", **alive).folder
    said = call(run, "select * from steps join memory using (step)").stderr
    assert "the table steps has no rows: no process recorded a step, and none was inferred" in said
    assert "the run goes on; this is what it has written until now" in said
    said = call(run, "select * from spans where name = 'other'").stderr
    assert "has no rows" not in said
    damaged = two_ranks(tmp_path / "damaged").folder
    segment = damaged / "processes" / "engine-1" / "000001.seg"
    segment.write_bytes(segment.read_bytes()[:100])
    assert "some of the Recording is missing (1 torn records)" in call(damaged, "select count(*) from spans").stderr


@pytest.mark.parametrize("form", ["table", "csv", "json"])
def test_names_do_not_reach_the_terminal(tmp_path: Path, form: str) -> None:
    """Control characters of a name are shown and have no effect."""
    run = Written(tmp_path / "run").process("one", span("a\x1b]0;title\x07\nb", 1, 2), role="main").folder
    shown = call(run, 'select name, 1 as "x\x1b" from spans', "--format", form).stdout
    assert "\x1b" not in shown and "\x07" not in shown and ("\\x1b" in shown or "\\u001b" in shown)
    if form == "json":
        assert json.loads(shown)[0]["name"] == "a\x1b]0;title\x07\nb"


@pytest.mark.parametrize("package", ["duckdb", "pyarrow"])
def test_a_missing_package_names_the_extra(run: Path, package: str) -> None:
    """Without DuckDB or Arrow, one line says what to install."""
    code = f"import sys; sys.modules[{package!r}] = None; from rltrace.cli import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "sql", run, "select 1"], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (6, "")
    assert done.stderr.startswith(f"rltrace: SQL and frames need {package}, which is not installed here: pip install ")
    assert f"'{package}>=" in done.stderr and done.stderr.endswith(" (the extra [sql])\n")


def test_a_closed_pipe_is_no_error(run: Path) -> None:
    """`rltrace sql … | head` ends quietly, though the query is not read to its end."""
    query = "select * from spans, range(100000)"
    command = f"{sys.executable} -m rltrace sql {run} {query!r} --format csv | head -2"
    done = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True, timeout=60)
    assert (len(done.stdout.splitlines()), done.stderr) == (2, "")
