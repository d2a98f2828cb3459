"""TRL's GRPOTrainer beside an engine that sleeps, with a ref, a model that rewards, and adapters.

The trainer, its models and its way to the engine are TRL's; the engine is a stand-in, for vLLM's sleeps on a GPU only.
tests/gpu/test_gpu_trl.py has the real one.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from framework_runs import TIMEOUT_SECONDS, result, run_contracts, trace

from rltrace.analysis.summary import summarize

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)

PROGRAM = """
    import json
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification
    from trl import GRPOConfig, GRPOTrainer
    from vllm.entrypoints import llm
    from rltrace.instrument.memory.sharded_models import MODELS

    def held():
        return {row: size for row, size in MODELS().items() if size}

    words = ["<pad>", "<eos>", *map(str, range(62))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    shape = dict(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
    )
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained("model")
    Qwen3ForSequenceClassification(Qwen3Config(**shape, num_labels=1)).save_pretrained("reward")
    tokenizer.save_pretrained("model")
    tokenizer.save_pretrained("reward")

    def even(completion_ids, **_):
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    def adapters():
        from peft import LoraConfig
        return LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])

    at_start = []
    llm.ON_START.append(lambda: at_start.append(held()))
    trainer = GRPOTrainer(
        "model",
        reward_funcs=[even, "reward"],
        args=GRPOConfig(
            "out", use_cpu=True, bf16=False, max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            num_generations=4, max_completion_length=8, beta=0.1, report_to=[], save_strategy="no", logging_steps=1,
            disable_tqdm=True, seed=0, use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=True,
            model_init_kwargs={"dtype": "float32"},
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{n} {n + 1} {n + 2}"} for n in range(16)]),
        processing_class=tokenizer,
        peft_config=adapters() if ADAPTERS else None,
    )
    trainer.train()

    def size(model):
        return 0 if model is None else sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())

    models = {"actor": trainer.model, "ref": trainer.ref_model, "reward": trainer.reward_funcs[1]}
    sizes = {name: size(model) for name, model in models.items()}
    print("RESULT " + json.dumps({"at_start": at_start, "at_end": held(), "sizes": sizes, "calls": llm.CALLS}))
"""
HERE = Path(__file__).parent
VARIABLES = {"PYTHONPATH": str(HERE / "vllm_stand_in")}
STEPS = 3


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "adapters"])
def has_adapters(request):
    return request.param


@pytest.fixture(scope="module")
def traced(has_adapters, trl_environment, tmp_path_factory):
    source = PROGRAM.replace("ADAPTERS", str(has_adapters))
    return trace(trl_environment, tmp_path_factory.mktemp("traced"), source, **VARIABLES)


def test_models_have_owners_before_the_engine(traced, has_adapters):
    """Every model has its owner before the engine is made.

    With adapters there is no ref: the policy without them stands for it.
    """
    said = result(traced.out)
    params = {f"{name}.params_host_bytes": size for name, size in said["sizes"].items() if size}
    assert set(params) == {
        f"{name}.params_host_bytes" for name in ("actor", "reward", *(() if has_adapters else ["ref"]))
    }
    assert said["at_start"] == [params]
    assert {row: size for row, size in said["at_end"].items() if ".params" in row} == params


def test_engine_phases_do_not_overlap(traced):
    """Waking up, syncing and sleeping are phases that do not overlap.

    They are in the order of what was asked of the engine, which sleeps from its start-up on.
    """
    asked = [call for call, *_ in result(traced.out)["calls"] if call != "load"]
    assert asked == ["sleep", *["wake_up", "wake_up", "sleep"] * STEPS]
    names = ("weight_sync", "rollout.wake_weights", "rollout.wake_kv_cache", "rollout.generate", "rollout.sleep")
    phases = sorted((span for name in names for span in traced.spans(name)), key=lambda span: span.start_ns)
    step = ["weight_sync", "rollout.wake_weights", "weight_sync", *names[2:]]
    assert [span.name for span in phases] == ["rollout.sleep", *step * STEPS]
    for span, following in pairwise(phases):
        assert span.end_ns <= following.start_ns
    assert {span.args["level"] for span in traced.spans("rollout.sleep")} == {2}
    assert {span.args["tags"][0] for span in traced.spans("rollout.wake_kv_cache")} == {"kv_cache"}
    moves = [(move.name, move.verdict) for move in summarize(traced.recording).sleeps]
    assert moves == [(span.name, "ok") for span in phases if "sync" not in span.name and "generate" not in span.name]


def test_a_sync_is_divided_into_stages(traced, has_adapters):
    """Every parameter is gathered and loaded; adapters are merged before and taken out behind it."""
    loaded = [name for call, *name in result(traced.out)["calls"] if call == "load"]
    syncs = summarize(traced.recording).weight_sync
    assert [sync.step for sync in syncs] == list(range(STEPS))
    whole_bytes = result(traced.out)["sizes"]["reward"]  # of the same shape, but for its head
    for sync in syncs:
        merging = ["weight_sync.merge"] if has_adapters else []
        stages = {"allocator.empty_cache", *merging, "weight_sync.gather", "weight_sync.load"}
        assert set(sync.stages) == stages | {"weight_sync.reset_cache"}
        assert sync.tensors == sync.stages["weight_sync.load"].spans == len(loaded) // STEPS
        assert sync.bytes == sync.stages["weight_sync.gather"].bytes == pytest.approx(whole_bytes, rel=0.1)
        assert sync.rest_seconds <= 0.05 * sync.seconds
        apart = sum(stage.seconds for stage in sync.stages.values())
        assert apart + sync.rest_seconds == pytest.approx(sync.seconds), "no two stages at once"


def test_steps_abut(traced):
    """To log and to fetch the next batch belongs to the step before: only microseconds are in none."""
    steps = traced.spans("step")
    assert [step.args["step"] for step in steps] == list(range(STEPS))
    for step, following in pairwise(steps):
        assert 0 <= following.start_ns - step.end_ns < 1_000_000
        assert step.end_ns > max(
            update.end_ns for update in traced.spans("actor.update") if update.start_ns < step.end_ns
        )


def test_contracts_hold_for_optional_packages(trl_environment):
    """Every hook on an optional package binds, keeps the face of what it wraps, and is undone."""
    done = run_contracts(trl_environment, "trl", **VARIABLES)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout, done.stdout[-2000:]
