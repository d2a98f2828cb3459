"""Each finding is found where its fault is planted, with its rank, its phase and its price, and not without it."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from planted_runs import CLOSE, TWO_PERCENT, PlantedRun, has_price, planted
from recordings import Written, sample, span
from shipped import QWEN, RECORDINGS, VERL, why_of

from rltrace import plugins
from rltrace.analysis import findings
from rltrace.analysis.findings import notable, why
from rltrace.analysis.findings.amounts import as_text, between_as_text, counted
from rltrace.analysis.findings.finding import Finding, confidence_of, interval_of
from rltrace.analysis.summary import analyse
from rltrace.read.selection import seconds

# ---------------------------------------------------------------- a rank


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_always_the_same_slow_rank(tmp_path: Path, ranks: int) -> None:
    """A rank that takes 2 % of a step longer in a phase is named, with the phase."""

    def plant(run: PlantedRun) -> None:
        run.longer["actor.update", 1] = lambda step: TWO_PERCENT

    finding = planted(tmp_path, "slow_rank", plant, ranks=ranks)
    has_price(finding, TWO_PERCENT)
    assert (finding.evidence.ranks, finding.evidence.phases) == ([1], ["actor.update"])
    assert finding.confidence == "high" and "is slow" in finding.title


def test_slow_host(tmp_path: Path) -> None:
    """A host whose ranks all take longer is named with them, and none of them is called slow."""

    def on_hosts(folder: Path, *slow: int) -> list[Finding]:
        run = PlantedRun(folder, ranks=16)
        run.ranks_of_a_host = 4
        for rank in slow:
            run.longer["actor.update", rank] = lambda step: 0.5
        return [one for one in run.judge().findings if one.seconds_per_step]

    assert on_hosts(tmp_path / "well") == []
    (finding,) = on_hosts(tmp_path / "faulty", 8, 9, 10, 11)
    has_price(finding, 0.5)
    assert (finding.id, finding.evidence.ranks) == ("slow_host", [8, 9, 10, 11])
    assert finding.title.startswith("Host node-2 is slow in actor.update in 8 of 8 steps")
    (single,) = on_hosts(tmp_path / "single", 9)
    assert (single.id, single.evidence.ranks) == ("slow_rank", [9])


def test_rank_that_begins_late(tmp_path: Path) -> None:
    """A rank that begins a phase late is told from one that computes slowly."""
    finding = planted(tmp_path, "slow_rank", lambda run: run.late.update({("ref.log_prob", 2): TWO_PERCENT}))
    has_price(finding, TWO_PERCENT)
    assert (finding.evidence.ranks, finding.evidence.phases) == ([2], ["ref.log_prob"])
    assert "begins late" in finding.title


def test_slow_rank_in_turns(tmp_path: Path) -> None:
    """Another rank in each step is priced by how far it is behind the mean."""

    def plant(run: PlantedRun) -> None:
        for rank in range(4):
            run.longer["actor.update", rank] = lambda step, rank=rank: 1.0 if step % 4 == rank else 0.0

    finding = planted(tmp_path, "slow_rank", plant)
    has_price(finding, 0.75)
    assert finding.evidence.ranks == [0, 1, 2, 3] and finding.evidence.phases == ["actor.update"]
    advice = " ".join(setting.change for setting in finding.settings)
    assert "this rank" not in advice and "no rank is to blame" in advice
    assert "tokens" not in advice, "verl evens them out"


def test_two_ranks_in_turns_are_noise(tmp_path: Path) -> None:
    """Of two ranks that are slow in turns nothing is said, for noise does the same."""
    run = PlantedRun(tmp_path / "run", ranks=2, steps=21)
    for rank in range(2):
        run.longer["actor.update", rank] = lambda step, rank=rank: 1.5 if step % 2 == rank else 0.0
    assert not run.found("slow_rank")


@pytest.mark.parametrize("ranks", [4, 32])
def test_culprit_waits_least(tmp_path: Path, ranks: int) -> None:
    """Where collectives make all ranks equally slow, the culprit is the one that waits least in them."""

    def collectives(run: PlantedRun, rank: int, step: int, begin: float, end: float) -> list[Any]:
        waits = 0.5 + (0 if rank == 3 and run.late.get(("fault", 3)) else TWO_PERCENT) + 0.001 * (rank % 2)
        parts = [begin + (end - begin) * part / 10 for part in range(10)]
        return [record for at in parts for record in [span("gpu.fsdp.all_gather", at, at + waits / 10)]]

    def plant(run: PlantedRun) -> None:
        run.late["fault", 3] = 1.0

    def made(run: PlantedRun) -> PlantedRun:
        run.more["actor.update"] = collectives
        return run

    assert not made(PlantedRun(tmp_path / "well", ranks=ranks)).found("slow_rank")
    faulty = made(PlantedRun(tmp_path / "faulty", ranks=ranks))
    plant(faulty)
    (finding,) = faulty.found("slow_rank")
    has_price(finding, TWO_PERCENT)
    assert (finding.evidence.ranks, finding.evidence.phases) == ([3], ["actor.update"])
    assert "others wait" in finding.title


# ---------------------------------------------------------------- the rollout


def test_uneven_engines(tmp_path: Path) -> None:
    """An engine with more requests than the mean is priced by how much it outlasts the mean."""

    def plant(run: PlantedRun) -> None:
        run.work = [0.9, 0.9, 1.3, 0.9]

    finding = planted(tmp_path, "uneven_engines", plant)
    has_price(finding, 0.9)
    assert finding.evidence.ranks == [2] and finding.evidence.phases == ["rollout.generate"]


def test_uneven_engines_are_no_slow_rank(tmp_path: Path) -> None:
    """An engine that is slow for its work is no slow rank; one with even work is."""
    uneven = PlantedRun(tmp_path / "uneven")
    uneven.work = [0.9, 0.9, 1.3, 0.9]
    assert not uneven.found("slow_rank")
    slow = PlantedRun(tmp_path / "slow")
    slow.longer["rollout.generate", 2] = lambda step: 0.5
    judged = slow.judge()
    assert [finding.id for finding in judged.findings if finding.seconds_per_step] == ["slow_rank"]
    assert "the work is even" in " ".join(judged.findings[0].evidence.facts)


def test_rollout_tail(tmp_path: Path) -> None:
    """The slowest 5 % are priced from the end of the others on."""
    finding = planted(tmp_path, "rollout_tail", lambda run: setattr(run, "tail", 1.5))
    has_price(finding, 1.5)
    assert finding.evidence.phases == ["rollout.generate"]


def test_requests_wait_outside(tmp_path: Path) -> None:
    """The time in which agents wait for an engine that has nothing is priced."""

    def agents(wait: float) -> Callable[[PlantedRun, int, float, float], list[Any]]:
        return lambda run, step, begin, end: [
            span("agent_loop.request", begin - wait, end, request_id=f"agent-{step}"),
        ]

    well, faulty = PlantedRun(tmp_path / "well"), PlantedRun(tmp_path / "faulty")
    well.elsewhere, faulty.elsewhere = agents(0.01), agents(0.3)
    faulty.gap["rollout.generate"] = 0.3
    assert not well.found("requests_outside")
    (finding,) = faulty.found("requests_outside")
    has_price(finding, 0.3)


def test_slow_tools(tmp_path: Path) -> None:
    """A tool that runs while no request is in an engine is priced; beside requests it costs nothing."""

    def tools(seconds: float) -> Callable[[PlantedRun, int, float, float], list[Any]]:
        return lambda run, step, begin, end: [span("agent_loop.tool_call", begin - seconds, end - 1, tool="python")]

    well, faulty = PlantedRun(tmp_path / "well"), PlantedRun(tmp_path / "faulty")
    well.elsewhere, faulty.elsewhere = tools(0), tools(0.4)
    faulty.gap["rollout.generate"] = 0.4
    assert not well.found("slow_tools")
    (finding,) = faulty.found("slow_tools")
    has_price(finding, 0.4)


def engine_steps(usage: float, waiting: int, preempted: int) -> Callable[..., list[Any]]:
    """Ten engine steps; in the first four, requests wait."""

    def steps(run: PlantedRun, rank: int, step: int, begin: float, end: float) -> list[Any]:
        length = (end - begin) / 10
        return [
            span(
                "engine.step", begin + at * length, begin + (at + 1) * length, running=8, kv_usage=usage,
                waiting=waiting if at < 4 else 0, preempted=preempted if at < 4 else 0,
            )
            for at in range(10)
        ]  # fmt: skip

    return steps


def test_kv_cache_too_small(tmp_path: Path) -> None:
    """If requests are preempted, the price is the share that waits of the time in which they do, which is the bound."""
    well, faulty, full = (PlantedRun(tmp_path / name) for name in ("well", "faulty", "full"))
    well.engine_more, faulty.engine_more = engine_steps(0.6, 3, 0), engine_steps(1.0, 3, 2)
    full.engine_more = engine_steps(1.0, 3, 0)
    assert not well.found("kv_cache")
    (finding,) = faulty.found("kv_cache")
    has_price(finding, 1.2 * 3 / (8 + 3))
    assert finding.bound_seconds == pytest.approx(1.2, rel=CLOSE)
    (bounded,) = full.found("kv_cache")
    assert bounded.seconds_per_step is None and bounded.bound_seconds == pytest.approx(1.2, rel=CLOSE)
    assert "none was preempted" in bounded.title and "6 were preempted" not in bounded.title


# ---------------------------------------------------------------- the weight sync


def test_wide_weights(tmp_path: Path) -> None:
    """Weights that are sent in twice the bytes that the engine holds cost half of the stages that move them."""

    def plant(run: PlantedRun) -> None:
        run.sent_bytes *= 2
        run.stages = {"gather": 0.3, "send": 0.3, "load": 0.4}

    finding = planted(tmp_path, "wide_weights", plant)
    has_price(finding, 0.5)
    assert finding.bytes == pytest.approx(16e9) and finding.evidence.phases == ["weight_sync"]
    assert finding.settings[0].program == "verl"


def test_engine_of_two_ranks_is_not_wide(tmp_path: Path) -> None:
    """An engine that spreads its weights over two ranks gets twice what each of them holds."""
    written = Written(tmp_path / "run")
    steps = [span("step", 10 * n, 10 * n + 9, step=n) for n in range(4)]
    written.process("d", *steps, role="driver", ended_s=50)
    for rank in range(2):
        device = {"host": "here", "uuid": f"GPU-{rank}"}
        syncs = [span("weight_sync", 10 * n + 1, 10 * n + 3) for n in range(4)]
        syncs += [span("weight_sync.send", 10 * n + 1, 10 * n + 2.5, bytes=4 * 10**9) for n in range(4)]
        engine = [sample("rollout.weights_bytes", 0.5, 2 * 10**9)]
        engine += [span("rollout.request", 10 * n + 4, 10 * n + 5, request_id=str(n)) for n in range(4) if rank == 0]
        written.process(f"w{rank}", *syncs, role="worker", rank=rank, device=device, ended_s=50)
        written.process(f"e{rank}", *engine, role="engine", rank=rank, device=device, ended_s=50)
    judged = why(analyse(written.read()))
    assert "wide_weights" in judged.nothing


def test_sender_waits(tmp_path: Path) -> None:
    """The stage in which the sender waits is priced."""

    def plant(run: PlantedRun) -> None:
        run.stages = {"gather": 0.3, "send": 0.2, "wait": TWO_PERCENT, "load": 0.3}

    assert "sender_waits" in [one.id for one in PlantedRun(tmp_path / "well").judge().unjudged]
    faulty = PlantedRun(tmp_path / "faulty")
    plant(faulty)
    (finding,) = faulty.found("sender_waits")
    has_price(finding, TWO_PERCENT)


def test_gathered_one_by_one(tmp_path: Path) -> None:
    """As many gathers as tensors are priced; a few are not."""

    def plant(run: PlantedRun) -> None:
        run.gathers = 400
        run.stages = {"gather": TWO_PERCENT, "send": 0.4, "load": 0.3}

    has_price(planted(tmp_path, "one_by_one", plant), TWO_PERCENT)


def test_sync_in_no_stage(tmp_path: Path) -> None:
    """What of a sync is in no stage is priced."""

    def plant(run: PlantedRun) -> None:
        for rank in range(run.ranks):
            run.longer["weight_sync", rank] = lambda step: 0.4

    has_price(planted(tmp_path, "sync_in_no_stage", plant), 0.4)


@pytest.mark.parametrize(
    ("name", "seconds"), [("sync_in_no_stage", 0.8), ("sender_waits", 0.6), ("one_by_one", 0.6), ("wide_weights", 0.75)]
)
def test_sync_of_every_second_step(tmp_path: Path, name: str, seconds: float) -> None:
    """Where not every step syncs its weights, a step costs its share of a sync, and the step of a sync is shown."""
    run = PlantedRun(tmp_path / "run")
    run.sync_every = 2
    run.sent_bytes *= 2
    run.gathers = 400
    run.stages = {"gather": 0.6, "wait": 0.6, "load": 0.3}
    for rank in range(run.ranks):
        run.longer["weight_sync", rank] = lambda step: 0.8
    (finding,) = run.found(name)
    assert finding.seconds_per_step == pytest.approx(seconds / 2, rel=CLOSE)
    assert finding.bound_seconds is not None and finding.bound_seconds >= finding.seconds_per_step * 0.999
    assert finding.evidence.moment is not None and finding.evidence.moment.step in (2, 4, 6, 8)
    assert finding.evidence.steps == [2, 4, 6, 8]


# ---------------------------------------------------------------- the driver, and Python


def test_garbage_collection(tmp_path: Path) -> None:
    """Collections of one worker are priced, with its rank and the phase that they are in."""

    def collect(run: PlantedRun, rank: int, step: int, begin: float, end: float) -> list[Any]:
        return [span("python.gc", begin + 1, begin + 1 + TWO_PERCENT)] if rank == 3 else []

    finding = planted(tmp_path, "garbage_collection", lambda run: run.more.update({"actor.update": collect}))
    has_price(finding, TWO_PERCENT)
    assert (finding.evidence.ranks, finding.evidence.phases) == ([3], ["actor.update"])


def test_driver_phases(tmp_path: Path) -> None:
    """A reward that the ranks wait for is priced."""
    finding = planted(
        tmp_path, "driver_phases", lambda run: run.longer.update({("reward", -1): lambda step: TWO_PERCENT})
    )
    has_price(finding, TWO_PERCENT + 0.02)
    assert finding.evidence.phases == ["reward"]


def test_between_phases(tmp_path: Path) -> None:
    """What the driver does between two phases is priced, and the phases are named."""
    finding = planted(tmp_path, "between_phases", lambda run: run.gap.update({"actor.update": TWO_PERCENT}))
    has_price(finding, TWO_PERCENT)
    assert "ref.log_prob → actor.update" in finding.title


def computes(name: str) -> Callable[[PlantedRun], None]:
    """A forward of each rank before it learns, in no phase, inside of a span of the program."""

    def plant(run: PlantedRun) -> None:
        def work(_run: PlantedRun, _rank: int, _step: int, begin: float, _end: float) -> list[Any]:
            return [span(name, begin - 0.95, begin - 0.1), span("model.forward", begin - 0.9, begin - 0.1)]

        run.gap["actor.old_log_prob"] = 1.0
        run.more["actor.old_log_prob"] = work

    return plant


def test_unlabelled_work(tmp_path: Path) -> None:
    """Work in no phase is priced where it runs; a reward is recognized, with how to mark it."""
    finding = planted(tmp_path, "unlabelled_work", computes("score_samples"))
    has_price(finding, 0.8)
    assert "score_samples" in finding.title and "reward → actor.old_log_prob" in finding.title
    assert 'with rltrace.phase("reward")' in finding.settings[0].change
    other = PlantedRun(tmp_path / "other")
    computes("pack")(other)
    (finding,) = other.found("unlabelled_work")
    assert 'with rltrace.phase("name")' in finding.settings[0].change


def test_unmarked_reward(tmp_path: Path) -> None:
    """Time in a reward function that nobody marked is named, and how to mark it; also where nothing shows its work."""
    steps = [span("step", 2 * n, 2 * n + 1.9, step=n) for n in range(9)]
    generated = [span("rollout.generate", 2 * n, 2 * n + 0.8) for n in range(9)]
    learned = [span("actor.update", 2 * n + 1.2, 2 * n + 1.9) for n in range(9)]
    written = Written(tmp_path / "run").process("p", *steps, *generated, *learned, role="main", ended_s=18)
    (finding,) = [one for one in why(analyse(written.read())).findings if one.id == "between_phases"]
    assert "rollout.generate → actor.update 0.40 s" in finding.title
    assert finding.evidence.facts[0].startswith("a reward function may run there")
    assert 'with rltrace.phase("reward")' in finding.settings[0].change


# ---------------------------------------------------------------- steps


def test_slow_step_among_uneven_ones(tmp_path: Path) -> None:
    """One step in which nothing computes for long is named though steps differ by more than that."""

    def uneven(run: PlantedRun) -> None:
        run.longer["actor.update", 2] = lambda step: 2.5 * (step * 7 % 5)

    def plant(run: PlantedRun) -> None:
        uneven(run)
        run.gap_in["actor.update", 5] = 5.0

    well = PlantedRun(tmp_path / "uneven", steps=12)
    uneven(well)
    assert not well.found("slow_steps")
    finding = planted(tmp_path, "slow_steps", plant, steps=12)
    assert finding.title.startswith("In step 5 nothing computes for 5.0")
    assert finding.seconds_per_step == pytest.approx(5.0 / 11, rel=CLOSE) and finding.evidence.steps == [5]


def test_slow_step(tmp_path: Path) -> None:
    """One slow step is named, with its phase and its rank."""

    def plant(run: PlantedRun) -> None:
        run.longer["actor.update", 2] = lambda step: 8.0 if step == 5 else 0.0

    finding = planted(tmp_path, "slow_steps", plant)
    has_price(finding, 1.0)  # 8 s in one of eight
    assert finding.evidence.steps == [5] and finding.evidence.ranks == [2]
    assert finding.evidence.moment is not None and finding.evidence.moment.step == 5


def test_one_slow_step_of_thousands(tmp_path: Path) -> None:
    """One slow step of 2,000 costs the others nothing, and is told with its number and what the run paid."""
    ends = [0.1 * (n + 1) + (0.5 if n >= 1234 else 0.0) for n in range(2000)]
    begins = [0.0, *ends[:-1]]
    steps = [span("step", begin, end, step=n) for n, (begin, end) in enumerate(zip(begins, ends, strict=True))]
    phases = [span("train", begin, end, phase=True) for begin, end in zip(begins, ends, strict=True)]
    written = Written(tmp_path / "run").process("w", *steps, *phases, role="worker", rank=0, ended_s=300)
    judged = why(analyse(written.read()))
    (finding,) = notable(judged)
    assert finding.id == "slow_steps" and finding.title.startswith("Step 1234 takes 0.50 s longer")
    assert finding.once_seconds == pytest.approx(0.5) and finding.seconds_per_step is None
    assert finding.evidence.moment is not None and finding.evidence.moment.step == 1234
    assert finding.evidence.steps == [1234]


def test_checkpoint(tmp_path: Path) -> None:
    """A checkpoint in some steps is priced over all of them."""

    def save(run: PlantedRun, rank: int, step: int, begin: float, end: float) -> list[Any]:
        return [span("save_checkpoint", end - 2, end)] if step in (3, 7) and rank == 0 else []

    finding = planted(tmp_path, "checkpoints_and_validation", lambda run: run.more.update({"actor.update": save}))
    assert finding.seconds_per_step == pytest.approx(0.5, rel=CLOSE)
    assert finding.evidence.steps == [3, 7]


def test_first_step(tmp_path: Path) -> None:
    """What the first step takes longer comes once, and after what each step pays."""
    finding = planted(tmp_path, "first_step", lambda run: setattr(run, "first", 20.0))
    assert finding.once_seconds == pytest.approx(20, rel=CLOSE) and finding.seconds_per_step is None
    assert "actor.update by 20" in " ".join(finding.evidence.facts)


def startups(folder: Path, seconds: float) -> list[Finding]:
    """What is found in a run with a start-up of this length, half of which is a phase."""
    written = Written(folder)
    steps = [span("step", seconds + 10 * n, seconds + 10 * n + 9, step=n) for n in range(3)]
    written.process("d", span("python", 0, seconds), *steps, role="driver", ended_s=seconds + 30)
    written.process("w", span("actor.shard", 0, seconds / 2), role="worker", rank=0, ended_s=seconds + 30)
    return [one for one in why(analyse(written.read())).findings if one.id == "startup"]


def test_startup(tmp_path: Path) -> None:
    """A start-up that takes a notable part of the run is told, with what it goes to."""
    (finding,) = startups(tmp_path / "run", 60)
    assert finding.once_seconds == 60 and finding.evidence.phases == ["actor.shard"]


def test_one_is_singular(tmp_path: Path) -> None:
    """What is one of its kind is not written as several."""
    assert [counted(many, "place") for many in (0, 1, 1000)] == ["0 places", "1 place", "1,000 places"]
    written = Written(tmp_path / "run").process(
        "d", span("step", 0, 9, step=0), span("step", 10, 19, step=1), ended_s=20
    )
    (reason,) = [one.reason for one in why(analyse(written.read())).unjudged if one.id == "slow_steps"]
    assert reason.startswith("1 steady step is too few")


def test_short_startup_is_not_told(tmp_path: Path) -> None:
    """A start-up below a second is no finding, whatever its share of a short run."""
    assert not startups(tmp_path / "short", 0.9) and startups(tmp_path / "long", 1.4)


def test_command_is_for_a_shell(tmp_path: Path) -> None:
    """The command of a finding shows the moment as it stands, in a folder with any name."""
    folder = tmp_path / "my run's"
    (finding,) = startups(folder, 1.4)
    assert finding.evidence.moment is not None
    *command, end = shlex.split(finding.evidence.moment.command)
    assert command == ["rltrace", "view", str(folder), "--time"] and seconds(end).end == 1.4


# ---------------------------------------------------------------- all of them


def test_well_run_has_no_finding(tmp_path: Path) -> None:
    """A run without a fault has nothing to report that a step pays, and says what it could not judge, and why."""
    judged = PlantedRun(tmp_path / "run").judge()
    assert [finding.id for finding in judged.findings if finding.seconds_per_step] == []
    assert all(one.reason for one in judged.unjudged)
    told = {one.id for one in judged.findings} | set(judged.nothing) | {one.id for one in judged.unjudged}
    assert told == set(plugins.FINDINGS)


@pytest.mark.parametrize("records", [[], [span("work", 0, 1)], [span("step", 0, 5, step=0)], [span("step", 0, None)]])
def test_little_is_enough(tmp_path: Path, records: list[Any]) -> None:
    """Nothing fails without steps, ranks or GPUs: what cannot be judged says what it needs."""
    judged = why(analyse(Written(tmp_path / "run").process("p", *records, role="worker", ended_s=9).read()))
    assert not [one for one in judged.unjudged if "it failed" in one.reason]
    assert len(judged.unjudged) + len(judged.nothing) >= len(plugins.FINDINGS) - 1


def test_findings_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finding that fails is told as not judged, and takes no other along."""
    monkeypatch.setitem(plugins.FINDINGS, "broken", "operator:add")
    judged = PlantedRun(tmp_path / "run").judge()
    (broken,) = [one for one in judged.unjudged if one.id == "broken"]
    assert broken.reason.startswith("it failed: TypeError")
    assert "slow_rank" in judged.nothing


def test_interval_of_some_steps() -> None:
    """The interval is Student's, and one step has none."""
    assert interval_of([1.0]) is None
    interval = interval_of([1.0, 2.0, 3.0])
    assert interval is not None
    assert (interval.least, interval.most) == (0.0, pytest.approx(2 + 4.303 / 3**0.5))
    assert [confidence_of("measured", interval), confidence_of("modelled", None)] == ["medium", "low"]


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0, "0 s"), (2e-6, "2 µs"), (0.0055, "5.5 ms"), (0.0996, "0.10 s"), (24.84, "24.8 s"), (1234, "1,234 s")],
)  # fmt: skip
def test_lengths_keep_digits(seconds: float, written: str) -> None:
    """No length is rounded to nothing, and none has digits that say nothing."""
    assert as_text(seconds) == written


def test_ranges_have_one_unit() -> None:
    """Both ends of a range are in the unit of the longer one."""
    assert [between_as_text(0.009, 0.016), between_as_text(0.05, 0.51)] == ["9.0-16 ms", "0.05-0.51 s"]


def test_shipped_recording_of_verl() -> None:
    """What people read out of verl's run by hand is said unaided, with the figures of docs/measurements/verl_8b.md."""
    found = {one.id: one for one in why_of(VERL).findings}
    assert found["wide_weights"].title == "Each rank sends 30.5 GiB of weights where the engine holds 15.4 GiB"
    assert found["garbage_collection"].share == pytest.approx(0.011, abs=0.0005)
    assert found["offloaded_layers"].evidence.figures["crossings"] == 8
    assert found["offloaded_layers"].seconds_per_step == pytest.approx(2.013 - 1.147, abs=0.002)
    assert found["first_step"].title.endswith("24.8 s of them idle before rollout.generate")
    assert "ray.deserialize" in " ".join(found["first_step"].evidence.facts)
    assert "400 gathers for 399 tensors" in found["one_by_one"].evidence.facts[0]
    slow = [one for one in why_of(VERL).findings if one.id == "slow_rank"]
    assert {tuple(one.evidence.phases) for one in slow} == {("rollout.generate",), ("ref.log_prob",)}
    changes = " ".join(setting.change for one in slow for setting in one.settings)
    assert "balance_batch" not in changes and "tokens" not in changes, "verl has evened them out"


def test_shipped_recording_of_the_reference_run() -> None:
    """What docs/measurements/8b.md says of the slow host is said unaided: its step waits for the workers' Python."""
    judged = why_of(QWEN)
    (finding,) = [one for one in judged.findings if one.id == "launch_bound"]
    assert finding.evidence.phases == ["actor.update", "actor.old_log_prob", "ref.log_prob"]
    assert finding.seconds_per_step == pytest.approx(1.38, abs=0.01)
    assert finding.evidence.facts[0].startswith("actor.update: a forward takes 0.24 s to launch and 0.23 s to run")


def test_documented() -> None:
    """Each finding has a row in docs/findings.md."""
    page = (RECORDINGS.parents[1] / "docs" / "findings.md").read_text()
    assert [name for name in plugins.FINDINGS if f"\n| `{name}` |" not in page] == []


SOURCES = sorted(Path(findings.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.stem)
def test_thresholds_say_where_they_come_from(file: Path) -> None:
    """Each number that a finding is judged by has a docstring, and what that cites of the repository exists."""
    text = file.read_text()
    body = ast.parse(text).body
    numbers = [
        (node, behind)
        for node, behind in pairwise([*body, ast.Pass()])
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.BinOp)
        if isinstance(node.value, ast.BinOp) or isinstance(node.value.value, int | float)
    ]
    for node, behind in numbers:
        assert isinstance(behind, ast.Expr), ast.unparse(node)
    root = RECORDINGS.parents[1]
    cited = re.findall(r"\b(?:docs|rltrace|examples)/[\w/]+\.(?:md|py|zip)", text)
    assert [path for path in cited if not (root / path).exists()] == []
