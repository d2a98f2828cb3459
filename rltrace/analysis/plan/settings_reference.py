"""The reference run's configuration, as `rltrace_reference.config` has checked it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rltrace.analysis.plan.cards import Card
from rltrace.analysis.plan.engine import Engine
from rltrace.analysis.plan.settings import Names, Settings, Sync, divided
from rltrace.analysis.plan.shapes import ModelShape, checked
from rltrace.analysis.plan.trainer import Trainer
from rltrace.errors import ConfigError

MEBIBYTE = 1 << 20
POSITIONS = 32_768
"""`max_position_embeddings` of transformers' Qwen3Config, which the run leaves as it is."""
LARGEST_BATCH = 16_384
"""vLLM's `max_num_batched_tokens` for its `LLM` class on a card of 70 GiB or more; half of it on smaller ones."""
LARGE_CARD = 70 << 30
CAPTURED = (1, 2, 4)
"""Batch sizes of graphs below 8; then there is one every 8 (vLLM's `cudagraph_capture_sizes`)."""
NAMES = Names(
    framework="rltrace_reference",
    utilization="rollout.gpu_memory_utilization",
    bucket="rollout.bucket_megabytes",
    micro_batch="actor.micro_batch",
    ref_offload="ref.offload",
    offload="actor.offload",
)


def settings(config: Mapping[str, Any], card: Card) -> Settings:
    """Return the plan's settings of a configuration.

    Raises:
        ConfigError: what is asked for contradicts itself.
    """
    rollout, actor, task = config["rollout"], config["actor"], config["task"]
    if rollout["engine"] == "sglang":
        raise ConfigError(
            "rollout.engine: sglang, and of the reference run's engines plan knows vllm alone; plan it with that, or "
            "run it"
        )
    ranks = config["ranks"]
    model = shape(config["model"])
    tokens = task["prompt_tokens"] + rollout["max_tokens"]
    sequences = divided("task.prompts", task["prompts"], ranks, "ranks") * rollout["n"]
    in_minibatch = divided("sequences of a rank", sequences, actor["minibatches"], "actor.minibatches")
    if rollout["sleep_level"] == 0 and rollout["sync"] is False:
        raise ConfigError("rollout.sync: false is an experiment without a sync; plan needs rollout.sync: true")
    trainer = Trainer(
        model=model,
        shards=ranks,
        sequences=min(actor["micro_batch"], in_minibatch),
        log_prob_sequences=min(actor["micro_batch"], sequences),
        update_sequences=in_minibatch,
        rollout_sequences=sequences,
        sequence_tokens=tokens,
        ref_offload=config["ref"]["offload"],
        offload=actor["offload"],
    )
    return Settings(
        card=card,
        ranks=ranks,
        trainer=trainer,
        engine=_engine(config, card, model, tokens, sequences),
        sync=Sync(
            bucket_bytes=int(rollout["bucket_megabytes"] * MEBIBYTE),
            buckets=0 if rollout["wake_up"] == "relaunch" else rollout["buckets"],
            element_bytes=2,
            keeps=rollout["keep_buckets"],
            is_freed_at_once=actor["offload"],
        ),
        names=NAMES,
        most_sequences=in_minibatch,
    )


def _engine(config: Mapping[str, Any], card: Card, model: ModelShape, tokens: int, sequences: int) -> Engine:
    rollout = config["rollout"]
    slots, longest = rollout["slots"], rollout["max_model_len"] or tokens
    batch = LARGEST_BATCH if card.total_bytes >= LARGE_CARD else LARGEST_BATCH // 2
    return Engine(
        model=model,
        gpu_memory_utilization=rollout["gpu_memory_utilization"],
        max_num_seqs=slots,
        max_model_len=longest,
        max_num_batched_tokens=min(slots * longest, batch),
        sequences=sequences,
        prompt_tokens=config["task"]["prompt_tokens"],
        enforce_eager=rollout["enforce_eager"],
        graph_sizes=graph_sizes(slots),
        is_staged=rollout["wake_up"] == "staged",
        sleep_level=rollout["sleep_level"],
        is_relaunched=rollout["wake_up"] == "relaunch",
    )


def graph_sizes(sequences: int) -> int:
    """Return of how many batch sizes vLLM captures graphs, up to 512."""
    most = min(sequences, 512)
    return sum(size <= most for size in CAPTURED) + most // 8


def shape(model: Mapping[str, Any]) -> ModelShape:
    """Return the shape of the model: a Qwen3."""
    names = [name for name in ModelShape.__struct_fields__ if name in model]
    sizes = {name: model[name] for name in names}
    return checked(ModelShape(model_type="qwen3", max_position_embeddings=POSITIONS, **sizes), "model")
