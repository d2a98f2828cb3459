"""The Recording that ships with the repository: the 8B run on 4 GPUs, as it was recorded there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_perfetto import export
from trace_processor import Importer

from rltrace.analysis.summary import Summary, summarize
from rltrace.events import STEP_PHASES, Counter, Span
from rltrace.recording import Recording

RUN = Path(__file__).parents[2] / "examples" / "recordings" / "qwen3_8b_4gpu"
README = Path(__file__).parents[2] / "README.md"
MODEL_BYTES = 2 * 8_190_735_360
"""Qwen3-8B's parameters in bf16."""


@pytest.fixture(scope="module")
def summary() -> Summary:
    return summarize(Recording.open(RUN))


def test_it_is_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in RUN.rglob("*") if file.is_file()) <= 5_000_000


def test_it_is_whole_and_of_four_gpus(summary: Summary) -> None:
    assert summary.complete and not summary.losses and not summary.open_spans
    assert len(summary.steps) >= 3
    devices = {(process.rank, process.device) for process in summary.processes if process.role == "engine"}
    assert len(devices) == 4 and all(str(device).startswith("GPU-") for _, device in devices)


def test_every_phase_of_every_step_is_there_and_none_overlap(summary: Summary) -> None:
    rows = [row for row in summary.phases if row.step is not None and row.rank is not None]
    assert len(rows) == 4 * len(summary.steps)
    for row in rows:
        assert set(row.phases) >= set(STEP_PHASES) - {"reward", "advantage"}
        assert row.overlaps == []


def test_the_readmes_table_is_what_the_summary_says_of_rank_0(summary: Summary) -> None:
    """The column of this Recording: the least and the most of the steps after the first."""
    assert summary.steady is not None and summary.steady.first_step == 0
    rank = next(lane for lane in summary.steady.lanes if lane.rank == 0)
    spreads = {"step": rank.seconds, **rank.phases}
    rows = re.findall(r"^\| `?([\w.]+)`?[^|]* \| ([\d.]+)(?:-([\d.]+))? \|", README.read_text(), re.MULTILINE)
    said = {name: (least, most or least) for name, least, most in rows if name in spreads}
    assert set(said) >= (set(STEP_PHASES) - {"reward", "advantage"}) | {"idle", "step"}
    for name, (least, most) in said.items():
        decimals = len(least.partition(".")[2])
        spread = spreads[name]
        assert (least, most) == (f"{spread.least_seconds:.{decimals}f}", f"{spread.most_seconds:.{decimals}f}"), name


def test_every_sync_moves_the_model_once_and_all_but_the_first_take_at_most_0_15_s(summary: Summary) -> None:
    assert len(summary.weight_sync) == 4 * len(summary.steps)
    for sync in summary.weight_sync:
        assert sync.bytes == MODEL_BYTES
        assert sync.step == 0 or sync.seconds < 0.15


def test_the_engine_gives_its_memory_back_while_the_actor_learns(summary: Summary) -> None:
    for process in Recording.open(RUN).processes:
        if process.role == "engine":
            events = list(process.events())
            for owner in ("rollout.weights_bytes", "rollout.kv_cache_bytes"):
                samples = [event.value for event in events if isinstance(event, Counter) and event.name == owner]
                assert max(samples) > 15e9 and samples[-1] == 0
            unmapped = [
                event.args["bytes"] for event in events if isinstance(event, Span) and event.name == "cumem.unmap"
            ]
            assert len(unmapped) >= len(summary.steps) and min(unmapped) > 30e9


def test_perfetto_imports_it_whole(importer: Importer) -> None:
    spans = counters = flows = 0
    for process in Recording.open(RUN).processes:
        for event in process.events():
            if isinstance(event, Counter):
                counters += 1
            else:
                spans += 1
                flows += len(event.flows_in)
    trace = importer.load(export(RUN))
    of_devices = trace.one(OF_DEVICES)
    assert of_devices > 100
    trace.check_clean(slices=spans, counters=counters + of_devices, flows=flows)


OF_DEVICES = """
    select count(*) from counter c join track t on t.id = c.track_id join track above on above.id = t.parent_id
    where above.name like 'Memory · rank %'
"""
"""Counters that no process wrote: what the processes of a device hold together."""


def test_every_sleep_freed_and_every_wake_up_took_what_was_expected(summary: Summary) -> None:
    assert [move.name for move in summary.sleeps if move.rank == 0 and move.step == 1] == [
        "rollout.wake_weights", "rollout.wake_kv_cache", "rollout.sleep",
    ]  # fmt: skip
    for move in summary.sleeps:
        assert (move.verdict, move.reason) == ("ok", "")
        assert sum(move.moved_bytes.values()) == sum(move.expected_bytes.values()) > MODEL_BYTES
    assert summary.leaks == []
