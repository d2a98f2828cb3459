"""`rltrace run examples/laptop.yaml` to its end, once: it learns, every hook says what is true, the figures add up.

Real Ray, FSDP2 over gloo and engine processes. The other seeds and ranks learn in tests/reference_run, untraced,
and test_reference_tiny.py there has the same seed without hooks.
"""

import json
import os
import subprocess
import sys
from collections import Counter as Count
from functools import cache
from itertools import pairwise

import pytest
from reference_runs import LAPTOP, mean
from test_summary_screen import SCREEN_LINES, WIDTHS, figures_in, lines_of_figures, screen
from traced_runs import TracedRun

from rltrace import plugins
from rltrace.analysis import summarize
from rltrace.events import PHASES, Counter, Span
from rltrace.read.recording import Recording

pytestmark = [pytest.mark.run, pytest.mark.timeout(900)]  # the whole example: minutes on a machine that others use

STEPS = range(24)
PROMPTS, SAMPLES, SLOTS = range(16), range(16), 128
"""Of a rank: its half of the prompts, the samples of each, how many run at once."""
OF_GPUS = {
    "rltrace_reference.actor:Actor.draw",
    "rltrace_reference.actor:Ref.draw",
    "rltrace_reference.engine.vllm_engine:VllmEngine.__init__",
    "rltrace_reference.engine.sglang_engine:SglangEngine.__init__",
}
"""Hooks of a run on GPUs alone."""
OF_VARIANTS = {
    "rltrace_reference.offload:Offload.back",
    "rltrace_reference.offload:Offload.out",
    "rltrace_reference.rollout:Rollout.end",
}
"""Hooks of runs whose actor leaves the device, or whose engine is launched anew."""
OF_TASKS = {"FunctionActorManager.get_execution_info", "RemoteFunction._remote"}
"""Hooks of Ray that actors do without."""


def rltrace_(*words, **environment):
    command = [sys.executable, "-c", "from rltrace.cli import main; main(prog_name='rltrace')", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


def run(config, folder, **environment) -> TracedRun:
    done = rltrace_("run", config, "--out", folder, **environment)
    assert done.returncode == 0, done.stderr
    return TracedRun(done.returncode, done.stdout, done.stderr, Recording.open(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("laptop") / "run"


@pytest.fixture(scope="module")
def traced(folder) -> TracedRun:
    """The example that the README begins with, as a user runs it."""
    return run(LAPTOP, folder)


@pytest.fixture(scope="module")
def summary(traced):
    return summarize(traced.recording)


def of_role(traced, role):
    """The events of each process of a role, by rank."""
    processes = [process for process in traced.recording.processes if process.role == role]
    return [list(process.events()) for process in sorted(processes, key=lambda p: p.identity.get("rank") or 0)]


def spans(events, name=None):
    return sorted((e for e in events if isinstance(e, Span) and name in (None, e.name)), key=lambda e: e.start_ns)


def values(events, name):
    return [event.value for event in events if isinstance(event, Counter) and event.name == name]


# ---- what a user sees --------------------------------------------------------------------------------------------


def test_learns_to_count_down(traced, summary):
    """The example learns to count down in 24 steps."""
    rewards = [step.reward_mean for step in summary.steps]
    assert [step.step for step in summary.steps] == [*STEPS]
    assert mean(rewards[:5]) <= 0.15
    assert mean(rewards[-5:]) >= 0.9
    # bf16 noise is below 0.1; the policy of one step before differs by 0.9.
    assert max(step.args["logprob_abs_diff_max"] for step in traced.spans("step")) < 0.3


def test_ends_with_table_and_commands(traced, folder):
    """The run ends with a step table and the commands to go on with."""
    lines = traced.out.splitlines()
    assert f"rltrace view {folder}" in lines[-2]
    assert f"rltrace summary {folder}" in lines[-1]
    at = lines.index("Steps")
    shown = [line.split()[0] for line in lines[at + 3 : -3]]
    assert [step for step in shown if step.isdigit()] == [str(step) for step in STEPS]


def test_its_phases_tile_each_ranks_step(summary):
    ranks = [row for row in summary.phases if row.rank is not None and row.step is not None]
    assert [(row.step, row.rank) for row in ranks] == [(step, rank) for step in STEPS for rank in range(2)]
    for row in ranks:
        assert row.overlap_seconds == 0, row.overlaps
        assert sum(part.seconds for part in row.phases.values()) == pytest.approx(row.seconds)
        assert {"weight_sync", "rollout.generate", "actor.update", "wait.driver"} <= row.phases.keys()


def test_complete_with_all_hooks(summary):
    """The Recording is complete, and every hook is accounted for."""
    assert summary.complete
    assert summary.open_spans == []
    assert summary.lost_events == 0
    silent = {(hook.instrumentation, hook.target.partition(":")[2]) for hook in summary.hooks if hook.never_fired}
    assert {name for name, _ in silent} == {"fsdp1", "ray"}, "it is FSDP2's"
    assert {target for name, target in silent if name == "ray"} == OF_TASKS
    assert [hook.target for hook in summary.hooks if hook.state == "failed"] == []
    without_parent = {(process.role, process.rank) for process in summary.processes if process.parent is None}
    assert without_parent == {("driver", None), ("sampler", None)}
    assert sorted((process.role, process.rank) for process in summary.processes if process.rank is not None) == [
        ("engine", 0), ("engine", 1), ("worker", 0), ("worker", 1),
    ]  # fmt: skip


def test_sync_and_memory_have_figures(summary):
    """The weight sync and the memory have figures."""
    assert {(sync.step, sync.rank) for sync in summary.weight_sync if sync.step is not None} == {
        (step, rank) for step in STEPS for rank in range(2)
    }
    for sync in summary.weight_sync:
        assert sync.bytes > 0
        assert sync.buckets > 0
        assert sync.stages["weight_sync.send"].gigabytes_per_second
    for device in summary.memory:
        assert device.peak_bytes >= 64 << 20
        assert sum(device.at_peak_bytes.values()) == device.peak_bytes
        assert device.owner_peaks["actor.grads"].phase == "actor.update"


by_its_name = cache(Recording.open)


@pytest.mark.parametrize("width", WIDTHS)
def test_its_summary_cuts_no_figure(traced, folder, width, monkeypatch):
    """A path is no figure: one that is longer than the screen goes on in its next line."""
    monkeypatch.chdir(folder.parent)
    recording = by_its_name(folder.name)
    for whole in (False, True):
        lines = screen(recording, width, whole=whole)
        assert max(map(len, lines)) <= width
        kept = [line for line in lines if not line.startswith(f"not shown at {width} columns: ")]
        assert figures_in(kept) <= figures_in(screen(recording, 1000, whole=whole))


@pytest.mark.parametrize("width", WIDTHS)
def test_its_first_screen_is_one(traced, width):
    first = screen(traced.recording, width)
    assert lines_of_figures(traced.recording, width) <= SCREEN_LINES
    assert any(line.startswith("actor.update ") for line in first)
    assert any(line.startswith("unaccounted ") for line in first)


def test_rewards_are_the_printed_ones(traced, folder):
    """The rewards are those that the run printed."""
    steps = json.loads(rltrace_("summary", folder, "--json").stdout)["steps"]
    assert len(steps) == len(STEPS)
    for step in steps:
        assert f"step {step['step']:3}  reward {step['reward_mean']:.3f}" in traced.out
        assert step["tokens_per_second"] > 0


def test_second_run_into_folder_is_refused(traced, folder):
    """A second run into its folder is refused."""
    before = sorted(path.stat().st_mtime_ns for path in folder.rglob("*"))
    done = rltrace_("run", LAPTOP, "--out", folder)
    assert done.returncode == 3
    assert "holds a Recording already; name another folder with --out" in done.stderr
    assert sorted(path.stat().st_mtime_ns for path in folder.rglob("*")) == before


# ---- what its hooks say ------------------------------------------------------------------------------------------


def test_every_process_says_who_it_is(traced):
    # A worker that Ray keeps in reserve joins too; it has nothing to say.
    spoke = [process for process in traced.recording.processes if any(process.events())]
    who = [(process.role, process.rank, process.device) for process in spoke]
    host = traced.recording.processes[0].host
    assert sorted(who, key=str) == sorted(
        [("driver", None, None), ("sampler", None, None)]
        + [(role, rank, {"host": host, "uuid": f"cpu-{rank}"}) for role in ("worker", "engine") for rank in (0, 1)],
        key=str,
    )


def test_every_hook_fired_somewhere(traced):
    """Every hook is installed, and fired somewhere."""
    fired = Count()
    for process in traced.recording.processes:
        for hook in process.hooks:
            fired[hook["instrumentation"], hook["target"]] += hook["fired"]
            assert hook["state"] in ("installed", "waiting"), hook
    silent = {hook for hook, times in fired.items() if times == 0}
    assert {target for name, target in silent if name == "reference"} == OF_GPUS | OF_VARIANTS
    assert {target.partition(":")[2] for name, target in silent if name == "ray"} == OF_TASKS
    of_others = {"fsdp1", "sglang", "sglang_calls", "torch_memory_saver", "transformers", "trl", "vllm", "vllm_calls"}
    of_others |= {"areal", "openrlhf", "peft", "skyrl"}
    of_others |= {
        name for name in plugins.INSTRUMENTATIONS if name.startswith("opentelemetry") or name.endswith("_context")
    }
    by_choice = {"torch_collectives", "torch_models"}
    assert {name for name, _ in silent} == {"reference", "ray", *of_others, *by_choice}, "none of these is in it"


def test_phases_do_not_overlap(traced):
    """Phases of a rank do not overlap."""
    for rank in (0, 1):
        events = of_role(traced, "worker")[rank] + of_role(traced, "engine")[rank]
        phases = [span for span in spans(events) if span.name in PHASES]
        for earlier, later in pairwise(phases):
            assert earlier.end_ns <= later.start_ns, (earlier, later)


def test_step_is_its_phases_in_order(traced):
    """A step consists of its phases in their order."""
    step = [
        "rollout.wake_weights",
        "weight_sync",
        "rollout.wake_kv_cache",
        "rollout.generate",
        "rollout.sleep",
        "actor.old_log_prob",
        "ref.log_prob",
        "actor.update",
    ]
    start = ["actor.build", "actor.shard", "actor.broadcast", "ref.build", "ref.shard", "ref.broadcast"]
    for events in of_role(traced, "worker"):
        assert [s.name for s in spans(events) if s.name in PHASES] == [*start, "rollout.sleep", *step * len(STEPS)]
    for events in of_role(traced, "engine"):
        assert [s.name for s in spans(events) if s.name in PHASES] == [
            "rollout.load",
            "rollout.profile",
            "rollout.reserve_kv",
        ]
    (driver,) = of_role(traced, "driver")
    assert [s.name for s in spans(driver) if s.name in PHASES] == ["reward", "advantage"] * len(STEPS)


def test_sync_adds_up_at_every_stage(traced):
    """The bytes of a sync add up at every stage."""
    for worker, engine in zip(of_role(traced, "worker"), of_role(traced, "engine"), strict=True):
        syncs = spans(worker, "weight_sync")
        assert [sync.args["step"] for sync in syncs] == [*STEPS]
        total = sum(sync.args["bytes"] for sync in syncs)
        assert total > 0
        for name in ("weight_sync.gather", "weight_sync.pack", "weight_sync.send"):
            assert sum(span.args["bytes"] for span in spans(worker, name)) == total, name
        for name in ("weight_sync.load", "weight_sync.verify"):
            assert sum(span.args["bytes"] for span in spans(engine, name)) == total, name
        assert {span.args["dtype"] for span in spans(worker, "weight_sync.gather")} == {"bfloat16"}
        assert syncs[0].args["buckets"] > 2


def test_bucket_arrows(traced):
    """Arrows lead from each bucket sent to the same bucket loaded."""
    for worker, engine in zip(of_role(traced, "worker"), of_role(traced, "engine"), strict=True):
        sent = {key: span for span in spans(worker, "weight_sync.send") for key in span.flows_out}
        loaded = {key: span for span in spans(engine, "weight_sync.load") for key in span.flows_in}
        assert sent.keys() == loaded.keys()
        assert len(sent) == len(spans(worker, "weight_sync.send"))
        for key, span in sent.items():
            assert span.start_ns < loaded[key].start_ns
            assert span.args == loaded[key].args


def test_dispatch_arrows(traced):
    """Arrows lead from each dispatch to every worker."""
    (driver,) = of_role(traced, "driver")
    arriving = {key: span for worker in of_role(traced, "worker") for span in spans(worker) for key in span.flows_in}
    submits = spans(driver, "ray.submit")
    for dispatch in spans(driver, "ray.dispatch"):
        inside = [span for span in submits if dispatch.start_ns < span.start_ns and span.end_ns < dispatch.end_ns]
        calls = [arriving[key] for submit in inside for key in submit.flows_out]
        assert [call.args["method"] for call in calls] == [f"Worker.{dispatch.args['method']}"] * 2


def test_requests_have_own_lanes(traced):
    """Every request has a span on a lane of its own."""
    for rank, events in enumerate(of_role(traced, "engine")):
        requests = spans(events, "rollout.request")
        names = [request.args["request_id"] for request in requests]
        said = {f"{rank}.{step}.{prompt}.{sample}" for step in STEPS for prompt in PROMPTS for sample in SAMPLES}
        assert sorted(names) == sorted(said)
        by_lane = {}
        for request in requests:
            assert request.end_ns > request.start_ns
            assert request.task != 0
            by_lane.setdefault(request.task, []).append(request)
        for lane in by_lane.values():
            assert all(earlier.end_ns <= later.start_ns for earlier, later in pairwise(lane))
        steps = spans(events, "engine.step")
        prompts = {request.args["request_id"]: request.args["prompt_tokens"] for request in requests}
        said = sum(request.args["tokens"] for request in requests)
        # Each sampled token but a request's last goes through the engine once more.
        assert sum(step.args["tokens"] for step in steps) == said - len(requests) + sum(prompts.values())
        assert max(step.args["waiting"] for step in steps) == len(PROMPTS) * len(SAMPLES) - SLOTS
        assert max(step.args["kv_usage"] for step in steps) == 1.0


def test_memory_moves_between_owners(traced):
    """Memory moves between its owners as the phases of the step say."""
    for worker, engine in zip(of_role(traced, "worker"), of_role(traced, "engine"), strict=True):
        params = values(worker, "actor.params_bytes")[-1]
        assert 0 < params == 2 * values(worker, "ref.params_bytes")[-1]  # float32, and bf16
        assert max(values(worker, "actor.grads_bytes")) == params
        assert values(worker, "actor.grads_bytes")[-1] == 0
        optimizer = values(worker, "actor.optimizer_bytes")
        assert optimizer[0] == 0
        assert 2 * params <= optimizer[-1] < 2.1 * params
        buckets = values(worker, "weight_sync.bucket_bytes")
        assert max(buckets) > 0 == buckets[-1]
        for tag in ("weights", "kv_cache"):
            owned = values(engine, f"rollout.{tag}_bytes")
            assert min(owned) == 0 == owned[-1]
        assert max(values(engine, "rollout.kv_cache_bytes")) == 64 << 20
        assert min(values(worker, "resident_bytes")) > 1 << 20


def test_unmapped_memory_leaves_nothing_behind(traced):
    for events in of_role(traced, "engine"):
        unmaps = spans(events, "cumem.unmap")
        assert {span.args["tag"] for span in unmaps} == {"weights", "kv_cache"}
        assert {span.args["residual"] for span in unmaps} == {0}
        assert sum(s.args["bytes"] for s in unmaps) == sum(s.args["bytes"] for s in spans(events, "cumem.map"))


def test_unaccounted_within_limit_at_boundaries(summary):
    """At every phase boundary all bytes but the limit have an owner."""
    devices = summary.memory
    assert [device.rank for device in devices] == [0, 1]
    for device in devices:
        seen = {(edge.step, edge.phase) for edge in device.boundaries}
        assert seen >= {(step, phase) for step in STEPS for phase in ("weight_sync", "rollout.sleep", "actor.update")}
        assert {"actor.build", "rollout.load"} <= {phase for step, phase in seen if step is None}
        found = device.residual
        assert found.boundaries == len(device.boundaries)
        assert found.inconsistent_boundaries <= 0.05 * found.boundaries
        assert found.boundaries_over_limit == 0, (
            found,
            [edge for edge in device.boundaries if edge.phase == found.worst_phase],
        )
        assert device.unknown == {}


def test_sleeps_give_back_what_is_expected(summary):
    """Every sleep of the run gives back what it was expected to."""
    assert {(move.name, move.step) for move in summary.sleeps} >= {("rollout.sleep", None), ("rollout.sleep", 1)}
    assert {move.verdict for move in summary.sleeps} == {"ok"}


def test_nothing_grows(summary):
    """Nothing of the example grows from sleep to sleep.

    Its batches differ in every step, but the engine rounds them up to a few shapes, and these are all compiled soon.
    """
    assert [(leak.lane, leak.owner, leak.bytes_per_sleep) for leak in summary.leaks] == []
