"""TRL's settings, by the names of `GRPOConfig` and of its scripts' arguments, with the defaults of TRL 1.16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rltrace.analysis.plan.cards import Card
from rltrace.analysis.plan.engine import Engine
from rltrace.analysis.plan.settings import Names, Settings, divided
from rltrace.analysis.plan.settings_reference import graph_sizes
from rltrace.analysis.plan.settings_verl import lora_elements
from rltrace.analysis.plan.shapes import ModelShape
from rltrace.analysis.plan.trainer import Trainer
from rltrace.analysis.plan.values import Values
from rltrace.errors import ConfigError

MODEL_PATH = "model_name_or_path"
NAMES = Names(
    framework="TRL",
    utilization="vllm_gpu_memory_utilization",
    bucket="(weights go one by one)",
    micro_batch="per_device_train_batch_size",
    recompute="gradient_checkpointing",
)
DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "max_prompt_length": 512,
    "max_completion_length": 512,
    "gradient_checkpointing": True,
    "bf16": True,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_tensor_parallel_size": 1,
    "vllm_enable_sleep_mode": False,
    "beta": 0.0,
    "use_peft": False,
    "lora_r": 16,
    "dtype": "float32",
    "optim": "adamw_torch_fused",
    "num_processes": 1,
}
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
BATCHED_TOKENS = 4096
"""`max_num_batched_tokens` that TRL gives its own vLLM (`trl/generation/vllm_generation.py`)."""


def settings(said: Mapping[str, Any], card: Card, model: ModelShape, where: str, ranks: int | None) -> Settings:
    """Return the plan's settings.

    Args:
        said: What is set, by name.
        card: The GPU.
        model: The shape of the model.
        where: Where it was said, for errors.
        ranks: Processes, if the command line says how many.

    Raises:
        ConfigError: something does not divide, contradicts, or is not known to plan.
    """
    values = Values(said, DEFAULTS, where)
    ranks = ranks or values.whole("num_processes")
    if values.is_on("bf16") and values.is_on("fp16"):
        raise ConfigError(f"{where}: bf16 and fp16 are both true; give one of them")
    sequences = values.whole("per_device_train_batch_size")
    divided(
        "sequences of a step",
        sequences * ranks * values.whole("gradient_accumulation_steps"),
        values.whole("num_generations"),
        "num_generations",
    )
    trainer = _trainer(values, model, ranks, sequences)
    engine = _engine(values, card, model, ranks) if values.is_on("use_vllm") else None
    return Settings(
        card=card,
        ranks=ranks,
        trainer=trainer,
        engine=engine,
        sync=None,
        names=NAMES,
        most_sequences=sequences * values.whole("gradient_accumulation_steps"),
        shares_process=True,
        is_measured=False,
        unknown=("how TRL's trainer keeps parameters and gradients: whole on every rank were taken, as DDP keeps them",)
        + (() if engine is not None else ("generation by transformers, whose cache is not in this plan",)),
    )


def _trainer(values: Values, model: ModelShape, ranks: int, sequences: int) -> Trainer:
    dtype = ELEMENT_BYTES[values.one_of("dtype", tuple(ELEMENT_BYTES))]
    is_peft = values.is_on("use_peft")
    return Trainer(
        model=model,
        replicas=ranks,
        is_gathered=False,
        param_bytes=dtype,
        reduce_bytes=dtype,
        optimizer_bytes=dtype,
        optimizer_is_foreach="fused" not in values.text("optim"),
        trained=lora_elements(model, values.whole("lora_r")) if is_peft else None,
        recompute=values.is_on("gradient_checkpointing"),
        sequences=sequences,
        log_prob_sequences=sequences,
        update_sequences=sequences * values.whole("gradient_accumulation_steps"),
        sequence_tokens=values.whole("max_prompt_length") + values.whole("max_completion_length"),
        has_ref=float(values.of("beta") or 0) != 0 and not is_peft,
        ref_bytes=dtype,
    )


def _engine(values: Values, card: Card, model: ModelShape, ranks: int) -> Engine | None:
    if values.one_of("vllm_mode", ("colocate", "server")) == "server":
        return None
    parallel = values.whole("vllm_tensor_parallel_size")
    engines = divided("processes", ranks, parallel, "vllm_tensor_parallel_size")
    step = values.whole("per_device_train_batch_size") * values.whole("gradient_accumulation_steps") * ranks
    prompt = values.whole("max_prompt_length")
    running = -(-step // engines)
    return Engine(
        model=model,
        gpu_memory_utilization=values.share("vllm_gpu_memory_utilization"),
        max_num_seqs=running,
        max_model_len=values.whole_or("vllm_max_model_length", prompt + values.whole("max_completion_length")),
        max_num_batched_tokens=BATCHED_TOKENS,
        sequences=running,
        prompt_tokens=prompt,
        graph_sizes=graph_sizes(running),
        sleep_level=2 if values.is_on("vllm_enable_sleep_mode") else 0,
        tensor_parallel=parallel,
    )
