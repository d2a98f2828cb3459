"""The figures of a Recording whose events and times are known."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from recordings import SECOND, Written, hook, sample, span, two_ranks, two_workers
from rich.console import Console

from rltrace import events
from rltrace.analysis import Summary, summarize
from rltrace.analysis.clocks import TimeLine
from rltrace.analysis.host_memory import NOT_RECORDED
from rltrace.analysis.phases import RankStep
from rltrace.analysis.summary import analyse
from rltrace.cli.tables import show
from rltrace.cli.tables.memory import host_memory_table
from rltrace.cli.tables.problems import problems
from rltrace.host import clock
from rltrace.read.recording import Recording
from rltrace.record import clock_readings, manifest
from rltrace.record.process import append_exit

MYSELF: dict[str, Any] = {"pid": os.getpid(), "start_ticks": manifest.started_ticks(os.getpid())}
"""Identity of a process that is alive: this one."""


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    return summarize(two_ranks(tmp_path / "run").read())


def seconds(row: RankStep) -> dict[str, float]:
    return {name: round(share.seconds, 6) for name, share in row.phases.items() if share.seconds}


def test_steps_have_times_and_rewards(summary: Summary) -> None:
    """Steps have their times and their rewards."""
    assert [(step.step, step.start_seconds, step.end_seconds, step.reward_mean) for step in summary.steps] == [
        (0, 10.0, 20.0, 0.25),
        (1, 20.0, 30.0, 0.5),
    ]


def test_late_arguments_beat_samples(tmp_path: Path) -> None:
    """What a step was told late wins over its samples."""
    step = span("step", 0, 4, step=7, reward_mean=0.75, tokens=100, loss=0.5)
    written = Written(tmp_path / "run").process("d", sample("reward_mean", 3, 0.1), step, role="driver", ended_s=4)
    (figures,) = summarize(written.read()).steps
    assert (figures.step, figures.reward_mean, figures.tokens, figures.tokens_per_second) == (7, 0.75, 100, 25)
    assert figures.figures == {"loss": 0.5}


def test_step_has_drivers_samples(tmp_path: Path) -> None:
    """A step has the driver's samples that lie in it, and no flags."""
    written = Written(tmp_path / "run")
    samples = [sample("loss", 3, 0.25), sample("reward_mean", 1, 0.9), sample("lr", 9, 1)]
    written.process("d", *samples, span("step", 2, 4, step=0, is_last=True, norm=2), role="driver", ended_s=10)
    written.process("w", sample("of_a_worker", 3, 1), role="worker", rank=0, ended_s=10)
    (figures,) = summarize(written.read()).steps
    assert figures.figures == {"loss": 0.25, "norm": 2}
    assert figures.reward_mean is None, "it was of a time before the step"


def test_overlapping_steps_are_cut(tmp_path: Path) -> None:
    """If steps overlap, one ends where the next begins."""
    steps = [span("step", 0, 6, step=0), span("step", 4, 10, step=1)]
    written = Written(tmp_path / "run").process("d", *steps, span("advantage", 3, 5), role="driver", ended_s=10)
    found = {row.step: row for row in summarize(written.read()).phases}
    assert [(found[step].seconds, seconds(found[step])["advantage"]) for step in (0, 1)] == [(4, 1), (6, 1)]


def test_driver_does_not_wait_for_itself(tmp_path: Path) -> None:
    """The driver does not wait for itself even if another process works for it."""
    written = Written(tmp_path / "run")
    written.process("d", span("step", 0, 10, step=0), span("advantage", 5, 6), role="driver", ended_s=10)
    written.process("r", span("reward", 3, 4), role="rewarder", ended_s=10)
    written.process("w", span("actor.update", 7, 9), role="worker", rank=0, ended_s=10)
    rows = {row.lane: seconds(row) for row in summarize(written.read()).phases if row.step == 0}
    assert rows["driver"] == {"advantage": 1, "idle": 9}
    assert rows["rank 0"] == {"actor.update": 2, "wait.driver": 2, "idle": 6}


def test_devices_of_one_name(
    tmp_path: Path,
) -> None:
    """Devices of one name on two hosts are two; a process that names none is on its rank's first device."""
    written = Written(tmp_path / "run")
    for rank, host in enumerate("ab"):
        device = {"host": host, "uuid": "cpu-0"}
        written.process(f"w{rank}", span("actor.update", 1, 2), role="worker", rank=rank, host=host, device=device)
    late = {"host": "a", "uuid": "cpu-9"}
    written.process("x", span("ref.log_prob", 3, 4), role="helper", rank=0, host="a", device=late, start_ns=SECOND)
    written.process("e", span("rollout.generate", 5, 6), role="engine", rank=0, host="a", start_ns=2 * SECOND)
    rows = [(row.lane, row.host, row.device, sorted(seconds(row))) for row in summarize(written.read()).phases]
    assert sorted(rows) == [
        ("rank 0", "a", "cpu-0", ["actor.update", "idle", "rollout.generate", "start-up"]),
        ("rank 0", "a", "cpu-9", ["idle", "ref.log_prob", "start-up"]),
        ("rank 1", "b", "cpu-0", ["actor.update", "idle", "start-up"]),
    ]


def test_rank_on_two_hosts_has_no_host(tmp_path: Path) -> None:
    """A rank whose processes name no device and run on two hosts has no host."""
    written = Written(tmp_path / "run")
    for host in "ab":
        written.process(host, span(f"phase.{host}", 1, 2, phase=True), role="worker", rank=0, host=host)
    (row,) = summarize(written.read()).phases
    assert (row.lane, row.host, row.device) == ("rank 0", None, None)


def test_unknown_bytes_are_left_out(tmp_path: Path) -> None:
    """Unknown bytes are left out.

    Not a number is no peak, and infinitely many bytes of a bucket are none.
    """
    events_ = [sample("actor.params_bytes", 1, 7), sample("actor.params_bytes", 2, float("nan"))]
    events_ += [span("weight_sync", 3, 5), span("weight_sync.send", 3, 4, bytes=float("inf"))]
    written = Written(tmp_path / "run").process("w", *events_, role="worker", rank=0, ended_s=6)
    summary = summarize(written.read())
    assert summary.memory[0].owner_peaks["actor.params"].bytes == summary.memory[0].peak_bytes == 7
    assert [sync.stages["weight_sync.send"].bytes for sync in summary.weight_sync] == [0]


@pytest.mark.parametrize(("was_stopped", "complete"), [(False, True), (True, False)])
def test_stopped_run_is_not_complete(tmp_path: Path, was_stopped: bool, complete: bool) -> None:
    """A run in which a process was stopped is not complete."""
    written = Written(tmp_path / "run").process("d", span("step", 0, 1), role="driver", ended_s=2)
    written.process("w", span("actor.update", 0, 1), role="worker", rank=0)
    append_exit(written.folder / "processes" / "w", end_ns=SECOND, killed_by=None, was_stopped=was_stopped)
    assert summarize(written.read()).complete is complete


@pytest.mark.parametrize(("who", "is_live"), [(MYSELF, True), ({}, False)])
def test_live_while_a_process_is(tmp_path: Path, who: dict[str, Any], is_live: bool) -> None:
    """A run is live while one of its processes is."""
    written = Written(tmp_path / "run").process("d", span("step", 0, 1), role="driver", ended_s=2)
    run = summarize(written.process("w", span("actor.update", 0, 1), role="worker", **who).read()).run
    assert run.is_live is is_live
    assert run.created_unix_seconds == pytest.approx(time.time(), abs=3600)


def test_lane_of_worker_and_engine(summary: Summary) -> None:
    """A rank's lane is assembled from its worker and its engine."""
    rows = {(row.lane, row.step): row for row in summary.phases}
    assert seconds(rows["rank 0", 0]) == {
        "weight_sync": 2, "rollout.generate": 2, "actor.update": 3, "wait.driver": 1, "idle": 2,
    }  # fmt: skip
    assert seconds(rows["rank 1", 1])["rollout.generate"] == 2.5
    assert seconds(rows["rank 1", 1])["idle"] == 1.5


def test_start_up_is_its_own_block(summary: Summary) -> None:
    """The start-up is a block of its own."""
    startup = [row for row in summary.phases if row.step is None and row.rank == 0]
    assert [seconds(row) for row in startup] == [{"actor.build": 3, "rollout.load": 2, "start-up": 1, "idle": 4}]


def test_driver_work_on_own_lane(summary: Summary) -> None:
    """Work of the driver is on its own lane."""
    driver = [row for row in summary.phases if row.lane == "driver" and row.step == 0]
    assert [seconds(row) for row in driver] == [{"reward": 1, "idle": 9}]


def test_overlapping_phases_are_reported(tmp_path: Path) -> None:
    """Overlapping phases of a rank are reported with both names."""
    records = [span("actor.update", 0, 6), span("rollout.generate", 4, 8), span("step", 0, 10, step=0)]
    written = Written(tmp_path / "run").process("p", *records, role="worker", rank=0, ended_s=10)
    row = next(row for row in summarize(written.read()).phases if row.step == 0)
    assert row.overlap_seconds == 2
    assert [(overlap.phases, overlap.seconds) for overlap in row.overlaps] == [
        (("rollout.generate", "actor.update"), 2)
    ]
    assert sum(seconds(row).values()) - row.overlap_seconds == row.seconds


def test_phase_is_cut_between_steps(tmp_path: Path) -> None:
    """A phase across two steps is cut where they meet."""
    records = [span("actor.update", 5, 15), span("step", 0, 10, step=0), span("step", 10, 20, step=1)]
    written = Written(tmp_path / "run").process("p", *records, role="worker", rank=0, ended_s=20)
    rows = summarize(written.read()).phases
    assert [seconds(row)["actor.update"] for row in rows if row.step is not None] == [5, 5]


def test_program_without_steps_is_one_block(tmp_path: Path) -> None:
    """A program without steps is one block."""
    records = [span("my.phase", 1, 3, phase=True), span("other", 0, 4)]
    summary = summarize(Written(tmp_path / "run").process("p", *records, role="main", ended_s=4).read())
    assert summary.steps == []
    assert [(row.step, row.seconds, seconds(row)) for row in summary.phases] == [
        (None, 4, {"my.phase": 2, "start-up": 1, "idle": 1})
    ]


def test_an_empty_recording_has_empty_figures(tmp_path: Path) -> None:
    summary = summarize(Written(tmp_path / "run").read())
    assert (summary.steps, summary.phases, summary.processes, summary.complete) == ([], [], [], False)


def test_sync_counts_overlaps_once(summary: Summary) -> None:
    """A sync counts overlapping buckets once and gives the sum too."""
    sync = next(sync for sync in summary.weight_sync if sync.rank == 0 and sync.step == 0)
    send = sync.stages["weight_sync.send"]
    assert (send.seconds, send.summed_seconds, send.spans, send.bytes) == (2.5, 3.0, 2, 2 * 10**9)
    assert send.gigabytes_per_second == 0.8
    assert (sync.seconds, sync.bytes, sync.buckets, sync.tensors) == (2, 2 * 10**9, 2, 6)
    assert sync.gigabytes_per_second == 1
    assert sync.rest_seconds == 0


def test_sync_rest_is_in_no_stage(tmp_path: Path) -> None:
    """The part of a sync that is in no stage is shown.

    What a stage does before the phase, and where two are at once, counts neither twice nor against the rest.
    """
    stages = [span("weight_sync.gather", 0.5, 2), span("weight_sync.send", 3, 5), span("weight_sync.wait", 4, 6)]
    apart = [span("weight_sync.send", 12, 13), span("weight_sync.send", 15, 16)]
    steps = [span("step", 0, 10, step=0), span("step", 10, 20, step=1)]
    written = Written(tmp_path / "run").process(
        "w", *steps, span("weight_sync", 1, 8), *stages, *apart, rank=0, ended_s=20
    )
    first, without_phase = summarize(written.read()).weight_sync
    assert (first.seconds, first.rest_seconds) == (7, 3)
    assert (without_phase.seconds, without_phase.rest_seconds) == (4, 2)


@pytest.mark.parametrize("name", ["allocator.empty_cache", "actor.state_dict"])
def test_what_is_a_stage_inside_of_a_sync(tmp_path: Path, name: str) -> None:
    """Emptying the cache and naming the parameters are stages inside of a sync, and no part of one outside of it.

    The sync is interrupted by a wake-up.
    """
    pieces = [span("weight_sync", 1, 3), span("rollout.wake_weights", 3, 4), span("weight_sync", 4, 8)]
    stages = [span(name, 1, 3), span("weight_sync.merge", 4, 5), span("weight_sync.load", 5, 8)]
    records = [span("step", 0, 10, step=0), *pieces, *stages, span(name, 8.5, 9.5)]
    hooks = (hook(1, "a:b", emits=[name]),)
    written = Written(tmp_path / "run").process("w", *records, rank=0, ended_s=10, hooks=hooks)
    (sync,) = summarize(written.read()).weight_sync
    seconds = {name: stage.seconds for name, stage in sync.stages.items()}
    assert seconds == {name: 2, "weight_sync.merge": 1, "weight_sync.load": 3}
    assert (sync.seconds, sync.rest_seconds) == (6, 0)


def test_loaded_counts_if_sent_is_unknown(tmp_path: Path) -> None:
    """If no span says what was sent, what was loaded counts.

    An engine whose trainer is not traced, or has no hooks.
    """
    loads = [span("weight_sync.load", at, at + 1, bytes=50, tensors=3) for at in (1, 3)]
    written = Written(tmp_path / "run").process("e", *loads, span("step", 0, 10, step=0), rank=0, ended_s=10)
    (sync,) = summarize(written.read()).weight_sync
    assert (sync.bytes, sync.buckets, sync.tensors) == (100, 2, 6)


def test_device_peak_is_of_the_sum(summary: Summary) -> None:
    """A device's peak is that of the sum over its processes."""
    memory = next(device for device in summary.memory if device.rank == 0)
    assert memory.peak_bytes == 500
    assert memory.at_peak_bytes == {"actor.params": 100, "actor.grads": 0, "rollout.kv_cache": 400}
    assert (memory.peak_at_seconds, memory.peak_step, memory.peak_phase) == (12, 0, "rollout.generate")
    assert (memory.owner_peaks["actor.grads"].bytes, memory.owner_peaks["actor.grads"].phase) == (50, "actor.update")


def edge(start_s: float, end_s: float, total_bytes: int = 900) -> list[list[Any]]:
    """The sampling of a phase's edge, by the process with the pid 9."""
    return span("memory.edge", start_s, end_s, totals={"9": total_bytes}, cpu_ns={"9": 0})


def test_sliver_does_not_take_the_peak(tmp_path: Path) -> None:
    """A sliver of a phase does not take the peak of the phase before it.

    verl's `weight_sync` goes on for a millisecond behind `rollout.wake_kv_cache`: the cache is back already.
    """
    records = [
        span("weight_sync", 1, 2), edge(2.0001, 2.0002), sample("weight_sync.bucket_bytes", 2.0002, 100),
        span("rollout.wake_kv_cache", 2.0003, 3), edge(3.0001, 3.0002), sample("rollout.kv_cache_bytes", 3.0002, 500),
        span("weight_sync", 3, 3.002),
        span("advantage", 5, 5.001), edge(5.0012, 5.0013), sample("actor.grads_bytes", 5.0013, 30),
    ]  # fmt: skip
    written = Written(tmp_path / "run").process("w", *records, role="worker", rank=0, pid=9, ended_s=6)
    (memory,) = summarize(written.read()).memory
    held = {moment.phase: moment.bytes["rollout.kv_cache"] for moment in memory.phases}
    assert held == {"weight_sync": 0, "rollout.wake_kv_cache": 500, "advantage": 500}, "one that is never longer stays"
    assert memory.owner_peaks["rollout.kv_cache"].phase == "rollout.wake_kv_cache"
    assert [found.phase for found in memory.boundaries].count("weight_sync") == 4, "all edges are judged"


@pytest.mark.parametrize("edge_s", [1.9996, 2.0001], ids=["before it begins", "in it"])
def test_freed_memory_was_there_at_begin(tmp_path: Path, edge_s: float) -> None:
    """Memory that a phase frees was there when the phase began.

    On whichever side of its beginning the sample of that edge lies.
    """
    records = [
        span("rollout.generate", 1, edge_s), sample("rollout.kv_cache_bytes", 1.5, 500),
        edge(edge_s, edge_s + 0.0002), sample("nccl_bytes", edge_s + 0.0002, 7),
        span("rollout.sleep", 2, 3), edge(3.0001, 3.0002, 400), sample("rollout.kv_cache_bytes", 3.0002, 0),
    ]  # fmt: skip
    written = Written(tmp_path / "run").process("w", *records, role="worker", rank=0, pid=9, ended_s=6)
    (memory,) = summarize(written.read()).memory
    held = {moment.phase: moment.bytes["rollout.kv_cache"] for moment in memory.phases}
    assert held == {"rollout.generate": 500, "rollout.sleep": 500}


@pytest.mark.parametrize(
    ("start_s", "end_s", "phase"),
    [
        (2.001, 2.004, "actor.update"),
        (2.001, 2.040, "actor.update"),
        (2.030, 2.040, None),
        (0.950, 0.998, "actor.update"),
        (0.500, 0.600, None),
    ],
    ids=["ended", "ended, a busy machine", "later", "begins", "before"],
)
def test_boundary_sample_belongs_to_phase(tmp_path: Path, start_s: float, end_s: float, phase: str | None) -> None:
    """A sample belongs to the phase at whose boundary it was taken.

    Also one that took longer than 5 ms.
    """
    records = [span("actor.update", 1, 2), edge(start_s, end_s), sample("allocator.cached_bytes", end_s, 100)]
    written = Written(tmp_path / "run").process("w", *records, role="worker", rank=0, pid=9, ended_s=6)
    (memory,) = summarize(written.read()).memory
    assert memory.owner_peaks["allocator.cached"].phase == memory.peak_phase == phase


def test_free_bytes_are_nobodys(tmp_path: Path) -> None:
    samples = [sample("actor.params_bytes", 1, 10), sample("free_bytes", 1, 90)]
    samples += [sample("nccl_bytes", 2, 5), sample("free_bytes", 2, 80)]
    (memory,) = summarize(Written(tmp_path / "run").process("p", *samples, rank=0, ended_s=3).read()).memory
    assert memory.peak_bytes == 15
    assert memory.at_peak_bytes == {"actor.params": 10, "nccl": 5, "free": 80}


def test_ended_process_holds_nothing(tmp_path: Path) -> None:
    """The bytes of an ended process are gone."""
    written = Written(tmp_path / "run").process("a", sample("rollout.weights_bytes", 1, 60), rank=0, ended_s=2)
    written.process("b", sample("actor.params_bytes", 3, 70), rank=0, ended_s=4)
    (memory,) = summarize(written.read()).memory
    assert memory.at_peak_bytes == {"actor.params": 70, "rollout.weights": 0}


def test_open_spans_end_with_their_process(tmp_path: Path) -> None:
    """A phase and a step that a killed process left open end when it was gone, and not with the run."""
    written = Written(tmp_path / "run").process("alive", span("reward", 0, 9), rank=0, role="trainer", ended_s=9)
    dead = [span("step", 0, 1, step=0), span("step", 1, None, step=1), span("actor.update", 1, None)]
    written.process("dead", *dead, rank=1, role="trainer")
    append_exit(written.folder / "processes" / "dead", end_ns=2 * SECOND, killed_by=9, was_stopped=False)
    seen, _, summary = analyse(written.read())
    (process,) = [process for process in seen.processes if process.process.key == "dead"]
    assert process.phases["actor.update"].rows(seen.end_ns).tolist() == [[SECOND, 2 * SECOND]]
    assert [step.seconds for step in summary.steps] == [1.0, 1.0]


def test_process_tree_by_key_then_pid(tmp_path: Path) -> None:
    """The tree of processes is by key, and else by pid."""
    written = Written(tmp_path / "run").process("driver", role="driver", pid=500, ended_s=9)
    written.process("worker", role="worker", rank=0, pid=501, parent="driver", ended_s=9)
    written.process("helper", role="helper", pid=502, ppid=501, start_ns=SECOND, ended_s=9)
    parents = {process.key: process.parent for process in summarize(written.read()).processes}
    assert parents == {"driver": None, "worker": "driver", "helper": "worker"}


def test_gone_without_end_died(tmp_path: Path) -> None:
    """A process that is gone without an end died."""
    written = Written(tmp_path / "run").process("gone", role="worker", rank=1)
    written.process("ended", ended_s=1).process("elsewhere", host="another-host")
    written.process("here", **MYSELF)
    states = {process.key: process.state for process in summarize(written.read()).processes}
    assert states == {"gone": "died", "ended": "ended", "elsewhere": "unknown", "here": "alive"}


@pytest.mark.parametrize(("others", "complete"), [(("ended", "gone"), True), (("gone", "killed"), False)])
def test_unwatched_process_is_gone(tmp_path: Path, others: tuple[str, ...], complete: bool) -> None:
    """If nobody watched, a process that is gone while idle is not said to have died, and nothing is missing."""
    written = Written(tmp_path / "run", owner="ended").process("ended", ended_s=1).process("gone")
    if "killed" in others:
        written.process("killed")
        append_exit(written.folder / "processes" / "killed", end_ns=SECOND, killed_by=9, was_stopped=False)
    summary = summarize(written.read())
    states = {process.key: process.state for process in summary.processes}
    assert states == {"ended": "ended", "gone": "gone"} | ({"killed": "died"} if "killed" in others else {})
    assert summary.complete is complete


@pytest.mark.parametrize("owner", ["before", None])
def test_exec_is_no_death(tmp_path: Path, owner: str | None) -> None:
    """A process that went on as another program did not die."""
    written = Written(tmp_path / "run", owner=owner)
    written.process("before", span("prepare", 1, None), start_ticks=7)
    written.process("after", span("train", 4, 5), start_ticks=7, start_ns=3 * SECOND, ended_s=6)
    written.process("other", start_ticks=8, start_ns=4 * SECOND, ended_s=6)
    summary = summarize(written.read())
    assert {process.state for process in summary.processes} == {"ended"} and summary.complete
    (found,) = summary.open_spans
    assert (found.name, found.open_seconds, found.is_at_least) == ("prepare", 2, False), "until the other one began"


def test_supervisor_counts_after_exec(tmp_path: Path) -> None:
    """What a supervisor saw counts, whatever program followed."""
    written = Written(tmp_path / "run").process("before", start_ticks=7)
    written.process("after", start_ticks=7, start_ns=3 * SECOND)
    for key in ("before", "after"):
        append_exit(written.folder / "processes" / key, end_ns=5 * SECOND, killed_by=9, was_stopped=False)
    assert [process.state for process in summarize(written.read()).processes] == ["died", "died"]


def test_reused_pid_is_not_alive(tmp_path: Path) -> None:
    """A pid that was given to another process is not the one that recorded."""
    written = Written(tmp_path / "run").process("old", **MYSELF | {"start_ticks": MYSELF["start_ticks"] - 1})
    assert summarize(written.read()).processes[0].state == "died"


def test_calls_by_choice_are_not_missed(tmp_path: Path) -> None:
    """A hook on a call that a program makes or does without is not missed when it never fired."""
    hooks = (
        hook(1, "dist:all_gather", emits=["dist.all_gather"]),
        hook(2, "fsdp:unshard", emits=["fsdp.unshard"]),
        hook(3, "m:f"),
    )
    written = Written(tmp_path / "run").process("worker", hooks=hooks)
    missed = {hook.target for hook in summarize(written.read()).hooks if hook.never_fired}
    assert missed == {"fsdp:unshard", "m:f"}


def test_hook_states(summary: Summary) -> None:
    """Hooks say what fired, what did not and what cannot."""
    hooks = {hook.target: hook for hook in summary.hooks}
    assert (hooks["m:Group.dispatch"].fired, hooks["m:Group.dispatch"].never_fired) == (8, False)
    assert hooks["m:Group.unused"].never_fired
    assert (hooks["torch:step"].state, hooks["torch:step"].reason) == ("skipped", "torch 1.0 is older than 2.11")
    assert not hooks["torch:offload"].never_fired
    assert "share one memory" in str(hooks["torch:offload"].not_applicable)


def test_hook_counts_over_processes(tmp_path: Path) -> None:
    """A hook is counted over all processes."""
    written = Written(tmp_path / "run").process("a", hooks=(hook(1, "m:f", fires=2),), ended_s=1)
    written.process("b", hooks=(hook(1, "m:f", fires=3),), ended_s=1)
    written.process("c", hooks=(hook(1, "m:f", "waiting", reason="m is not imported"),), ended_s=1)
    (figures,) = summarize(written.read()).hooks
    assert (figures.state, figures.fired, figures.processes) == ("installed", 5, {"installed": 2, "waiting": 1})


def test_open_spans_of_the_dead(tmp_path: Path) -> None:
    """Open spans of the dead are at least as old as their last event."""
    events = [span("actor.update", 10, None), sample("loss", 85, 1)]
    written = Written(tmp_path / "run").process("w", *events, role="worker", rank=1)
    written.process("d", span("step", 9, 90), role="driver", ended_s=95)
    (found,) = summarize(written.read()).open_spans
    assert (found.name, found.process, found.process_state, found.thread) == (
        "actor.update", "rank 1 worker", "died", "MainThread",
    )  # fmt: skip
    assert (found.open_seconds, found.is_at_least, found.is_stuck) == (75, True, False)


def test_open_spans_of_the_seen_dead(tmp_path: Path) -> None:
    """Open spans of a process that was seen to be gone age until then."""
    written = Written(tmp_path / "run").process("w", span("actor.update", 10, None), role="worker", rank=1)
    append_exit(tmp_path / "run" / manifest.PROCESSES / "w", end_ns=12 * SECOND, killed_by=9, was_stopped=False)
    written.process("d", span("step", 9, 90), role="driver", ended_s=95)
    (found,) = summarize(written.read()).open_spans
    assert (found.name, found.process_state, found.open_seconds) == ("actor.update", "died", 2)
    assert not found.is_at_least


def test_open_spans_of_the_living(tmp_path: Path) -> None:
    """Open spans of the living age until now."""
    now_ns = clock.now_ns()
    start_s = (now_ns - 100 * SECOND) / SECOND
    records = [span("rollout.generate", start_s, None), span("step", start_s + 90, None)]
    found = summarize(Written(tmp_path / "run").process("p", *records, **MYSELF).read()).open_spans
    assert [(span.name, span.process_state) for span in found] == [("rollout.generate", "alive"), ("step", "alive")]
    assert 100 <= found[0].open_seconds < 130


@pytest.mark.parametrize(
    ("ended_before_s", "stuck"), [(61, ["ray.get", "fsdp.all_gather"]), (20, [])], ids=["still", "going on"]
)
def test_stuck_while_the_run_stands_still(tmp_path: Path, ended_before_s: int, stuck: list[str]) -> None:
    """A thread is stuck if it waits while the whole run stands still.

    A step is open for as long as it takes; what is inside of it begins and ends.
    """
    now_s = clock.now_ns() / SECOND
    driver = [span("ray.call", now_s - 500, None), span("ray.get", now_s - 90, None)]
    worker = [span("actor.update", now_s - 80, None), span("fsdp.all_gather", now_s - 70, None)]
    written = Written(tmp_path / "run").process("d", *driver, **MYSELF)
    parent = {"pid": os.getppid(), "start_ticks": manifest.started_ticks(os.getppid())}
    written.process("w", *worker, sample("loss", now_s - 1, 1), **parent)
    written.process("e", span("engine.step", now_s - 75, now_s - ended_before_s), ended_s=now_s - ended_before_s)
    found = summarize(written.read()).open_spans
    assert [one.name for one in found if one.is_stuck] == stuck


def test_open_step_lasts_to_last_event(tmp_path: Path) -> None:
    """An open step lasts until the last event."""
    records = [span("step", 0, 10, step=0), span("reward", 12, 14), span("step", 10, None, step=1)]
    steps = summarize(Written(tmp_path / "run").process("d", *records, role="driver").read()).steps
    assert [(step.end_seconds, step.seconds) for step in steps] == [(10, 10), (None, 4)]


def test_foreign_clock_is_marked(tmp_path: Path) -> None:
    """Another clock is shifted by real time and marked."""
    written = Written(tmp_path / "run").process("d", span("step", 0, 10, step=0), role="driver", ended_s=10)
    other = {"boot_id": "other", "start_ns": 1000 * SECOND, "monotonic_ns": 1000 * SECOND, "realtime_ns": 3 * SECOND}
    written.process("w", span("actor.update", 1001, 1005), role="worker", rank=0, host="far", ended_s=1006, **other)
    summary = summarize(written.read())
    assert summary.run.clock_domains == 2
    assert {process.key: process.clock_aligned for process in summary.processes} == {"d": True, "w": False}
    assert [(clock.is_reference, clock.aligned, clock.bound_seconds) for clock in summary.clocks] == [
        (True, True, 0),
        (False, False, None),
    ]
    row = next(row for row in summary.phases if row.rank == 0 and row.step == 0)
    assert seconds(row) == {"actor.update": 4, "start-up": 4, "idle": 1}
    assert not row.clock_aligned
    screen = Console(width=200, file=io.StringIO())
    show(summary, screen)
    assert "Clock of far: not aligned" in screen.file.getvalue()
    assert "the clock of rank 0 is not aligned" in screen.file.getvalue()


def test_foreign_clock_is_shifted_once(tmp_path: Path) -> None:
    """Everything that an unaligned clock wrote is shifted once.

    A sample, and a span that is open and of a kind that is kept; of who has no phases no rank's clock is doubted.
    """
    written = Written(tmp_path / "run").process("d", span("step", 0, 20, step=0), role="driver", ended_s=20)
    other = {"boot_id": "other", "start_ns": 1000 * SECOND, "monotonic_ns": 1000 * SECOND, "realtime_ns": 3 * SECOND}
    far = [sample("actor.params_bytes", 1002, 5), span("memory.out_of_memory", 1004, None, reason="none left")]
    written.process("e", *far, role="engine", rank=0, host="far", ended_s=1010, **other)
    written.process("w", span("actor.update", 1, 2), role="worker", rank=0, ended_s=20)
    summary = summarize(written.read())
    assert summary.memory[0].owner_peaks["actor.params"].at_seconds == 5
    assert [failure.at_seconds for failure in summary.out_of_memory] == [7]
    assert [row.clock_aligned for row in summary.phases if row.rank == 0 and row.step == 0] == [True]


def test_measured_clock_is_aligned(tmp_path: Path) -> None:
    """A measured clock is aligned, and its bound is given.

    The same two processes as above, with two exchanges: 2 ms round trips, the other clock 1000 ppm slow.
    """
    written = Written(tmp_path / "run").process("d", span("step", 0, 10, step=0), role="driver", ended_s=10)
    other = {"boot_id": "other", "start_ns": 1000 * SECOND, "monotonic_ns": 1000 * SECOND, "realtime_ns": 3 * SECOND}
    written.process("w", span("actor.update", 1001, 1005), role="worker", rank=0, host="far", ended_s=1006, **other)
    here, ms = clock.domain(), SECOND // 1000
    for true_ns, read_ns in ((0, 1000 * SECOND), (1000 * SECOND, 1999 * SECOND)):
        times = (true_ns - ms, read_ns, true_ns + ms)
        there = ("other", here["time_namespace"])
        line = clock_readings.line((here["boot_id"], here["time_namespace"]), there, times)
        with (written.folder / clock_readings.FILE).open("a") as file:
            file.write(line)
    summary = summarize(written.read())
    reference, far = summary.clocks
    assert (reference.is_reference, reference.bound_seconds, reference.offset_seconds) == (True, 0, None)
    assert (far.hosts, far.aligned, far.readings, far.offset_seconds) == (["far"], True, 2, -1000)
    assert far.drift_ppm == pytest.approx(1001, abs=0.1) and far.drift_error_ppm == pytest.approx(32, abs=0.1)
    assert far.bound_seconds == pytest.approx(0.001 + 15e-6 * 999 / 2, rel=0.01)
    assert {process.key: process.clock_bound_seconds for process in summary.processes}["d"] == 0
    row = next(row for row in summary.phases if row.rank == 0 and row.step == 0)
    assert row.clock_aligned and seconds(row)["actor.update"] == pytest.approx(4 * 1.001001, abs=1e-5)
    screen = Console(width=200, file=io.StringIO())
    show(summary, screen)
    assert "Clock of far: aligned within ±8." in screen.file.getvalue()


def far_clock(written: Written, *exchanges: tuple[int, int]) -> dict[str, str]:
    """Another boot's clock, read at such seconds of ours and its own, within a millisecond: whose a process is."""
    here, there, ms = clock.domain(), {**clock.domain(), "boot_id": "other"}, SECOND // 1000
    ours, its = ((said["boot_id"], said["time_namespace"]) for said in (here, there))
    with (written.folder / clock_readings.FILE).open("a") as file:
        for true_s, read_s in exchanges:
            file.write(clock_readings.line(ours, its, (true_s * SECOND - ms, read_s * SECOND, true_s * SECOND + ms)))
    return {"boot_id": "other", "host": "far"}


def test_clock_is_trusted_to_last_event(tmp_path: Path) -> None:
    """A clock is trusted as far as the process whose last event is latest."""
    written = Written(tmp_path / "run").process("d", span("step", 0, 10, step=0), role="driver", ended_s=10)
    far = far_clock(written, (0, 1000), (1000, 2000))
    for rank, ended_s in enumerate((2500, 2001, 2002)):
        written.process(f"w{rank}", role="worker", rank=rank, ended_s=ended_s, start_ns=1000 * SECOND, **far)
    found = summarize(written.read())
    bounds_s = {process.key: process.clock_bound_seconds for process in found.processes}
    assert found.clocks[1].bound_seconds == bounds_s["w0"] > max(bounds_s["w1"] or 0, bounds_s["w2"] or 0) > 0


def test_real_time_of_the_runs_host(tmp_path: Path) -> None:
    """Real time is that of the run's own host even if a process of another host began before."""
    written = Written(tmp_path / "run")
    far = far_clock(written, (0, 1000), (1000, 2000))
    written.process("w", role="worker", rank=0, start_ns=1000 * SECOND, realtime_ns=99 * SECOND, ended_s=1001, **far)
    written.process("d", role="driver", start_ns=5 * SECOND, realtime_ns=7 * SECOND, ended_s=10)
    assert TimeLine(written.read()).unix_offset_ns == 7 * SECOND


def test_present_of_a_run_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The present of a run on another host is told by real time."""
    written = Written(tmp_path / "run").process("d", role="driver", realtime_ns=7 * SECOND, ended_s=10)
    monkeypatch.setattr(time, "time_ns", lambda: 100 * SECOND)
    monkeypatch.setattr(clock, "now_ns", lambda: 50 * SECOND)
    assert TimeLine(written.read()).now_ns() == 50 * SECOND
    monkeypatch.setattr(clock, "domain", lambda: {"boot_id": "a reader's", "time_namespace": "its own"})
    assert TimeLine(written.read()).now_ns() == 93 * SECOND


def test_losses_name_their_process(tmp_path: Path) -> None:
    """Losses name the process that has them."""
    written = Written(tmp_path / "run").process("good", span("a", 0, 1), ended_s=1).process("bad", span("a", 0, 1))
    segment = written.folder / "processes" / "bad" / "000001.seg"
    segment.write_bytes(segment.read_bytes().rstrip(b"\0")[:-1] + bytes(64))
    (written.folder / "processes" / "bad" / "counts.u64").write_bytes((4).to_bytes(8, "little"))
    summary = summarize(written.read())
    assert [(loss.process_key, loss.lost_events, loss.torn_records) for loss in summary.losses] == [("bad", 4, 1)]
    assert (summary.lost_events, summary.complete) == (4, False)


def test_untraced_are_grouped(tmp_path: Path) -> None:
    """Processes that were not traced are grouped by command and reason."""
    written = Written(tmp_path / "run").process("good", span("a", 0, 1), ended_s=1)
    said = [(7, "-S", "no hook"), (8, "-S", "no hook"), (9, "-I", "no path")]
    lines = [json.dumps({"pid": pid, "command": ["python", option], "reason": why}) for pid, option, why in said]
    (written.folder / "untraced.jsonl").write_text("\n".join([*lines, '{"pid": 10, "comm']))
    found = summarize(written.read()).untraced
    assert [(item.command, item.reason, item.pids) for item in found] == [
        (["python", "-S"], "no hook", [7, 8]),
        (["python", "-I"], "no path", [9]),
    ]


def run_of_steps(folder: Path, *lengths_s: float, last: dict[str, str] | None = None) -> Summary:
    """A rank whose steps have these lengths, each filled by its update."""
    starts_s = [sum(lengths_s[:at]) for at in range(len(lengths_s))]
    records = [span("actor.update", start, start + length) for start, length in zip(starts_s, lengths_s, strict=True)]
    for number, (start, length) in enumerate(zip(starts_s, lengths_s, strict=True)):
        late = last if last is not None and number == len(lengths_s) - 1 else {}
        records.append(span("step", start, start + length, step=number, **late))
    written = Written(folder).process("w", *records, role="worker", rank=0, ended_s=sum(lengths_s))
    return summarize(written.read())


@pytest.mark.parametrize(
    ("lengths_s", "steps", "first", "mean_s", "median_s"),
    [
        ((9, 1, 2, 6), [1, 2, 3], 0, 3, 2),
        ((9, 1, 3), [1, 2], 0, 2, 2),
        ((9, 3), [1], 0, 3, 3),
        ((9,), [0], None, 9, 9),
    ],
)
def test_first_step_is_not_steady(
    tmp_path: Path, lengths_s: tuple[float, ...], steps: list[int], first: int | None, mean_s: float, median_s: float
) -> None:
    """The first step is no part of the steady one once another step is over."""
    found = run_of_steps(tmp_path / "run", *lengths_s).steady
    assert found is not None
    assert (found.steps, found.first_step) == (steps, first)
    (rank,) = found.lanes
    for spread in (found.seconds, rank.seconds, rank.phases["actor.update"]):
        assert (spread.mean_seconds, spread.median_seconds) == (mean_s, median_s)
        assert (spread.least_seconds, spread.most_seconds) == (
            min(lengths_s[step] for step in steps), max(lengths_s[step] for step in steps),
        )  # fmt: skip
    assert rank.phases["actor.update"].share == 1


def test_unrecorded_step_is_not_steady(tmp_path: Path) -> None:
    """A step that was not recorded is not steady."""
    steps = [span("step", 2 * n, 2 * n + 1, step=n, recorded=n != 2) for n in range(4)]
    found = summarize(Written(tmp_path / "run").process("d", *steps, role="driver", ended_s=9).read()).steady
    assert found is not None and found.steps == [1, 3]


def test_aborted_step_is_not_steady(tmp_path: Path) -> None:
    """A step that is aborted is not steady."""
    found = run_of_steps(tmp_path / "run", 9, 1, 3, 50, last={"error": "KeyboardInterrupt"}).steady
    assert found is not None
    assert (found.steps, found.unfinished_steps, found.seconds.mean_seconds) == ([1, 2], 1, 2)


def test_rankless_steps_are_each_ones_own(tmp_path: Path) -> None:
    """Each process without a rank has its own steps.

    What a process does is measured by its own steps, not by those that another happens to be in.
    """
    found = summarize(two_workers(tmp_path / "run").read())
    slow, quick = "slow 4", "quick 5"
    assert [(step.lane, step.step, step.seconds) for step in found.steps] == [
        *((slow, number, 10) for number in range(3)), *((quick, number, 4) for number in range(4))
    ]  # fmt: skip
    acted = {(row.lane, row.step): (row.seconds, row.phases["act"].seconds) for row in found.phases if row.step}
    assert acted == {(slow, 1): (10, 5), (slow, 2): (10, 5), **{(quick, number): (4, 2) for number in (1, 2, 3)}}
    assert found.steady is not None
    assert {lane.lane: lane.seconds.mean_seconds for lane in found.steady.lanes} == {slow: 10, quick: 4}
    assert (found.steady.seconds.least_seconds, found.steady.seconds.most_seconds) == (4, 10)
    assert {(own.role, own.share) for own in found.own_spans} == {("slow", 1 / 10), ("quick", 1 / 4)}


def test_steps_of_driver_or_rank_count(tmp_path: Path) -> None:
    """Steps of other processes are not the run's if a driver or a rank has some."""
    for number, leader in enumerate(({"role": "driver"}, {"rank": 0})):
        written = two_workers(tmp_path / str(number))
        written.process("leader", span("step", 0, 7, step=0), **leader, ended_s=7)
        assert [step.seconds for step in summarize(written.read()).steps] == [7]


def test_steady_phases_add_up(summary: Summary) -> None:
    """Phases of the steady step add up to it."""
    assert summary.steady is not None
    for lane in summary.steady.lanes:
        assert sum(part.mean_seconds for part in lane.phases.values()) == pytest.approx(lane.seconds.mean_seconds)
        assert sum(part.share for part in lane.phases.values()) == pytest.approx(1)


def test_no_finished_step_no_steady(tmp_path: Path) -> None:
    """Without a finished step there is no steady one."""
    written = Written(tmp_path / "run").process("d", span("step", 0, None), role="driver", ended_s=4)
    assert summarize(written.read()).steady is None


OURS = (events.REQUEST, events.MEMORY_EDGE, events.OUT_OF_MEMORY, events.ALLOCATIONS_KEPT)
"""Names that rltrace writes with no hook's help."""


def test_own_spans_by_name_and_role(tmp_path: Path) -> None:
    """The program's own spans are counted by name and role.

    Those that a hook or rltrace itself made are not among them, nor phases, nor the steps.
    """
    steps = [span("step", at, at + 10, step=at // 10) for at in (0, 10, 20)]
    mine = [span("load", at, at + 1) for at in (1, 11, 21)] + [span("load", 21.5, 23), span("load", 31, 33)]
    others = [span(name, 1, 2) for name in ("gpu.load", "op.load", "kernel.load", "cumem.map", *OURS)]
    theirs = [span("verl.work", 1, 2), span("reward", 3, 4), span("my.phase", 5, 6, phase=True), *others]
    hooks = (hook(1, "m:f", emits=["verl.work"]),)
    written = Written(tmp_path / "run").process("d", *steps, *mine, *theirs, role="driver", hooks=hooks, ended_s=33)
    for rank in range(2):
        score = [span("score", 12, 12 + 2 * rank + 1), span("load", 12, 13), span("verl.work", 1, 2)]
        written.process(f"w{rank}", *score, role="worker", rank=rank, hooks=hooks, ended_s=30)
    summary = summarize(written.read())
    assert [(made.name, made.role, made.count) for made in summary.hook_spans] == [
        ("verl.work", "worker", 2), (events.REQUEST, "driver", 1), ("verl.work", "driver", 1)
    ]  # fmt: skip
    found = {(own.name, own.role): own for own in summary.own_spans}
    assert list(found) == [("load", "driver"), ("score", "worker"), ("load", "worker")], "the longest in all first"
    load = found["load", "driver"]
    assert (load.processes, load.count, load.seconds, load.mean_seconds, load.max_seconds) == (1, 5, 6.5, 1.3, 2)
    assert load.share == pytest.approx((1 + 2) / 20), "of steps 1 and 2, overlapping spans once"
    score = found["score", "worker"]
    assert (score.processes, score.count, score.seconds) == (2, 2, 4)
    assert score.share == pytest.approx((1 + 3) / 2 / 20), "a mean over the ranks"


def test_share_of_the_run_without_steps(tmp_path: Path) -> None:
    """Spans of a program without steps have their share of the run."""
    (own,) = summarize(Written(tmp_path / "run").process("p", span("a", 0, 1), role="main", ended_s=4).read()).own_spans
    assert own.share == 0.25


def test_no_share_before_a_step_is_over(tmp_path: Path) -> None:
    """Spans have no share while no step is over."""
    began = span("step", 0, None, step=0), span("a", 0, 1)
    (own,) = summarize(Written(tmp_path / "run").process("p", *began, role="main", ended_s=4).read()).own_spans
    assert own.share is None


def test_own_spans_mean_of_finished(tmp_path: Path) -> None:
    """The mean of own spans is over finished ones, and open ones are counted separately.

    Of a process that was killed nobody knows how long its last span would have lasted.
    """
    steps = [span("step", at, at + 10, step=at // 10) for at in (0, 10, 20)]
    written = Written(tmp_path / "run").process("d", *steps, role="driver", ended_s=30)
    killed = [
        span("load", 10, 12),
        span("load", 12, 16),
        span("load", 17, None),
        sample("x", 18, 1),
        span("draw", 18, None),
    ]
    written.process("w", *killed, role="worker", rank=0)
    load, draw = summarize(written.read()).own_spans
    assert (load.name, load.count, load.open, load.seconds, load.mean_seconds) == ("load", 2, 1, 6, 3)
    assert load.share == pytest.approx(7 / 20), "until the process was last heard of, not until the run was over"
    assert (draw.name, draw.count, draw.open, draw.seconds) == ("draw", 0, 1, 0)
    assert (draw.mean_seconds, draw.max_seconds) == (None, None)
    append_exit(tmp_path / "run" / manifest.PROCESSES / "w", end_ns=20 * SECOND, killed_by=9, was_stopped=False)
    load, _ = summarize(written.read()).own_spans
    assert load.share == pytest.approx(9 / 20), "until somebody saw that the process was gone"


CATCHES = """
import contextlib
import rltrace
rltrace.start("run", role="driver")

@rltrace.traced
def parse(sample):
    return int(sample)

def fails_in(*spans):
    try:
        with contextlib.ExitStack() as stack:
            for span in spans:
                stack.enter_context(span)
            parse("one")
    except ValueError:
        pass

for n in range(3):
    with rltrace.span("step", step=n):
        if n:
            fails_in(rltrace.phase("reward"))
        with rltrace.phase("advantage"):
            fails_in(rltrace.span("inner"))
        with contextlib.suppress(KeyError), rltrace.phase("reward"):
            raise KeyError
        with contextlib.suppress(StopIteration), rltrace.phase("reward"):
            next(iter([]))
"""


def test_caught_error_is_told_once(tmp_path: Path) -> None:
    """An error that the program caught is reported once, with its span, phase, process and steps.

    Of the spans that it left, one inside the other, the innermost has it.
    """
    subprocess.run([sys.executable, "-c", CATCHES], check=True, cwd=tmp_path)
    summary = summarize(Recording.open(tmp_path / "run"))
    found = {(one.error, one.name, one.phase): one for one in summary.errors}
    told = {key: (one.count, one.steps, one.process, one.processes) for key, one in found.items()}
    assert told == {
        ("ValueError", "parse", "reward"): (2, [1, 2], "driver", 1),
        ("ValueError", "parse", "advantage"): (3, [0, 1, 2], "driver", 1),
        ("KeyError", "reward", "reward"): (3, [0, 1, 2], "driver", 1),
    }
    assert [one.first_seconds for one in summary.errors] == sorted(one.first_seconds for one in summary.errors)
    lines = [str(line) for line in problems(summary)]
    assert len(lines) == 3
    assert re.fullmatch(
        r"ValueError in parse of driver, phase reward, steps 1-2: 2 times, first at \d+\.\d s: invalid literal for .*",
        lines[2],
    )
    assert re.fullmatch(r"KeyError in reward of driver, steps 0-2: 3 times, first at \d+\.\d s", lines[1])


ENDS_WELL = """
import sys
import rltrace
rltrace.start("run", role="driver")
with rltrace.span("eval", error=0.12):
    pass
with rltrace.span("eval", error="12 of 100 wrong"):
    pass
with rltrace.span("main"):
    sys.exit(0)
"""


def test_no_false_exceptions(tmp_path: Path) -> None:
    """Neither a figure that is called error nor a program's exit is reported as an exception."""
    subprocess.run([sys.executable, "-c", ENDS_WELL], check=True, cwd=tmp_path)
    recording = Recording.open(tmp_path / "run")
    assert [event.args["error"] for process in recording.processes for event in process.events()] == [
        0.12, "12 of 100 wrong", "SystemExit",
    ]  # fmt: skip
    assert summarize(recording).errors == []


def test_rays_exceptions_have_rays_name(tmp_path: Path) -> None:
    """An exception that Ray brings from another process is reported by Ray's name of it."""
    failed = span("reward", 0, 1, error="RayTaskError(KeyError)")
    written = Written(tmp_path / "run").process("driver", failed, role="driver", ended_s=2)
    assert [one.error for one in summarize(written.read()).errors] == ["RayTaskError(KeyError)"]


def test_second_exception_of_one_type(tmp_path: Path) -> None:
    """A second exception of one type that leaves the outer span cannot be told apart.

    The limit: another type is.
    """
    for outer, told in (("KeyError", ["ask"]), ("OSError", ["ask", "serve"])):
        spans = span("serve", 0, 9, error=outer), span("ask", 1, 2, error="KeyError")
        written = Written(tmp_path / outer).process("driver", *spans, role="driver", ended_s=10)
        assert [one.name for one in summarize(written.read()).errors] == told


def test_simultaneous_errors_count_each(tmp_path: Path) -> None:
    """Simultaneous errors in tasks and processes are counted each."""
    written = Written(tmp_path / "run")
    for name in ("a", "b"):
        wide, within = span("serve", 0, 9, error="TimeoutError"), span("ask", 1, 2, error="TimeoutError")
        within[0][1] = 77  # another task's
        steps = [span("step", 0, 5, step=4, error="OSError"), span("rollout.sleep", 1, 2, error="OSError")]
        written.process(name, wide, within, *steps, span("ask", 6, 7, error="OSError"), role="server", ended_s=10)
    summary = summarize(written.read())
    assert {(one.error, one.name): (one.count, one.processes, one.steps) for one in summary.errors} == {
        ("TimeoutError", "ask"): (2, 2, [4]),
        ("TimeoutError", "serve"): (2, 2, []),
        ("OSError", "ask"): (2, 2, []),
    }, "not of the step and the sleep, whose figures say it"
    lines = [str(line) for line in problems(summary, None)]
    assert "TimeoutError in ask of 2 x server, phase rollout.sleep, step 4: 2 times, first at 2.0 s" in lines


def test_host_memory_has_own_ledger(tmp_path: Path) -> None:
    """What lies in host memory is in a ledger of its own."""
    written = Written(tmp_path / "run")
    for device, rank in (("GPU-1", 0), ("cpu-1", 1)):
        samples = [sample("resident_bytes", at, 50 - at) for at in (1, 2)] + [sample("ref.params_host_bytes", 1, 30)]
        where = {"host": "here", "uuid": device}
        written.process(device, *samples, rank=rank, role="worker", device=where, ended_s=3)
    summary = summarize(written.read())
    assert [
        (part.process, part.peak_resident_bytes, part.peak_owner_bytes, part.is_device) for part in summary.host_memory
    ] == [
        ("rank 0 worker", 49, {"ref.params": 30}, False),
        ("rank 1 worker", 49, {"ref.params": 30}, True),
    ]
    assert summary.memory == [], "nobody said what a device holds"


GPU_1 = {"host": "here", "uuid": "GPU-1"}


def test_pinned_by_owner_and_together(tmp_path: Path) -> None:
    """Pinned bytes are given by owner, and together at one moment."""
    written = Written(tmp_path / "run")
    samples = [
        sample("ref.params_host_bytes", 1, 30),
        sample("ref.params_pinned_bytes", 1, 20),
        sample("actor.params_host_bytes", 1, 9),
        sample("actor.params_pinned_bytes", 1, 0),
        sample("unattributed_pinned_bytes", 1.1, 5),
        sample("ref.params_pinned_bytes", 2, 0),
        sample("unattributed_pinned_bytes", 2.1, 25),
        sample("ref.params_pinned_bytes", 3, 20),  # and torch, which had kept these bytes, says so behind it
        sample("unattributed_pinned_bytes", 3.1, 7),
    ]
    written.process("worker", *samples, rank=0, role="worker", device=GPU_1, ended_s=4)
    (found,) = summarize(written.read()).host_memory
    assert found.peak_owner_bytes == {"ref.params": 30, "actor.params": 9}
    assert found.peak_owner_pinned_bytes == {"ref.params": 20, "actor.params": 0, "unattributed": 25}
    assert found.peak_pinned_bytes == 27
    assert found.pinned_unknown == {}


def test_no_gpu_no_pinned(tmp_path: Path) -> None:
    """A process without a GPU has no pinned bytes to report."""
    written = Written(tmp_path / "run").process("driver", sample("resident_bytes", 1, 50), role="driver", ended_s=4)
    (found,) = summarize(written.read()).host_memory
    assert (found.peak_owner_pinned_bytes, found.pinned_unknown) == ({}, {})
    table = Console(width=120, file=io.StringIO())
    table.print(host_memory_table([found]))
    assert "unknown" not in table.file.getvalue()  # type: ignore[attr-defined]


def test_unrecorded_pinned_is_unknown(tmp_path: Path) -> None:
    """In a Recording without pinned bytes they are unknown and not zero."""
    written = Written(tmp_path / "run")
    samples = [sample("resident_bytes", 1, 50), sample("ref.params_host_bytes", 1, 30)]
    written.process("worker", *samples, rank=0, role="worker", device=GPU_1, ended_s=4)
    (found,) = summarize(written.read()).host_memory
    assert found.peak_pinned_bytes is None
    assert found.peak_owner_pinned_bytes == {"ref.params": None, "unattributed": None}
    assert found.pinned_unknown == dict.fromkeys(("ref.params", "unattributed"), NOT_RECORDED)


@pytest.mark.parametrize(("phase", "broadcasts"), [("actor.draw", False), ("actor.broadcast", True)])
def test_drawn_weights_are_not_broadcast(phase: str, broadcasts: bool, tmp_path: Path) -> None:
    """If weights are drawn on each rank, nobody broadcasts them."""
    device = {"host": "here", "uuid": "GPU-1"}
    written = Written(tmp_path / "run")
    written.process("worker", span(phase, 0, 1), role="worker", rank=0, device=device, ended_s=2)
    assert ("actor.broadcast" not in summarize(written.read()).not_applicable) is broadcasts
