"""verl's settings, by the names of its hydra configuration, with the defaults of verl 0.9.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rltrace.analysis.plan.cards import Card
from rltrace.analysis.plan.engine import Engine
from rltrace.analysis.plan.settings import Names, Settings, Sync, divided
from rltrace.analysis.plan.shapes import ModelShape
from rltrace.analysis.plan.trainer import Trainer
from rltrace.analysis.plan.values import Values
from rltrace.errors import ConfigError

MEBIBYTE = 1 << 20
ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MODEL_PATH = "actor_rollout_ref.model.path"
NAMES = Names(
    framework="verl",
    utilization=f"{ROLLOUT}.gpu_memory_utilization",
    bucket=f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
    micro_batch=f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    ref_offload=f"{REF}.fsdp_config.param_offload",
    offload=f"{ACTOR}.fsdp_config.param_offload",
    recompute="actor_rollout_ref.model.enable_gradient_checkpointing",
)
DEFAULTS = {
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": False,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.model.lora_rank": 0,
    f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.use_dynamic_bsz": False,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ACTOR}.fsdp_config.fsdp_size": -1,
    f"{ACTOR}.fsdp_config.model_dtype": "fp32",
    f"{ACTOR}.fsdp_config.param_offload": False,
    f"{ACTOR}.fsdp_config.optimizer_offload": False,
    f"{ACTOR}.fsdp_config.offload_policy": False,
    f"{REF}.fsdp_config.param_offload": False,
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.max_num_seqs": 1024,
    f"{ROLLOUT}.max_num_batched_tokens": 8192,
    f"{ROLLOUT}.enforce_eager": False,
    f"{ROLLOUT}.free_cache_engine": True,
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 2048,
}
ELEMENT_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
VERL_GRAPH_SIZES = 67
"""Batch sizes of graphs for 512 sequences or more: 1, 2, 4 and every 8 up to 512."""


def settings(said: Mapping[str, Any], card: Card, model: ModelShape, where: str) -> Settings:
    """Return the plan's settings.

    Args:
        said: What is set, by dotted names.
        card: The GPU.
        model: The shape of the model.
        where: Where it was said, for errors.

    Raises:
        ConfigError: something does not divide, contradicts, or is not known to plan.
    """
    values = Values(said, DEFAULTS, where)
    _check(values)
    ranks = values.whole("trainer.nnodes") * values.whole("trainer.n_gpus_per_node")
    trainer, sequences, unknown = _trainer(values, model, ranks)
    return Settings(
        card=card,
        ranks=ranks,
        trainer=trainer,
        engine=_engine(values, model, ranks),
        sync=Sync(
            bucket_bytes=int(values.of(NAMES.bucket) * MEBIBYTE),
            buckets=1,
            element_bytes=trainer.param_bytes,
            is_freed_at_once=True,
        ),
        names=NAMES,
        most_sequences=sequences,
        is_measured=values.text(f"{ACTOR}.strategy") == "fsdp2" and model.num_experts == 0,
        unknown=tuple(unknown),
    )


def _check(values: Values) -> None:
    values.one_of(f"{ROLLOUT}.name", ("vllm", "sglang"))
    values.one_of(f"{ACTOR}.strategy", ("fsdp", "fsdp2"))
    values.one_of(f"{ACTOR}.fsdp_config.model_dtype", tuple(ELEMENT_BYTES))
    policy, moved = f"{ACTOR}.fsdp_config.offload_policy", f"{ACTOR}.fsdp_config.param_offload"
    if values.is_on(policy) and values.is_on(moved):
        raise ConfigError(f"{values.where}: {policy} and {moved} are both true; give one of them")


def _trainer(values: Values, model: ModelShape, ranks: int) -> tuple[Trainer, int, list[str]]:
    tokens = values.whole("data.max_prompt_length") + values.whole("data.max_response_length")
    size = int(values.of(f"{ACTOR}.fsdp_config.fsdp_size"))
    shards = ranks if size in (-1, 0) else size
    replicas = divided("ranks", ranks, shards, f"{ACTOR}.fsdp_config.fsdp_size")
    in_minibatch = divided(
        f"{ACTOR}.ppo_mini_batch_size x rollout.n",
        values.whole(f"{ACTOR}.ppo_mini_batch_size") * values.whole(f"{ROLLOUT}.n"),
        ranks,
        "ranks",
    )
    dynamic = max(values.whole(f"{ACTOR}.ppo_max_token_len_per_gpu") // tokens, 1)
    usual = dynamic if values.is_on(f"{ACTOR}.use_dynamic_bsz") else _micro_batch(values, in_minibatch)
    log_probs = values.whole_or(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", usual)
    lora, unknown = values.of("actor_rollout_ref.model.lora_rank") or 0, _unknown(values)
    dtype = ELEMENT_BYTES[values.text(f"{ACTOR}.fsdp_config.model_dtype")]
    trainer = Trainer(
        model=model,
        shards=shards,
        replicas=replicas,
        param_bytes=dtype,
        optimizer_bytes=dtype,
        optimizer_is_foreach=True,
        trained=lora_elements(model, int(lora)) if lora else None,
        recompute=values.is_on("actor_rollout_ref.model.enable_gradient_checkpointing"),
        sequences=min(usual, in_minibatch),
        log_prob_sequences=log_probs,
        update_sequences=in_minibatch,
        sequence_tokens=tokens,
        has_ref=(values.is_on(f"{ACTOR}.use_kl_loss") or values.is_on("algorithm.use_kl_in_reward")) and not lora,
        ref_offload=values.is_on(f"{REF}.fsdp_config.param_offload"),
        ref_bytes=4,
        root_reshards=True,
        wraps_embedding=True,
        offload=values.is_on(f"{ACTOR}.fsdp_config.param_offload"),
        has_fp32_logits=False,
        is_expandable=True,
    )
    return trainer, in_minibatch, unknown


def _micro_batch(values: Values, in_minibatch: int) -> int:
    if values.of(NAMES.micro_batch) is None:
        raise ConfigError(
            f"{values.where}: neither {NAMES.micro_batch} nor {ACTOR}.use_dynamic_bsz is set; give one of them"
        )
    size = values.whole(NAMES.micro_batch)
    if in_minibatch % min(size, in_minibatch):
        raise ConfigError(
            f"{values.where}: {NAMES.micro_batch}: {size} does not divide the {in_minibatch} sequences of a rank in a "
            f"minibatch; give a divisor of {in_minibatch}"
        )
    return size


def lora_elements(model: ModelShape, rank: int) -> int:
    """Return how many numbers adapters of this rank have on every linear layer, which is PEFT's `all-linear`."""
    shapes = [shape for index in range(model.num_hidden_layers) for shape in model.layer(index).values()]
    return sum(rank * (shape[-1] + shape[-2]) for shape in shapes if len(shape) == 2)


def _engine(values: Values, model: ModelShape, ranks: int) -> Engine:
    parallel = values.whole(f"{ROLLOUT}.tensor_model_parallel_size")
    engines = divided("ranks", ranks, parallel, f"{ROLLOUT}.tensor_model_parallel_size")
    divided("num_attention_heads", model.num_attention_heads, parallel, f"{ROLLOUT}.tensor_model_parallel_size")
    prompt, response = values.whole("data.max_prompt_length"), values.whole("data.max_response_length")
    seqs = values.whole(f"{ROLLOUT}.max_num_seqs")
    return Engine(
        model=model,
        gpu_memory_utilization=values.share(NAMES.utilization),
        max_num_seqs=seqs,
        max_model_len=values.whole_or(f"{ROLLOUT}.max_model_len", prompt + response),
        max_num_batched_tokens=values.whole(f"{ROLLOUT}.max_num_batched_tokens"),
        sequences=-(-values.whole("data.train_batch_size") * values.whole(f"{ROLLOUT}.n") // engines),
        prompt_tokens=prompt,
        enforce_eager=values.is_on(f"{ROLLOUT}.enforce_eager"),
        graph_sizes=VERL_GRAPH_SIZES,
        sleep_level=2 if values.is_on(f"{ROLLOUT}.free_cache_engine") else 0,
        tensor_parallel=parallel,
    )


def _unknown(values: Values) -> list[str]:
    found = []
    if values.text("algorithm.adv_estimator") == "gae":
        found.append("the critic of algorithm.adv_estimator=gae is not in this plan: a Recording shows critic.*")
    if values.text(f"{ROLLOUT}.name") == "sglang":
        found.append("SGLang's own sizes: vLLM's were taken; a Recording shows rollout.*")
    if values.text(f"{ACTOR}.strategy") == "fsdp":
        found.append("FSDP1's flat parameters: FSDP2's were taken, of the same size; a Recording shows actor.params")
    if values.is_on(f"{ACTOR}.fsdp_config.optimizer_offload") != values.is_on(f"{ACTOR}.fsdp_config.param_offload"):
        found.append("offload of parameters or of the optimizer alone: both, or none, by param_offload")
    return found
