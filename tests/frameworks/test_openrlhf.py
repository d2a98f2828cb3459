"""OpenRLHF's own command learns by PPO on a CPU, with real Ray, DeepSpeed and vLLM, in ten processes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from framework_runs import TIMEOUT_SECONDS, by_kind, inside, named, run_contracts, trace

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)

HERE = Path(__file__).parent
PROGRAM = (HERE / "openrlhf_ppo.py").read_text()
VARIABLES = {
    "PYTHONPATH": os.pathsep.join(map(str, (HERE / "openrlhf_on_cpu", HERE))),
    "DS_ACCELERATOR": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
PARAMETERS = 25
"""Of the model's tensors, each of which is sent by itself."""


@pytest.fixture(scope="module")
def run(openrlhf_environment, tmp_path_factory):
    """What each process recorded, by what it is."""
    return by_kind(trace(openrlhf_environment, tmp_path_factory.mktemp("traced"), PROGRAM, **VARIABLES), KINDS)


KINDS = {
    "step": "trainer",
    "actor.update": "actor",
    "critic.update": "critic",
    "ref.log_prob": "ref",
    "rollout.generate": "server",
    "weight_sync.load": "engine worker",
}


def test_each_process_says_which_it_is(run):
    """The trainer is the driver, workers have ranks, and the engine's actor is a server."""
    said = {kind: (found.process.role, found.process.rank) for kind, found in run.spans.items()}
    worker = ("worker", 0)
    assert {kind: said[kind] for kind in ("actor", "critic", "ref")} == dict.fromkeys(
        ("actor", "critic", "ref"), worker
    )
    assert said["trainer"] == ("driver", None)
    assert said["server"] == ("server", None)


def test_steps_have_the_numbers_that_openrlhf_logs(run):
    """A step has its number, and what the trainer asks of others lies in it, in order."""
    steps = named(run, "trainer", "step")
    assert [step.args["step"] for step in steps] == [1, 2]
    assert [(step.step, step.inferred) for step in run.summary.steps] == [(1, False), (2, False)]
    asked = ("trainer.generate", "trainer.make_experience", "advantage", "trainer.update", "trainer.update_weights")
    for step in steps:
        assert [span.name for span in named(run, "trainer", *asked) if inside(span, step)] == list(asked)


def test_phases_of_a_step_are_those_of_other_trainers(run):
    """The actor, the critic and the ref each have their phases of a step, and no two of a process overlap."""
    for kind, names in {
        "actor": ["actor.old_log_prob", "actor.update", "weight_sync"],
        "critic": ["critic.values", "critic.update"],
        "ref": ["ref.log_prob"],
    }.items():
        phases = named(run, kind, *names)
        assert [phase.name for phase in phases] == names * 2
        assert all(before.end_ns <= after.start_ns for before, after in itertools.pairwise(phases))
    assert [span.args["micro_batches"] for span in named(run, "ref", "ref.log_prob")] == [2, 2]
    for kind in ("actor", "critic"):
        update, _ = named(run, kind, f"{kind}.update")
        batches = [span for span in named(run, kind, f"{kind}.micro_batch") if inside(span, update)]
        assert len(batches) == 2
        assert all(
            len([loss for loss in named(run, kind, "micro_batch.loss") if inside(loss, b)]) == 1 for b in batches
        )


def test_start_up_is_in_phases(run):
    for kind in ("actor", "critic", "ref"):
        assert [span.name for span in named(run, kind, f"{kind}.build", f"{kind}.shard")] == [
            f"{kind}.build",
            f"{kind}.shard",
        ]


def test_every_tensor_is_sent_and_loaded(run):
    """A sync sends each tensor once, and vLLM's worker loads the same bytes."""
    syncs = named(run, "actor", "weight_sync")
    loads = named(run, "engine worker", "weight_sync.load")
    for sync, loaded in zip(syncs, (loads[:PARAMETERS], loads[PARAMETERS:]), strict=True):
        sent = [span.args["bytes"] for span in named(run, "actor", "weight_sync.send") if inside(span, sync)]
        assert len(sent) == PARAMETERS
        assert sent == [span.args["bytes"] for span in loaded]
        assert len({span.args["tensor"] for span in loaded}) == PARAMETERS


def test_engine_hands_each_tensor_to_its_workers(run):
    """Each tensor is one call of all workers of the engine, from its actor."""
    asked = [span.args["method"] for span in named(run, "server", "engine.collective_rpc")]
    assert asked.count("update_weight") == 2 * PARAMETERS


def test_engine_generates_between_its_wake_ups_and_sleep(run):
    """Each step wakes the weights, then the cache, answers every prompt twice and sleeps again."""
    requests = named(run, "server", "server.request")
    phases = named(run, "server", "rollout.generate")
    assert [len([request for request in requests if inside(request, phase)]) for phase in phases] == [8, 8]
    order = [span.name for span in named(run, "server", "rollout.wake_weights", "rollout.generate", "rollout.sleep")]
    assert order.count("rollout.generate") == 2
    assert order[-1] in ("rollout.wake_weights", "rollout.sleep")
    for before, after in itertools.pairwise(order):
        assert (before, after) != ("rollout.sleep", "rollout.generate")
    assert len(named(run, "server", "agent_loop.trajectory")) == 16


def test_a_batch_is_dispatched_in_chunks(run):
    """Each dispatch says how it divides a batch, on which mesh, and how large a chunk is."""
    forwards = [s for s in named(run, "trainer", "ray.dispatch") if s.args["method"] == "forward"]
    assert [span.args for span in forwards] == [
        {"method": "forward", "mode": "chunks", "calls": 1, "mesh": [1, 1], "chunk": 2}
    ] * 6


def test_contracts_hold(openrlhf_environment):
    """Every hook binds to the real wheel, keeps signatures and is undone."""
    done = run_contracts(openrlhf_environment, "openrlhf", **VARIABLES)
    assert done.returncode == 0, done.stdout[-4000:]
