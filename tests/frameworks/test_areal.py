"""AReaL's own trainer learns by PPO on a CPU, with its FSDP engines, its client and its worker of vLLM."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from framework_runs import TIMEOUT_SECONDS, inside, run_contracts, trace

from rltrace.analysis.summary import summarize
from rltrace.events import Span

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)

HERE = Path(__file__).parent
PROGRAM = (HERE / "areal_ppo.py").read_text()
PHASES = [
    "critic.values", "ref.log_prob", "actor.old_log_prob", "advantage", "actor.update", "critic.update", "weight_sync",
]  # fmt: skip
"""Of a step, in AReaL's order."""
PARAMETERS, BYTES = 25, 181120
"""Of the model, in bfloat16."""


@pytest.fixture(scope="module")
def run(skyrl_environment, tmp_path_factory):
    """What the trainer recorded, and its engine."""
    traced = trace(skyrl_environment, tmp_path_factory.mktemp("traced"), PROGRAM, PYTHONPATH=str(HERE))
    found = {}
    for process in traced.recording.processes:
        spans = sorted((e for e in process.events() if isinstance(e, Span)), key=lambda span: span.start_ns)
        for kind, name in (("trainer", "step"), ("engine", "weight_sync.load")):
            if any(span.name == name for span in spans):
                found[kind] = SimpleNamespace(process=process, spans=spans)
    return SimpleNamespace(**found, summary=summarize(traced.recording))


def named(process, *names):
    return [span for span in process.spans if span.name in names]


def test_steps_are_those_of_areal(run):
    """A step has AReaL's number, and the trainer's rank its phases in order; none overlaps another."""
    assert (run.trainer.process.role, run.trainer.process.rank) == ("worker", 0)
    steps = named(run.trainer, "step")
    assert [step.args["step"] for step in steps] == [0, 1]
    assert [(step.step, step.inferred) for step in run.summary.steps] == [(0, False), (1, False)]
    for step in steps:
        phases = [span for span in named(run.trainer, *PHASES) if inside(span, step)]
        assert [phase.name for phase in phases] == PHASES
        assert all(before.end_ns <= after.start_ns for before, after in itertools.pairwise(phases))


def test_phases_say_how_much_they_do(run):
    """Of each step two prompts are answered twice with eight tokens."""
    assert {span.args["sequences"] for span in named(run.trainer, "actor.update", "ref.log_prob")} == {4}
    assert [span.args["tokens"] for span in named(run.trainer, "advantage")] == [32, 32]
    assert all(step.reward_mean is not None and 0 <= step.reward_mean <= 1 for step in run.summary.steps)


def test_only_updates_have_micro_batches(run):
    """Updates are divided into micro-batches, each with its loss; log-probs are not."""
    for subject in ("actor", "critic"):
        batches = named(run.trainer, f"{subject}.micro_batch")
        updates = named(run.trainer, f"{subject}.update")
        assert [sum(inside(batch, update) for batch in batches) for update in updates] == [2, 2]
        losses = named(run.trainer, "micro_batch.loss")
        assert [sum(inside(loss, batch) for loss in losses) for batch in batches] == [1] * 4


def test_start_up_is_in_phases(run):
    """Each of the three models is built, and sharded meanwhile."""
    for subject in ("actor", "critic", "ref"):
        (build,), (shard,) = named(run.trainer, f"{subject}.build"), named(run.trainer, f"{subject}.shard")
        assert inside(shard, build)


def test_every_byte_that_is_sent_is_loaded(run):
    """A sync gathers each parameter, sends a bucket and waits for it, and AReaL's worker of vLLM loads its bytes."""
    for sync in named(run.trainer, "weight_sync"):
        stages = {
            stage: [span for span in named(run.trainer, f"weight_sync.{stage}") if inside(span, sync)]
            for stage in ("gather", "send", "wait")
        }
        assert len(stages["gather"]) == PARAMETERS
        assert [(span.args["bytes"], span.args["tensors"]) for span in stages["send"]] == [(BYTES, PARAMETERS)]
        assert [span.args["tensors"] for span in stages["wait"]] == [PARAMETERS]
    assert [span.args for span in named(run.engine, "weight_sync.load")] == [
        {"bytes": BYTES, "tensors": PARAMETERS}
    ] * 2


def test_trajectories_ask_and_are_rewarded(run):
    """Every trajectory makes one request and scores its answer."""
    for step in named(run.trainer, "trainer.generate"):
        assert sum(inside(span, step) for span in named(run.trainer, "agent_loop.trajectory")) == 4
    requests = named(run.trainer, "agent_loop.request")
    assert [(span.args["prompt_tokens"], span.args["tokens"]) for span in requests] == [(4, 8)] * 8
    assert len(named(run.trainer, "reward.score")) == 8


def test_trainer_has_the_words_of_other_trainers(run):
    names = {span.name for span in run.trainer.spans if span.name.startswith("trainer.")}
    assert names >= {
        "trainer.generate", "trainer.values", "trainer.ref_log_prob", "trainer.old_log_prob", "trainer.update_actor",
        "trainer.update_critic", "trainer.update_weights", "trainer.validate", "trainer.save_checkpoint",
    }  # fmt: skip


def test_contracts_hold(skyrl_environment):
    """Every hook binds to the real wheel, keeps signatures and is undone."""
    done = run_contracts(skyrl_environment, "areal")
    assert done.returncode == 0, done.stdout[-4000:]
