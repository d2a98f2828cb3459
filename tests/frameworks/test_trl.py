"""TRL's GRPOTrainer trains a tiny model on a CPU, as its user would write it."""

from __future__ import annotations

import pytest
from framework_runs import TIMEOUT_SECONDS, result, result_of_bare, run_contracts, trace

from rltrace.analysis.phases import IDLE, UNLABELLED
from rltrace.analysis.summary import summarize

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)

PROGRAM = """
    import hashlib, json, sys
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed
    from trl import GRPOConfig, GRPOTrainer

    words = ["<pad>", "<eos>", *map(str, range(62))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    set_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
    ))
    model.save_pretrained("model")

    def even(completion_ids, **_):
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    trainer = GRPOTrainer(
        "model",
        reward_funcs=even,
        args=GRPOConfig(
            "out", use_cpu=True, bf16=False, max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            num_generations=4, max_completion_length=8, num_iterations=2, beta=0.1, report_to=[], save_strategy="no",
            logging_steps=1, disable_tqdm=True, seed=0, learning_rate=1e-3, model_init_kwargs={"dtype": "float32"},
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{n} {n + 1} {n + 2}"} for n in range(16)]),
        processing_class=tokenizer,
    )
    trainer.train()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())).hexdigest()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print("RESULT " + json.dumps([digest, rewards]))
"""
PHASES = ["rollout.generate", "reward", "advantage", "actor.old_log_prob", "ref.log_prob", "actor.update"]


@pytest.fixture(scope="module")
def traced(trl_environment, tmp_path_factory):
    return trace(trl_environment, tmp_path_factory.mktemp("traced"), PROGRAM)


def test_tracing_keeps_training_the_same(traced, trl_environment, tmp_path):
    """Training is the same with and without tracing."""
    assert result(traced.out) == result_of_bare(trl_environment, tmp_path, PROGRAM)


def test_summary_shows_every_phase_of_every_step(traced):
    summary = summarize(traced.recording)
    assert [step.step for step in summary.steps] == [0, 1, 2]
    steps = [rank_step for rank_step in summary.phases if rank_step.step is not None]
    assert [(step.rank, step.finished, step.overlap_seconds) for step in steps] == [(0, True, 0.0)] * 3
    # Every batch is used for two steps (num_iterations): the first and the third make one.
    for step, makes_batch in zip(steps, (True, False, True), strict=True):
        seconds = {name: share.seconds for name, share in step.phases.items() if share.seconds}
        assert set(seconds) - {IDLE, UNLABELLED} == set(PHASES if makes_batch else ["actor.update"])
        assert sum(seconds.values()) == pytest.approx(step.seconds)


def test_reward_is_what_the_trainer_logs(traced):
    """The reward of a step is the one that the trainer logs."""
    rewards = [step.reward_mean for step in summarize(traced.recording).steps if step.reward_mean is not None]
    assert rewards == pytest.approx(result(traced.out)[1])
    assert len(rewards) == 2  # one a batch


def test_update_contains_its_parts(traced):
    """The optimizer's steps and the micro-batches lie in the update."""
    updates = traced.spans("actor.update")
    for name, each in (("optimizer.step", 1), ("actor.micro_batch", 2)):
        spans = traced.spans(name)
        assert len(spans) == each * len(updates) == each * 3
        for number, span in enumerate(spans):
            update = updates[number // each]
            assert update.start_ns <= span.start_ns and span.end_ns <= update.end_ns


def test_a_rank_says_who_it_is(traced):
    (trainer,) = [process for process in traced.recording.processes if process.rank is not None]
    assert (trainer.role, trainer.rank, trainer.device["uuid"]) == ("worker", 0, "cpu-0")


def test_contracts_hold_for_real_packages(trl_environment):
    """The contracts of hooks hold for the packages as installed.

    TRL, torch_memory_saver, FSDP1, FSDP2 and torch as installed: every hook binds, keeps its face, and is undone.
    """
    done = run_contracts(trl_environment, "trl or torch_memory_saver or fsdp or autograd")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout, done.stdout[-2000:]
