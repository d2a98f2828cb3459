"""SkyRL's own trainer learns by PPO on a CPU, with its FSDP workers in Ray, its client and its worker of vLLM."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from framework_runs import TIMEOUT_SECONDS, by_kind, inside, named, run_contracts, trace

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)

HERE = Path(__file__).parent
PROGRAM = (HERE / "skyrl_ppo.py").read_text()
VARIABLES = {"PYTHONPATH": os.pathsep.join(map(str, (HERE / "skyrl_on_cpu", HERE))), "TOKENIZERS_PARALLELISM": "false"}
KINDS = {
    "step": "trainer",
    "actor.update": "actor",
    "critic.update": "critic",
    "ref.log_prob": "ref",
    "weight_sync.load": "engine",
}
PARAMETERS, BYTES = 25, 181120
"""Of the model, in bfloat16."""


@pytest.fixture(scope="module")
def run(skyrl_environment, tmp_path_factory):
    """What each process recorded, by what it is."""
    return by_kind(trace(skyrl_environment, tmp_path_factory.mktemp("traced"), PROGRAM, **VARIABLES), KINDS)


def test_each_process_says_which_it_is(run):
    """The trainer is the driver, and each worker has its rank."""
    said = {kind: (found.process.role, found.process.rank) for kind, found in run.spans.items()}
    assert {said[kind] for kind in ("actor", "critic", "ref")} == {("worker", 0)}
    assert said["trainer"] == ("driver", None)


def test_steps_are_those_of_skyrl(run):
    """A step has SkyRL's number, and in it lies what the trainer asks of others, the sync at its end included."""
    steps = named(run, "trainer", "step")
    assert [step.args["step"] for step in steps] == [1, 2]
    assert [(step.step, step.inferred) for step in run.summary.steps] == [(1, False), (2, False)]
    asked = ["trainer.generate", "reward", "advantage", "trainer.update", "trainer.update_weights"]
    for step in steps:
        assert [span.name for span in named(run, "trainer", *asked) if inside(span, step)] == asked
    assert all(0 <= step.reward_mean <= 1 and step.tokens == 32 for step in run.summary.steps)


def test_phases_of_a_step_are_those_of_other_trainers(run):
    """Each worker has its phases of a step; an update is as many pieces as the driver asks for."""
    for kind, names in {
        "actor": ["actor.old_log_prob", "actor.update", "actor.update", "weight_sync"],
        "critic": ["critic.values", "critic.update", "critic.update"],
        "ref": ["ref.log_prob"],
    }.items():
        first = named(run, "trainer", "step")[0].start_ns
        phases = [span for span in named(run, kind, *names) if span.start_ns >= first]
        assert [phase.name for phase in phases] == names * 2
        assert all(before.end_ns <= after.start_ns for before, after in itertools.pairwise(phases))
        assert {span.args["sequences"] for span in phases if "sequences" in span.args} == {4}
    for kind in ("actor", "critic"):
        updates = named(run, kind, f"{kind}.update")
        batches = named(run, kind, f"{kind}.micro_batch")
        assert [sum(inside(batch, update) for batch in batches) for update in updates] == [2, 0, 2, 0]


def test_start_up_is_in_phases(run):
    """Each model is built, and sharded meanwhile."""
    for kind in ("actor", "critic", "ref"):
        (build,), (shard,) = named(run, kind, f"{kind}.build"), named(run, kind, f"{kind}.shard")
        assert inside(shard, build)


def test_every_byte_that_is_sent_is_loaded(run):
    """A sync gathers each parameter while it sends all of them, and SkyRL's worker of vLLM loads the same bytes."""
    syncs = named(run, "actor", "weight_sync")
    for sync in syncs:
        (send,) = [span for span in named(run, "actor", "weight_sync.send") if inside(span, sync)]
        assert (send.args["bytes"], send.args["tensors"]) == (BYTES, PARAMETERS)
        gathered = [span for span in named(run, "actor", "weight_sync.gather") if inside(span, sync)]
        assert sum(span.args.get("bytes", 0) for span in gathered) == BYTES
    loaded = {"bytes": BYTES, "tensors": PARAMETERS}
    assert [span.args for span in named(run, "engine", "weight_sync.load")] == [loaded] * len(syncs)
    assert len(syncs) == 3


def test_trajectories_ask_the_engine(run):
    """Every trajectory makes one request, by SkyRL's own client."""
    requests = named(run, "trainer", "agent_loop.request")
    assert [span.args["prompt_tokens"] for span in requests] == [4] * 8
    trajectories = named(run, "trainer", "agent_loop.trajectory")
    assert all(any(inside(request, trajectory) for trajectory in trajectories) for request in requests)
    assert len(trajectories) == 8


def test_a_batch_is_dispatched_by_mode_mesh_and_chunk(run):
    """Each dispatch says how a batch is divided; what is staged in Ray's store goes by reference."""
    said = [span.args for span in named(run, "trainer", "ray.dispatch")]
    assert {"method": "forward", "mode": "mesh", "calls": 1, "mesh": [1, 1], "chunk": 4} in said
    assert {"method": "forward_backward", "mode": "staged", "calls": 1, "mesh": [1, 1]} in said
    assert {"method": "optim_step", "mode": "pass_through", "calls": 1} in said
    assert [span.args for span in named(run, "trainer", "batch.stage")] == [
        {"sequences": 4, "mini_batches": 1, "mesh": [1]}
    ] * 8


def test_contracts_hold(skyrl_environment):
    """Every hook binds to the real wheel, keeps signatures and is undone."""
    done = run_contracts(skyrl_environment, "skyrl", **VARIABLES)
    assert done.returncode == 0, done.stdout[-4000:]
