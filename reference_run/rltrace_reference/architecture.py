"""The model of a run as transformers and vLLM know it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rltrace_reference.config import ModelConfig

if TYPE_CHECKING:  # two seconds to import, which the driver need not wait for
    from transformers import Qwen3Config

WEIGHTS_FILE = "model.safetensors"
"""File of a checkpoint in one file."""


def transformers_config(config: ModelConfig) -> Qwen3Config:
    """Return the configuration with the sizes of the checkpoint at `config.path`, or those in our own configuration."""
    from transformers import Qwen3Config

    if config.path is not None:
        return Qwen3Config.from_pretrained(config.path, local_files_only=True)
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_word_embeddings,
        initializer_range=config.initializer_range,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
