"""The Recordings that ship with the repository, as they were recorded: the 8B run on two hosts, and verl's."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from statistics import mean

import pytest
from shipped import OTHER_HOST, RECORDINGS, SHIPPED, VERL, opened, summary_of
from shipped import QWEN as RUN
from test_perfetto import SCALES, device_groups, device_scales, export
from trace_processor import Importer, Trace

from rltrace.analysis.ledger import ledgers
from rltrace.analysis.observations import Observations
from rltrace.analysis.summary import Summary
from rltrace.analysis.used_memory import used_memory
from rltrace.events import STEP_PHASES, Counter, Span

PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "8b.md"
PARAMETERS = 8_190_735_360
"""Of Qwen3-8B."""
MODEL_BYTES = 2 * PARAMETERS
"""In bf16."""
PHASES = set(STEP_PHASES) - {"reward", "advantage", "critic.values", "critic.update"}
"""Of a rank in a step of GRPO: the first two are the driver's, and the others PPO's."""


@pytest.fixture(scope="module")
def summary() -> Summary:
    return summary_of(RUN)


@pytest.fixture(scope="module")
def other_host() -> Summary:
    return summary_of(OTHER_HOST)


@pytest.fixture(scope="module")
def verl() -> Summary:
    return summary_of(VERL)


def test_they_are_small_enough_to_ship() -> None:
    assert set(SHIPPED) == set(RECORDINGS.iterdir())
    for file in RECORDINGS.iterdir():
        assert file.stat().st_size <= 5_000_000


def test_it_is_whole_and_of_four_gpus(summary: Summary) -> None:
    assert summary.complete and not summary.losses and not summary.open_spans
    assert len(summary.steps) >= 3
    devices = {(process.rank, process.device) for process in summary.processes if process.role == "engine"}
    assert len(devices) == 4 and all(str(device).startswith("GPU-") for _, device in devices)


def test_phases_are_complete_and_disjoint(summary: Summary) -> None:
    """Every phase of every step is there, and no two overlap."""
    rows = [row for row in summary.phases if row.step is not None and row.rank is not None]
    assert len(rows) == 4 * len(summary.steps)
    for row in rows:
        assert set(row.phases) >= PHASES
        assert row.overlaps == []


COLUMNS = ["summary", "other_host", "verl"]


@pytest.mark.parametrize("column", COLUMNS)
def test_page_has_seconds_of_rank_0(column: str, request: pytest.FixtureRequest) -> None:
    """The page's table of phases has what the summary says of rank 0.

    It has three columns, a Recording each: the least and the most of the steps after the first.
    """
    steady = request.getfixturevalue(column).steady
    assert steady is not None and steady.first_step == (1 if column == "verl" else 0)
    rank = next(lane for lane in steady.lanes if lane.rank == 0)
    spreads = {"step": rank.seconds, **rank.phases}
    figure = r" ([\d.]+)(?:-([\d.]+))? \|"
    table = PAGE.read_text().partition("The mean of 4 ranks")[0]
    rows = re.findall(rf"^\| `?([\w.]+)`?[^|]* \|{3 * figure}", table, re.MULTILINE)
    place = 2 * COLUMNS.index(column)
    said = {name: figures[place : place + 2] for name, *figures in rows if name in spreads}
    assert set(said) >= PHASES | {"idle", "step"}
    for name, (least, most) in said.items():
        decimals = len(least.partition(".")[2])
        spread = spreads[name]
        found = (f"{spread.least_seconds:.{decimals}f}", f"{spread.most_seconds:.{decimals}f}")
        assert (least, most or least) == found, name


def test_page_has_memory_of_rank_0(summary: Summary, verl: Summary) -> None:
    """The page's table of memory has what the summary says of rank 0's peak.

    It has two columns, a Recording each: who held what at that peak.
    """
    rows = re.findall(
        r"^\| `([\w.]+)`[^|]* \| (-?[\d.]+) \| (-?[\d.]+) \| -?[\d.]+ \| -?[\d.]+ \|$", PAGE.read_text(), re.MULTILINE
    )
    for column, found in enumerate((summary, verl)):
        (rank,) = [memory for memory in found.memory if memory.rank == 0]
        peak = {**rank.at_peak_bytes, "used_bytes": rank.peak_bytes}
        said = {name: float(figures[column]) for name, *figures in rows if name in peak}
        assert said.keys() >= {name for name, size in peak.items() if name != "free" and size > 2**30}
        for name, gibibytes in said.items():
            assert gibibytes == round(peak[name] / 2**30, 2), name


@pytest.mark.parametrize(("run", "edges", "unsettled"), [("summary", 86, 0), ("other_host", 86, 3), ("verl", 108, 18)])
def test_every_byte_has_an_owner(run: str, edges: int, unsettled: int, request: pytest.FixtureRequest) -> None:
    """Every byte of the run has an owner, within the limit."""
    ranks = request.getfixturevalue(run).memory
    assert len(ranks) == 4
    for rank in ranks:
        found = rank.residual
        assert found is not None and (found.boundaries, found.inconsistent_boundaries, found.boundaries_over_limit) == (
            edges,
            unsettled,
            0,
        )
        assert rank.unknown == {}


@pytest.mark.parametrize("run", COLUMNS)
def test_pinned_bytes_of_old_runs_are_unknown(run: str, request: pytest.FixtureRequest) -> None:
    """Pinned bytes are unknown in runs that were recorded before anybody reported them."""
    processes = request.getfixturevalue(run).host_memory
    assert sum("ref.params" in process.peak_owner_bytes for process in processes) == 4, "the ref is offloaded"
    for process in processes:
        assert process.peak_pinned_bytes is None
        assert set(process.peak_owner_pinned_bytes.values()) == {None}
        assert process.pinned_unknown.keys() == {*process.peak_owner_bytes, "unattributed"}


def test_verls_servers_sample_no_boundaries(verl: Summary) -> None:
    """The phase boundaries of verl that nobody sampled are those of its servers' phases.

    These are `rollout.generate` and `rollout.sleep`; what was sampled before them is not taken for what came after.
    """
    for rank in verl.memory:
        unsettled = [edge for edge in rank.boundaries if not edge.is_consistent]
        assert {edge.phase for edge in unsettled} == {"rollout.generate", "rollout.sleep"}
        assert all(edge.away_seconds > 0.005 for edge in unsettled)
        (generate,) = (moment for moment in rank.phases if moment.phase == "rollout.generate")
        assert generate.bytes["rollout.kv_cache"] == 20_008_927_232


def test_verls_communicators_are_in_its_ledger(verl: Summary) -> None:
    assert all(800 << 20 < rank.at_peak_bytes["nccl"] < 1 << 30 for rank in verl.memory)


def test_verl_sends_four_bytes_a_parameter(verl: Summary) -> None:
    """verl sends each parameter in four bytes."""
    syncs = [sync for sync in verl.weight_sync if sync.step is not None]
    assert len(syncs) == 4 * len(verl.steps) == 16
    assert {sync.bytes for sync in syncs} == {4 * PARAMETERS}


def test_verls_engines_free_all_at_each_sleep(verl: Summary) -> None:
    """verl's engines give back all that they have at each sleep, though the servers are ready before the engines."""
    sleeps = [sleep for sleep in verl.sleeps if sleep.name in ("rollout.sleep", "cumem.unmap")]
    assert len(sleeps) == 4 * (1 + len(verl.steps))
    assert {sum(sleep.moved_bytes.values()) for sleep in sleeps} == {34_882 << 20}
    assert {sleep.verdict for sleep in verl.sleeps} == {"ok"}


def test_verl_steps_match_its_timer(verl: Summary) -> None:
    """The lengths of verl's steps are those that its own timer says.

    `timing_s/step` that its console showed.
    """
    assert [step.seconds for step in verl.steps] == pytest.approx([43.4181, 14.6889, 11.6645, 11.9183], abs=1e-4)
    assert not verl.losses and not verl.open_spans and verl.lost_events == 0


def test_each_sync_moves_the_model_once(summary: Summary) -> None:
    """Each sync moves the model once, and all but those of the first step take less than 0.15 s."""
    assert len(summary.weight_sync) == 4 * len(summary.steps)
    for sync in summary.weight_sync:
        assert sync.bytes == MODEL_BYTES
        assert sync.step == 0 or sync.seconds < 0.15


def test_engine_frees_memory_while_actor_learns(summary: Summary) -> None:
    """The engine gives its memory back while the actor learns."""
    engines = 0
    for process in opened(RUN).processes:
        if process.role == "engine":
            engines += 1
            events = list(process.events())
            for owner in ("rollout.weights_bytes", "rollout.kv_cache_bytes"):
                samples = [event.value for event in events if isinstance(event, Counter) and event.name == owner]
                assert max(samples) > 15e9 and samples[-1] == 0
            unmapped = [
                event.args["bytes"] for event in events if isinstance(event, Span) and event.name == "cumem.unmap"
            ]
            assert len(unmapped) >= len(summary.steps) and min(unmapped) > 30e9
    assert engines == 4


@pytest.fixture(scope="module")
def exported() -> bytes:
    return export(RUN)


@pytest.fixture(scope="module")
def trace(importer: Importer, exported: bytes) -> Trace:
    """What no test of this module changes; none imports another one."""
    return importer.load(exported)


def test_perfetto_imports_it_whole(trace: Trace) -> None:
    spans = counters = flows = 0
    for process in opened(RUN).processes:
        events = list(process.events())
        rows = {event.name for event in events if isinstance(event, Counter) and (event.value or not of_memory(event))}
        if process.device is not None:
            rows -= {"used_bytes"}  # the line of its device has them
        last = {event.name: event.value for event in events if isinstance(event, Counter) and of_memory(event)}
        is_over = (process.end_ns, process.gone_ns) != (None, None) and process.role != "sampler"
        counters += sum(value != 0 and name in rows for name, value in last.items()) * is_over
        for event in events:
            if isinstance(event, Counter):
                counters += event.name in rows
            else:
                spans += 1
                flows += len(event.flows_in)
    of_devices = trace.one(OF_DEVICES)
    assert of_devices > 100
    trace.check_clean(slices=spans, counters=counters + of_devices, flows=flows)


def of_memory(sample: Counter) -> bool:
    """Whether a row that stays zero is not drawn."""
    return sample.name.partition("/")[0].endswith("_bytes")


OF_DEVICES = """
    select count(*) from counter c join track t on t.id = c.track_id join track above on above.id = t.parent_id
    where above.name like ' Memory · rank %'
"""
"""Counters that no process wrote: what the processes of a device hold together."""


def test_gpu_groups(trace: Trace) -> None:
    """Each GPU's group is the ledger of the summary, with one line of its total of all who looked."""
    groups, seen = device_groups(trace), Observations(opened(RUN))
    lines = {f" Memory · {lane.name} · {lane.device}": (found, lane) for lane, found in ledgers(seen).items()}
    assert len(groups) == 4 and groups.keys() == lines.keys()
    for name, (ledger, lane) in lines.items():
        unexplained = ledger.row("unaccounted")
        rows = {owner: ledger.row(owner) for owner in ("driver.reserved", "unaccounted", "free")}
        used = used_memory(seen, lane)
        assert used.is_sampled.sum() > 20 and len(used.looked().bytes) == len(ledger.used)
        for row, expected in (rows | {"owned": ledger.used - unexplained, "used": used.bytes}).items():
            assert groups[name][row] == changes(expected.tolist()), row
        assert max(map(abs, groups[name]["unaccounted"])) > 0, "all explained: nothing was compared"
    assert device_scales(trace) == SCALES


def changes(values: list[float]) -> list[float]:
    """Without those that are equal to the one before."""
    return [value for value, _ in groupby(values)]


def test_sleeps_move_the_expected_bytes(summary: Summary) -> None:
    """Every sleep frees and every wake-up takes the expected bytes, and nothing leaks."""
    assert [move.name for move in summary.sleeps if move.rank == 0 and move.step == 1] == [
        "rollout.wake_weights", "rollout.wake_kv_cache", "rollout.sleep",
    ]  # fmt: skip
    for move in summary.sleeps:
        assert (move.verdict, move.reason) == ("ok", "")
        assert sum(move.moved_bytes.values()) == sum(move.expected_bytes.values()) > MODEL_BYTES
    assert summary.leaks == []


def test_collectives_have_gpu_time() -> None:
    """Every collective of a worker has its time on the GPU."""
    workers = [process for process in opened(RUN).processes if process.role == "worker"]
    assert len(workers) == 4
    for worker in workers:
        spans = [event for event in worker.events() if isinstance(event, Span)]
        for name in ("fsdp.all_gather", "fsdp.reduce_scatter", "weight_sync.pack"):
            on_host = [span for span in spans if span.name == name]
            on_gpu = [span for span in spans if span.name == f"gpu.{name}"]
            assert len(on_gpu) == len(on_host) > 100
            assert all(span.args["error_ns"] < 100_000 and span.end_ns is not None for span in on_gpu)


def test_page_has_gpu_seconds_of_a_step(summary: Summary) -> None:
    """The page says how many seconds of a step the GPUs spent on forwards, backwards and collectives."""
    assert summary.steady is not None
    seconds = {
        work: mean(row.seconds for row in summary.gpu_work if (row.work, row.phase) == (work, None))
        for work in ("fsdp.forward", "fsdp.backward", "collectives")
    }
    step = mean(lane.seconds.mean_seconds for lane in summary.steady.lanes)
    said = re.sub(r"\s+", " ", PAGE.read_text())
    forward, backward, collectives = (f"{of_work:.2f} s in" for of_work in seconds.values())
    assert f"first take {step:.2f} s; in one of them the GPUs spent {forward} forwards, {backward} backwards" in said
    assert f"and {collectives} collectives" in said


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (RUN, "a GPU is busy for {least}-{most} % of the time and draws {watts} W"),
        (OTHER_HOST, "on the other host {least}-{most} % and {watts} W"),
    ],
)
def test_page_has_load_of_the_updates(file: Path, said: str) -> None:
    """The page says how busy workers and GPUs were in the updates after the first.

    The figures are the sampler's: of every worker and GPU the mean of its samples.
    """
    recording = opened(file)
    workers = [process for process in recording.processes if process.role == "worker"]
    updates = [
        (event.start_ns, event.end_ns)
        for event in workers[0].events()
        if isinstance(event, Span) and event.name == "actor.update" and event.end_ns
    ][1:]
    (sampler,) = (process for process in recording.processes if process.role == "sampler")
    samples: dict[str, list[float]] = {}
    for event in sampler.events():
        if isinstance(event, Counter) and any(start <= event.ts_ns < end for start, end in updates):
            samples.setdefault(event.name, []).append(event.value)
    assert [round(mean(samples[f"process.cpu_percent/{worker.key}"])) for worker in workers] == [101] * 4
    busy, watts = (
        [mean(values) for name, values in samples.items() if name.startswith(counter)]
        for counter in ("gpu.utilisation_percent/", "gpu.power_watts/")
    )
    figures = {"least": round(min(busy)), "most": round(max(busy)), "watts": round(mean(watts))}
    assert said.format(**figures) in re.sub(r"\s+", " ", PAGE.read_text())
