"""Hooks on the reference run: real Ray, FSDP2 over gloo and engine processes, two ranks, two steps."""

import json
from collections import Counter as Count
from itertools import pairwise

import pytest
from traced_runs import TracedRun, run_traced

from rltrace import plugins
from rltrace.analysis import summarize
from rltrace.events import PHASES, Counter, Span

pytestmark = pytest.mark.run

CONFIG = """
ranks: 2
steps: 2
seed: 3
model: {vocab_size: 16, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
        head_dim: 8, intermediate_size: 64}
task: {prompts: 4}
rollout: {n: 4, max_tokens: 12, slots: 4, kv_cache_megabytes: 64, sleep_level: 2, bucket_megabytes: 0.015625}
actor: {minibatches: 2, micro_batch: 4, learning_rate: 0.003, clip_ratio: 0.2, kl_coefficient: 0.001}
"""

OF_GPUS = {
    "rltrace_reference.actor:Actor.draw",
    "rltrace_reference.actor:Ref.draw",
    "rltrace_reference.engine.vllm_engine:VllmEngine.__init__",
}
"""Hooks of a run on GPUs alone."""

PROGRAM = """
import sys
from rltrace_reference.__main__ import main
sys.exit(main(["config.yaml", "--out", "out"]))
"""


def run(folder, **environment) -> TracedRun:
    (folder / "config.yaml").write_text(CONFIG)
    done = run_traced(folder, PROGRAM, timeout_s=240, **environment)
    assert done.returncode == 0, done.err
    return done


def rewards(folder):
    return [json.loads(line)["reward_mean"] for line in (folder / "out" / "steps.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reference")


@pytest.fixture(scope="module")
def traced(folder):
    return run(folder)


def of_role(traced, role):
    """The events of each process of a role, by rank."""
    processes = [process for process in traced.recording.processes if process.role == role]
    return [list(process.events()) for process in sorted(processes, key=lambda p: p.identity.get("rank") or 0)]


def spans(events, name=None):
    return sorted((e for e in events if isinstance(e, Span) and name in (None, e.name)), key=lambda e: e.start_ns)


def values(events, name):
    return [event.value for event in events if isinstance(event, Counter) and event.name == name]


def test_every_process_says_who_it_is(traced):
    # A worker that Ray keeps in reserve joins too; it has nothing to say.
    spoke = [process for process in traced.recording.processes if any(process.events())]
    who = [(process.role, process.rank, process.device) for process in spoke]
    host = traced.recording.processes[0].host
    assert sorted(who, key=str) == sorted(
        [("driver", None, None)]
        + [(role, rank, {"host": host, "uuid": f"cpu-{rank}"}) for role in ("worker", "engine") for rank in (0, 1)],
        key=str,
    )


def test_every_hook_is_installed_and_fired_somewhere(traced):
    fired = Count()
    for process in traced.recording.processes:
        for hook in process.hooks:
            fired[hook["instrumentation"], hook["target"]] += hook["fired"]
            assert hook["state"] in ("installed", "waiting"), hook
    silent = {hook for hook, times in fired.items() if times == 0}
    assert {target for name, target in silent if name == "reference"} == OF_GPUS
    of_others = {"fsdp1", "sglang", "torch_memory_saver", "trl", "verl", "vllm"}
    assert {name for name, _ in silent} == {"reference", *of_others}, "none of these is in it"


def test_phases_of_a_rank_do_not_overlap(traced):
    for rank in (0, 1):
        events = of_role(traced, "worker")[rank] + of_role(traced, "engine")[rank]
        phases = [span for span in spans(events) if span.name in PHASES]
        for earlier, later in pairwise(phases):
            assert earlier.end_ns <= later.start_ns, (earlier, later)


def test_a_step_is_its_phases_in_order(traced):
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
        assert [s.name for s in spans(events) if s.name in PHASES] == [*start, "rollout.sleep", *step, *step]
    for events in of_role(traced, "engine"):
        assert [s.name for s in spans(events) if s.name in PHASES] == [
            "rollout.load",
            "rollout.profile",
            "rollout.reserve_kv",
        ]
    (driver,) = of_role(traced, "driver")
    assert [s.name for s in spans(driver) if s.name in PHASES] == ["reward", "advantage"] * 2


def test_a_sync_adds_up_at_every_stage(traced):
    for worker, engine in zip(of_role(traced, "worker"), of_role(traced, "engine"), strict=True):
        syncs = spans(worker, "weight_sync")
        assert [sync.args["step"] for sync in syncs] == [0, 1]
        total = sum(sync.args["bytes"] for sync in syncs)
        assert total > 0
        for name in ("weight_sync.gather", "weight_sync.pack", "weight_sync.send"):
            assert sum(span.args["bytes"] for span in spans(worker, name)) == total, name
        for name in ("weight_sync.load", "weight_sync.verify"):
            assert sum(span.args["bytes"] for span in spans(engine, name)) == total, name
        assert {span.args["dtype"] for span in spans(worker, "weight_sync.gather")} == {"bfloat16"}
        assert syncs[0].args["buckets"] > 2


def test_arrows_lead_from_each_bucket_sent_to_the_same_bucket_loaded(traced):
    for worker, engine in zip(of_role(traced, "worker"), of_role(traced, "engine"), strict=True):
        sent = {key: span for span in spans(worker, "weight_sync.send") for key in span.flows_out}
        loaded = {key: span for span in spans(engine, "weight_sync.load") for key in span.flows_in}
        assert sent.keys() == loaded.keys()
        assert len(sent) == len(spans(worker, "weight_sync.send"))
        for key, span in sent.items():
            assert span.start_ns < loaded[key].start_ns
            assert span.args == loaded[key].args


def test_arrows_lead_from_each_dispatch_to_every_worker(traced):
    (driver,) = of_role(traced, "driver")
    arriving = {key: span for worker in of_role(traced, "worker") for span in spans(worker) for key in span.flows_in}
    submits = spans(driver, "ray.submit")
    for dispatch in spans(driver, "ray.dispatch"):
        inside = [span for span in submits if dispatch.start_ns < span.start_ns and span.end_ns < dispatch.end_ns]
        calls = [arriving[key] for submit in inside for key in submit.flows_out]
        assert [call.args["method"] for call in calls] == [f"Worker.{dispatch.args['method']}"] * 2


def test_every_request_has_a_span_on_a_lane_of_its_own(traced):
    for rank, events in enumerate(of_role(traced, "engine")):
        requests = spans(events, "rollout.request")
        names = [request.args["request_id"] for request in requests]
        assert sorted(names) == sorted(f"{rank}.{step}.{i}.{n}" for step in (0, 1) for i in (0, 1) for n in range(4))
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
        assert max(step.args["waiting"] for step in steps) == 4
        assert max(step.args["kv_usage"] for step in steps) == 1.0


def test_memory_moves_between_its_owners_as_the_step_says(traced):
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


def test_the_run_learns_the_same_without_hooks(traced, folder, tmp_path):
    bare = run(tmp_path, RLTRACE_DISABLE=",".join(plugins.INSTRUMENTATIONS))
    assert rewards(tmp_path) == rewards(folder)
    assert {span.name for span in bare.spans()} == {"step", "reward", "advantage"}
    reasons = {hook["reason"] for process in bare.recording.processes for hook in process.hooks}
    assert reasons == {"disabled by RLTRACE_DISABLE"}


def test_at_every_phase_edge_all_bytes_but_what_is_allowed_have_an_owner(traced):
    devices = summarize(traced.recording).memory
    assert [device.rank for device in devices] == [0, 1]
    for device in devices:
        seen = {(edge.step, edge.phase) for edge in device.edges}
        assert seen >= {(step, phase) for step in (0, 1) for phase in ("weight_sync", "rollout.sleep", "actor.update")}
        assert {"actor.build", "rollout.load"} <= {phase for step, phase in seen if step is None}
        found = device.residual
        assert found.edges == len(device.edges)
        assert found.unsettled_edges <= 0.05 * found.edges
        assert found.edges_over_allowed == 0, (
            found,
            [edge for edge in device.edges if edge.phase == found.worst_phase],
        )
        assert device.unknown == {}


def test_every_sleep_of_the_run_gives_back_what_it_was_expected_to(traced):
    summary = summarize(traced.recording)
    assert {(move.name, move.step) for move in summary.sleeps} >= {("rollout.sleep", None), ("rollout.sleep", 1)}
    assert {move.verdict for move in summary.sleeps} == {"ok"}
    assert summary.leaks == []
