"""The tables of a Recording say what its events say, and what `summary --json` says."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pandas
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from part_of_recording import first_rank_of
from recordings import SECOND, Written, hook, sample, span, two_ranks, two_workers
from shipped import QWEN, SHIPPED, opened, summary_of

import rltrace
from rltrace.analysis.lanes import Lane, lanes
from rltrace.analysis.observations import Observations
from rltrace.analysis.phases import lane_phases
from rltrace.analysis.steps import StepWindows
from rltrace.analysis.summary import Summary, summarize
from rltrace.errors import QueryError, SelectionError
from rltrace.events import Counter, Span
from rltrace.frames.schema import SPANS, TABLES
from rltrace.frames.tables import Tables
from rltrace.read import columns
from rltrace.read.recording import Process, Recording
from rltrace.record import manifest


def rows(table: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def as_dict(struct: Any) -> dict[str, Any]:
    return msgspec.structs.asdict(struct)


@pytest.fixture(scope="module")
def qwen() -> Tables:
    """A whole shipped Recording, for tests that ask it and change nothing."""
    return Tables(opened(QWEN))


# ---- what was recorded ------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def events(tables: Tables) -> list[tuple[Process, Lane, Span | Counter]]:
    """The events of all processes, as the Python reader gives them, with times from the beginning of the Recording."""
    return [*_events(tables)]


def _events(tables: Tables) -> Iterator[tuple[Process, Lane, Span | Counter]]:
    on_lane = lanes(tables.recording.processes)
    seen = Observations(tables.recording)
    for process in tables.recording.processes:
        shift_ns = seen.time_line.shift_ns(process) - seen.start_ns
        for event in process.events():
            if isinstance(event, Counter):
                event.ts_ns += shift_ns
            else:
                event.start_ns += shift_ns
                event.end_ns = None if event.end_ns is None else event.end_ns + shift_ns
            yield process, on_lane[process.key], event


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """A shipped Recording with one rank of its trainer; tests/hostile has whole ones."""
    return functools.cache(lambda run: first_rank_of(run, tmp_path_factory.mktemp("shipped")))


@pytest.fixture(scope="module", params=[*SHIPPED, "literal"], ids=lambda run: getattr(run, "stem", run))
def tables(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, of_one_rank: Callable[[Path], Path]
) -> Tables:
    is_made = request.param == "literal"
    run = many_kinds(tmp_path_factory.mktemp("made") / "run").folder if is_made else of_one_rank(request.param)
    return rltrace.open(run)


def many_kinds(folder: Path) -> Written:
    """Spans with all arguments that have a column and others, open ones, those of two workers with steps of their
    own."""
    written = two_workers(folder)
    written.process(
        "odd",
        span("model.forward", 2, 3, rows=4, columns=5, module="a", bytes=True, error="KeyError", method=7),
        span(
            "rollout.request",
            3,
            4,
            request_id="é\x1b[31m",
            tokens=3,
            queued_ns=10,
            kv_usage=0.5,
            nested={"a": [1, None]},
        ),
        span("open", 5, None, waiting=2, running="no"),
        [["key", 0, 5 * SECOND, "out", True]],
        sample("loss", 6, 0.5),
        sample("a_bytes", 6, 1 << 40),
        role="trainer",
    )
    return written


def test_spans_are_the_events(tables: Tables) -> None:
    """Each span of the reader is a row: its times, its arguments, and who made it."""
    expected = [(process, lane, event) for process, lane, event in events(tables) if isinstance(event, Span)]
    found = rows(tables.spans())
    assert len(found) == len(expected) > 0
    counted: dict[str, int] = {}
    for row, (process, lane, event) in zip(found, expected, strict=True):
        number = counted[process.key] = counted.get(process.key, -1) + 1
        assert (row["process"], row["role"], row["lane"], row["rank"]) == (
            process.key,
            process.role,
            lane.name,
            lane.rank,
        )
        assert (row["span"], row["name"], row["start_ns"], row["end_ns"]) == (
            number,
            event.name,
            event.start_ns,
            event.end_ns,
        )
        assert row["seconds"] == (None if event.end_ns is None else event.seconds)
        assert (row["thread"], row["task"]) == (columns._signed(event.thread), columns._signed(event.task))
        assert (row["thread_lane"], row["automatic"]) == (event.lane, event.is_automatic)
        assert json.loads(row["args"]) == json.loads(msgspec.json.encode(event.args))
        for name in (
            "bytes",
            "tensors",
            "tokens",
            "rows",
            "columns",
            "waiting",
            "queued_ns",
            "behind_host_ns",
            "kv_usage",
        ):
            value = event.args.get(name)
            assert row[name] == (value if isinstance(value, (int, float)) else None), name
        for name in ("error", "method", "request_id"):
            assert row[name] == (str(event.args[name]) if name in event.args else None)


def test_counters_are_the_samples(tables: Tables) -> None:
    """Each sample of the reader is a row."""
    assert [(row["process"], row["name"], row["at_ns"], row["value"]) for row in rows(tables.counters())] == [
        (process.key, event.name, event.ts_ns, event.value)
        for process, _, event in events(tables)
        if isinstance(event, Counter)
    ]


def test_flows_are_the_arrows(tables: Tables) -> None:
    """Each end of an arrow is a row that names its span."""
    found = {(row["process"], row["span"], row["direction"], row["key"], row["name"]) for row in rows(tables.flows())}
    expected = set()
    counted: dict[str, int] = {}
    for process, _, event in events(tables):
        if isinstance(event, Span):
            number = counted[process.key] = counted.get(process.key, -1) + 1
            expected |= {(process.key, number, "out", key, event.name) for key in event.flows_out}
            expected |= {(process.key, number, "in", key, event.name) for key in event.flows_in}
    assert found == expected and found


ONE_IN = 19
"""Of so many spans one is looked up."""


def test_step_and_phase_of_a_span(tables: Tables) -> None:
    """They are those of the figures: the window of its lane, and the phase of its lane that began last."""
    seen = Observations(tables.recording)
    windows = StepWindows(seen)
    on_lane = {lane.name: lane for lane in lanes(tables.recording.processes).values()}
    phases = lane_phases(seen)
    for row in rows(tables.spans(columns=["lane", "start_ns", "step", "phase"]))[::ONE_IN]:
        lane, at_ns = on_lane[row["lane"]], row["start_ns"] + seen.start_ns
        assert row["step"] == windows.of(lane).step_at(at_ns)
        around = [
            (int(start_ns), name)
            for name, spans in phases.get(lane, {}).items()
            for start_ns, end_ns in spans[(spans[:, 0] <= at_ns) & (at_ns < spans[:, 1])]
        ]
        assert row["phase"] == max(around, default=(0, None))[1]


def test_phases_that_overlap(tmp_path: Path) -> None:
    """Of several phases the one that began last counts, until it ends; no phase counts at its own end."""
    spans = [span("outer", 1, 9, phase=True), span("inner", 3, 5, phase=True), span("late", 9, 10, phase=True)]
    marks = [span("mark", at, at) for at in (0.5, 1, 2, 3, 4, 5, 8, 9, 10)]
    tables = rltrace.open(Written(tmp_path / "run").process("one", *spans, *marks, role="main").folder)
    assert tables.spans("mark")["phase"].to_pylist() == [
        None, "outer", "outer", "inner", "inner", "outer", "outer", "late", None,
    ]  # fmt: skip


@pytest.mark.parametrize("run", [QWEN, "literal"], ids=["qwen", "literal"])
def test_both_decoders(
    run: Path | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_one_rank: Callable[[Path], Path]
) -> None:
    """Where segments are decoded in Python, the rows are the same."""
    both_decoders(many_kinds(tmp_path / "run").folder if isinstance(run, str) else of_one_rank(run), monkeypatch)


def both_decoders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a Recording with the native decoder and in Python."""
    compiled = rltrace.open(folder)
    native = {name: with_plain_texts(compiled.table(name)) for name in TABLES}
    monkeypatch.setattr("rltrace.read.native.library", lambda: None)
    again = rltrace.open(folder)
    for name in TABLES:
        assert with_plain_texts(again.table(name)).equals(native[name]), name


def with_plain_texts(table: Any) -> Any:
    """Return a table whose texts are no places in a list of texts, which may be in any order."""
    kinds = [getattr(kind, "value_type", kind) for kind in table.schema.types]
    return table.cast(pa.schema(list(zip(table.schema.names, kinds, strict=True))))


# ---- figures ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[*SHIPPED, "ranks", "workers"], ids=lambda run: getattr(run, "stem", run))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tables, Summary]:
    made = {"ranks": two_ranks, "workers": two_workers}
    if request.param not in made:
        return Tables(opened(request.param)), summary_of(request.param)
    run = made[request.param](tmp_path_factory.mktemp("made") / "run").folder
    return rltrace.open(run), summarize(Recording.open(run))


def test_lists_of_the_json(both: tuple[Tables, Summary]) -> None:
    """Steps, processes, hooks and the weight sync are the lists of the JSON, field by field."""
    tables, summary = both
    decoded = [{**row, "figures": json.loads(row["figures"])} for row in rows(tables.steps())]
    assert decoded == [as_dict(step) for step in summary.steps] and decoded
    assert [without(row, "lane") for row in rows(tables.processes())] == [as_dict(one) for one in summary.processes]
    decoded = [
        {**row, **{name: json.loads(row[name]) for name in ("processes", "emits")}} for row in rows(tables.hooks())
    ]
    assert decoded == [as_dict(one) for one in summary.hooks]
    syncs = [as_dict(one) for one in summary.weight_sync]
    assert rows(tables.weight_sync()) == [without(sync, "stages") for sync in syncs]
    assert rows(tables.weight_sync_stages()) == [
        {"step": sync["step"], "lane": sync["lane"], "rank": sync["rank"], "stage": name, **as_dict(stage)}
        for sync in syncs
        for name, stage in sync["stages"].items()
    ]


def test_phases_of_the_json(both: tuple[Tables, Summary]) -> None:
    """There is a row for each part of each rank's step."""
    tables, summary = both
    assert rows(tables.phases()) == [
        {
            "step": row.step, "lane": row.lane, "rank": row.rank, "phase": name, **as_dict(share),
            "step_seconds": row.seconds, "steady": row.steady, "finished": row.finished,
            "clock_aligned": row.clock_aligned, "host": row.host, "device": row.device,
        }
        for row in summary.phases
        for name, share in row.phases.items()
    ]  # fmt: skip


def test_ledger_of_the_json(both: tuple[Tables, Summary]) -> None:
    """Boundaries are those of the JSON; peaks are the fullest moments of the whole ledger."""
    tables, summary = both
    boundaries, moments = rows(tables.boundaries()), rows(tables.memory())
    for device in summary.memory:
        own = [row for row in boundaries if row["lane"] == device.lane]
        assert [without(row, "lane", "rank", "host", "device", "boundary") for row in own] == [
            {**without(as_dict(boundary), "bytes"), "owner": owner, "bytes": held}
            for boundary in device.boundaries
            for owner, held in boundary.bytes.items()
        ]
        assert {row["device"] for row in moments if row["lane"] == device.lane} == {device.device}
        for peak in device.steps:
            held = [row for row in moments if (row["lane"], row["at_seconds"]) == (device.lane, peak.at_seconds)]
            assert {row["owner"]: row["bytes"] for row in held} == peak.bytes
            assert {(row["step"], row["phase"], row["used_bytes"]) for row in held} == {
                (peak.step, peak.phase, peak.used_bytes)
            }
        assert max(row["used_bytes"] for row in moments if row["lane"] == device.lane) == device.peak_bytes
    assert {row["lane"] for row in boundaries} <= {device.lane for device in summary.memory}


def test_requests_of_the_json(both: tuple[Tables, Summary]) -> None:
    """Requests of each step are as many as in the JSON, and their means are its means."""
    tables, summary = both
    found = rows(tables.requests())
    for figures in summary.requests_by_step:
        own = [row for row in found if (row["step"], row["name"]) == (figures.step, figures.name)]
        joined = [row for row in own if row["unjoined"] is None]
        assert len(joined) == figures.count
        assert len(own) - len(joined) == sum(figures.unjoined.values())
        for name, stage in figures.stages.items():
            lengths = [row[f"{name}_seconds"] for row in joined]
            assert sum(lengths) / len(lengths) == pytest.approx(stage.mean_seconds, rel=1e-9)
        for row in joined:
            stages = [value for name, value in row.items() if name.endswith("_seconds") and value is not None]
            assert sum(stages) == pytest.approx(row["seconds"], abs=1e-9)
    assert len(found) == sum(one.count + sum(one.unjoined.values()) for one in summary.requests_by_step)


def test_chosen_part(tmp_path: Path) -> None:
    """Steps and ranks choose the same part as on the command line."""
    run = two_ranks(tmp_path / "run").folder
    tables = rltrace.open(run, steps="1", ranks="1")
    assert repr(tables).startswith(f"<rltrace tables of {run}: spans, counters, ")
    assert set(tables.steps()["step"].to_pylist()) == {1}
    assert set(tables.phases()["lane"].to_pylist()) == {"driver", "rank 1"}
    assert None not in tables.phases()["step"].to_pylist()
    assert set(tables.spans()["step"].to_pylist()) == {1}
    with pytest.raises(SelectionError, match="run: steps 9: no such step; the run has steps 0-1"):
        rltrace.open(run, steps="9")
    with pytest.raises(SelectionError, match="'one' is neither a number nor a range"):
        rltrace.open(run, steps="one")


# ---- frames -----------------------------------------------------------------------------------------------------


def test_chosen_rows_and_columns(qwen: Tables) -> None:
    """A name, a rank, a step and columns choose what a query would."""
    found = qwen.spans(name="fsdp.forward", rank=2, step=1, columns=["start_ns", "name"])
    assert found.column_names == ["start_ns", "name"] and found.num_rows > 0
    assert (
        found["start_ns"].to_pylist()
        == qwen.sql("select start_ns from spans where name = 'fsdp.forward' and rank = 2 and step = 1")[
            "start_ns"
        ].to_pylist()
    )
    assert qwen.counters(name="reward_mean")["value"].to_pylist() == qwen.steps()["reward_mean"].to_pylist()
    assert qwen.spans(name="no such name").num_rows == 0
    with pytest.raises(QueryError, match="no column nope in spans; it has process, role, "):
        qwen.spans(columns=["nope"])


def test_arrow_pandas_and_polars(qwen: Tables) -> None:
    """One table is a table of Arrow; pandas and polars make a frame of it."""
    phases = qwen.phases()
    assert isinstance(phases, pa.Table)
    frame = phases.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    seconds = frame[frame.steady].groupby("phase", observed=True).seconds.sum()
    other = polars.from_arrow(phases).filter("steady").group_by("phase").agg(polars.col("seconds").sum())
    assert seconds.to_dict() == pytest.approx(dict(other.iter_rows()))


def test_nothing_more_is_loaded() -> None:
    """`import rltrace` loads nothing of it, and `open` is there all the same."""
    code = (
        "import rltrace, sys; names = {name.partition('.')[0] for name in sys.modules};"
        "print(names & {'numpy', 'pyarrow', 'duckdb', 'pandas'}); print(rltrace.open.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\nrltrace.frames\n"


def test_rows_are_chosen_before_they_are_made(qwen: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are decoded only of the rows that a query leaves."""
    made = 0

    def counting(value: Any) -> str:
        nonlocal made
        made += 1
        return json.dumps(value)

    monkeypatch.setattr("rltrace.frames.arrow.as_json", counting)
    (row,) = rows(qwen.sql("select args from spans where name = 'step' and step = 2"))
    assert json.loads(row["args"])["step"] == 2 and made == 1
    qwen.sql("select name, count(*) from spans group by name")
    assert made == 1


def test_other_processes_are_not_read(qwen: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """A condition on a rank, a role or a process is judged before its segments are read."""
    read: list[str] = []

    def counting(process: Process, *rest: Any) -> Any:
        read.append(process.key)
        return fold(process, *rest)

    fold = columns.fold
    _ = qwen.sql("select count(step) from spans")  # of the steps
    monkeypatch.setattr(columns, "fold", counting)
    of_rank = {row["key"] for row in rows(qwen.processes()) if row["lane"] == "rank 2"}
    read.clear()
    found = qwen.sql("select distinct process from spans where rank = 2 and name <> 'x'")["process"].to_pylist()
    assert set(found) == set(read) == of_rank and len(read) == len(of_rank) == 2
    read.clear()
    either = (pc.field("role") == "driver") | (pc.field("rank") == 1)
    qwen.dataset(SPANS).scanner(["name"], either).to_table()
    assert len(read) == 3
    read.clear()
    qwen.sql("select name from spans where rank is null or rank <> 1")
    assert len(read) >= len(qwen.recording.processes) - 2


def test_a_table_twice_in_a_query(tmp_path: Path) -> None:
    """Both readings see the same rows, and what is missing is counted once."""
    run = two_ranks(tmp_path / "run").folder
    segment = run / "processes" / "worker-0" / "000001.seg"
    segment.write_bytes(segment.read_bytes().rstrip(b"\0")[:-9])
    tables = rltrace.open(run)
    query = "select count(*) as n from spans a join spans b using (process, span) where a.start_ns = b.start_ns"
    assert tables.sql(query)["n"].to_pylist() == [tables.spans().num_rows]
    assert [*tables.missing()] == ["some of the Recording is missing (1 torn records); `rltrace summary` says more"]


WHERE = (
    "name = 'fsdp.all_gather' and bytes > 1000000", "name in ('step', 'ray.call') or rank is null",
    "error is not null", "end_ns is null", "seconds between 0.1 and 0.2", "not automatic", "phase = 'actor.update'",
    "step >= 2 and method like 'Worker.%'", "kv_usage is not null and running > 1", "rank <> 1", "request_id = 'x'",
    "thread_lane is null and step = 1", "bytes is distinct from 461", "lane = 'driver' and role = 'driver'",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(qwen: Tables) -> Any:
    """All spans, without their JSON."""
    return qwen.spans(columns=[name for name in SPANS.names() if name != "args"])


@pytest.mark.parametrize("where", WHERE)
def test_conditions(where: str, qwen: Tables, whole: Any) -> None:
    """A condition holds for the same rows wherever it is evaluated: DuckDB hands some of it to the reader."""
    import duckdb

    expected = duckdb.sql(f"select process, span from whole where {where} order by all").fetchall()
    found = qwen.sql(f"select process, span from spans where {where} order by all")
    assert [tuple(row.values()) for row in rows(found)] == expected


# ---- SQL --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("select * from nope", "no table nope; the tables are boundaries, counters, flows, hooks, memory, phases, "),
        ("select nope from phases", "no column nope; phases has step, lane, rank, phase, seconds, share, "),
        ("select p.nope from phases p", "no column nope; phases has step, lane, rank, "),
        ("selec 1", 'syntax error at or near "selec"'),
        ("", "the query is no single SELECT: ''"),
        ("select 1; select 2", "the query is no single SELECT: 'select 1; select 2'"),
        ("create table x (a int)", "the query is no single SELECT"),
        ("copy phases to 'x.csv'", "the query is no single SELECT"),
        ("set threads = 1", "the query is no single SELECT"),
        ("attach 'x.db'", "the query is no single SELECT"),
        ("select seconds + name from spans", "Binder Error"),
        ("select cast(name as int) from spans", "Conversion Error: Could not convert string"),
    ],
)  # fmt: skip
def test_wrong_queries(qwen: Tables, query: str, said: str) -> None:
    """An error is one line that says what there is."""
    with pytest.raises(QueryError) as error:
        qwen.sql(query)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_query_reads_no_file(qwen: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by a function, not by a path as a table, and not by a variable of the program that asks."""
    monkeypatch.chdir(tmp_path)
    secret = tmp_path / "secret.csv"
    secret.write_text("a,b\n1,2\n")
    frame = pa.table({"a": [1]})
    assert frame.num_rows == 1
    for query in (
        f"select * from '{secret}'",
        f"select * from read_csv('{secret}')",
        f"select * from read_text('{secret}')",
        "select * from glob('*')",
        "select * from frame",
    ):
        with pytest.raises(QueryError):
            qwen.sql(query)
    assert [*tmp_path.iterdir()] == [secret]


def test_names_are_only_names(tmp_path: Path) -> None:
    """A name that looks like SQL, or is no text, is a value like any other."""
    name = "'; drop table spans; --"
    written = Written(tmp_path / "run").process("a\udcff", span(name, 1, 2, error="'\""), role="'; --")
    tables = rltrace.open(written.folder)
    assert tables.sql("select name, role, process from spans").to_pylist() == [
        {"name": name, "role": "'; --", "process": "a?"}
    ]
    assert tables.spans(name=name).num_rows == 1


def test_sums_of_bytes_are_whole(qwen: Tables) -> None:
    """A sum of whole numbers is one of 64 bits, as they are, where it fits."""
    found = qwen.sql("select sum(bytes) as bytes, sum(bytes::hugeint) * 1000000000000 as more from spans")
    assert found.schema.field("bytes").type == pa.int64()
    assert int(found["more"][0].as_py()) == found["bytes"][0].as_py() * 10**12


# ---- what a Recording lacks -------------------------------------------------------------------------------------


def test_without_steps(tmp_path: Path) -> None:
    """All tables are there, and spans are in no step."""
    tables = rltrace.open(Written(tmp_path / "run").process("one", span("work", 1, 2), role="main", ended_s=3).folder)
    assert {name: tables.table(name).num_rows for name in TABLES} == {
        "spans": 1, "counters": 0, "flows": 0, "steps": 0, "phases": 0, "memory": 0, "boundaries": 0, "requests": 0,
        "weight_sync": 0, "weight_sync_stages": 0, "processes": 1, "hooks": 0,
    }  # fmt: skip
    assert rows(tables.spans())[0]["step"] is None and [*tables.missing()] == []


def test_empty(tmp_path: Path) -> None:
    """Nothing was recorded: the tables are there, and empty."""
    tables = rltrace.open(Written(tmp_path / "run").folder)
    assert {tables.table(name).num_rows for name in TABLES} == {0}
    assert tables.sql("select count(*) as spans from spans")["spans"].to_pylist() == [0]


def test_live(tmp_path: Path) -> None:
    """A run that goes on has what it has written, and that is said."""
    alive = {"pid": os.getpid(), "start_ticks": manifest.started_ticks(os.getpid())}
    run = Written(tmp_path / "run").process("one", span("step", 1, 2), span("step", 3, None), role="main", **alive)
    tables = rltrace.open(run.folder)
    assert tables.spans()["step"].to_pylist() == [0, 1]
    assert [*tables.missing()] == ["the run goes on; this is what it has written until now"]


def test_damaged(tmp_path: Path) -> None:
    """What can be read is there, and what is missing is counted as `summary` counts it."""
    run = two_ranks(tmp_path / "run").folder
    segment = run / "processes" / "worker-0" / "000001.seg"
    content = segment.read_bytes().rstrip(b"\0")
    segment.write_bytes(content[: len(content) // 2])
    tables = rltrace.open(run)
    found = tables.spans(rank=0)
    assert 0 < found.num_rows < rltrace.open(two_ranks(tmp_path / "whole").folder).spans(rank=0).num_rows
    (said,) = tables.missing()
    assert "torn records" in said and "`rltrace summary` says more" in said


def test_hosts_with_clocks_of_their_own(tmp_path: Path) -> None:
    """Times count from the beginning of the Recording, whatever clock wrote them."""
    written = Written(tmp_path / "run")
    written.process("here", span("a", 5, 6), role="main", start_ns=4 * SECOND)
    other = {"host": "there", "boot_id": "another", "realtime_ns": 90 * SECOND, "start_ns": 1 * SECOND}
    written.process("there", span("b", 2, 3), role="main", **{**other, "monotonic_ns": 0})
    starts = {row["name"]: row["start_ns"] for row in rows(rltrace.open(written.folder).spans())}
    assert starts["b"] - starts["a"] == (90 + 2 - 5) * SECOND


def test_a_hook_that_failed(tmp_path: Path) -> None:
    """Hooks are asked for like anything else."""
    hooks = (hook(1, "m:a", "failed", reason="gone"), hook(2, "m:b", fires=3))
    run = Written(tmp_path / "run").process("one", role="main", hooks=hooks).folder
    found = rltrace.open(run).sql("select target, reason from hooks where state = 'failed'")
    assert found.to_pylist() == [{"target": "m:a", "reason": "gone"}]
