"""The shapes of a model's parameters, from the `config.json` of a checkpoint or from sizes that were given.

A model is an embedding, decoder layers, a norm and a head. Shapes are those of transformers, so counts are exact.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from rltrace.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""`model_type` of what is known."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "": {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
    "qwen2": {"attention_bias": True},
    "qwen2_moe": {"attention_bias": True, "decoder_sparse_step": 1, "mlp_only_layers": ()},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"head_dim": 128, "decoder_sparse_step": 1, "mlp_only_layers": ()},
    "mixtral": {"num_key_value_heads": 8},
}
"""What a `config.json` means by keys that it does not have: the defaults of each family's class in transformers."""


class UnknownModelError(ConfigError):
    """Nobody says the sizes of the model."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder-only transformer, in the words of transformers."""

    model_type: str = "qwen3"
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    num_experts: int = 0
    """0: dense."""
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    max_position_embeddings: int = 0
    quantization: str | None = None
    """`quant_method` of the checkpoint, if its weights are not of one type."""

    def embedding(self) -> Shapes:
        """Return the input embedding."""
        return {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}

    def head(self) -> Shapes:
        """Return the norm and the head, which is the embedding itself where they are tied."""
        shapes: Shapes = {"model.norm.weight": (self.hidden_size,)}
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def layer(self, index: int) -> Shapes:
        """Return one decoder layer."""
        named = {
            **self._attention(),
            **(self._experts() if self.is_sparse(index) else self._mlp("mlp", self.intermediate_size)),
            "input_layernorm.weight": (self.hidden_size,),
            "post_attention_layernorm.weight": (self.hidden_size,),
        }
        return {f"model.layers.{index}.{name}": shape for name, shape in named.items()}

    def parameters(self) -> Shapes:
        """Return every parameter by its name in transformers, tied ones once."""
        layers = [item for index in range(self.num_hidden_layers) for item in self.layer(index).items()]
        return self.embedding() | dict(layers) | self.head()

    def count(self) -> int:
        """Return the number of parameters."""
        return elements(self.parameters())

    def is_sparse(self, index: int) -> bool:
        """Return whether a layer has experts."""
        return (
            self.num_experts > 0
            and index not in self.mlp_only_layers
            and (self.model_type == "mixtral" or (index + 1) % self.decoder_sparse_step == 0)
        )

    @property
    def query_size(self) -> int:
        """Return the width of all queries of a token."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Return the width of all keys of a token."""
        return self.num_key_value_heads * self.head_dim

    def kv_bytes_per_token(self, element_bytes: float = 2) -> int:
        """Return bytes of keys and values of one token over all layers."""
        return int(2 * self.num_hidden_layers * self.key_size * element_bytes)

    def mlp_width(self) -> int:
        """Return how many elements of a token one activation of an MLP has, all experts that it goes to together."""
        sparse = self.num_experts_per_tok * (self.moe_intermediate_size or self.intermediate_size)
        sparse += self.shared_expert_intermediate_size
        return max(sparse if self.is_sparse(index) else self.intermediate_size for index in self._kinds())

    def _kinds(self) -> Iterator[int]:
        yield from range(max(self.num_hidden_layers, 1))

    def _attention(self) -> Shapes:
        hidden, query, key = self.hidden_size, self.query_size, self.key_size
        shapes: Shapes = {
            "self_attn.q_proj.weight": (query, hidden),
            "self_attn.k_proj.weight": (key, hidden),
            "self_attn.v_proj.weight": (key, hidden),
            "self_attn.o_proj.weight": (hidden, query),
        }
        if self.attention_bias:
            shapes |= {"self_attn.q_proj.bias": (query,)}
            shapes |= {"self_attn.k_proj.bias": (key,), "self_attn.v_proj.bias": (key,)}
            if not self.model_type.startswith("qwen2"):
                shapes["self_attn.o_proj.bias"] = (hidden,)
        if self.model_type.startswith("qwen3"):
            shapes |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        return shapes

    def _mlp(self, prefix: str, width: int) -> Shapes:
        hidden = self.hidden_size
        shapes: Shapes = {
            f"{prefix}.gate_proj.weight": (width, hidden),
            f"{prefix}.up_proj.weight": (width, hidden),
            f"{prefix}.down_proj.weight": (hidden, width),
        }
        if self.mlp_bias:
            shapes |= {f"{prefix}.gate_proj.bias": (width,), f"{prefix}.up_proj.bias": (width,)}
            shapes[f"{prefix}.down_proj.bias"] = (hidden,)
        return shapes

    def _experts(self) -> Shapes:
        """Return a router and its experts, which transformers keeps in two stacked parameters since 5.0."""
        hidden, width = self.hidden_size, self.moe_intermediate_size or self.intermediate_size
        shapes: Shapes = {
            "mlp.gate.weight": (self.num_experts, hidden),
            "mlp.experts.gate_up_proj": (self.num_experts, 2 * width, hidden),
            "mlp.experts.down_proj": (self.num_experts, hidden, width),
        }
        if self.shared_expert_intermediate_size:
            shapes |= self._mlp("mlp.shared_expert", self.shared_expert_intermediate_size)
            shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
        return shapes


def elements(shapes: Shapes) -> int:
    """Return how many numbers these are."""
    return sum(map(prod, shapes.values()))


def read_shape(path: str) -> ModelShape:
    """Return the shape that a checkpoint's folder, or its `config.json`, says.

    Raises:
        ConfigError: there is none (`UnknownModelError`), or it is of a family that is not known.
    """
    file = Path(path) / "config.json" if not path.endswith(".json") else Path(path)
    try:
        said = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        remedy = "give --model the folder of a checkpoint on this machine, or its config.json"
        raise UnknownModelError(f"{file}: {reason}", remedy) from None
    if not isinstance(said, dict):
        raise ConfigError(f"{file}: holds {type(said).__name__}, not an object; give a checkpoint's config.json")
    return shape_of(said, str(file))


def shape_of(said: Mapping[str, Any], where: str) -> ModelShape:
    """Return the shape that the keys of a `config.json` say.

    Args:
        said: The keys.
        where: Where they stand, for errors.

    Raises:
        ConfigError: the family is not known, a size is missing, or two contradict each other.
    """
    said = said.get("text_config", said)
    family = said.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"{where}: model_type {family!r} is not known; give one of {', '.join(FAMILIES)}, or its sizes by --shape"
        )
    said = DEFAULTS[""] | DEFAULTS.get(family, {}) | {key: value for key, value in said.items() if value is not None}
    experts = said.get("num_experts", said.get("num_local_experts", 0)) if family.endswith(("moe", "mixtral")) else 0
    sizes = {name: said[name] for name in ModelShape.__struct_fields__ if name in said} | {"num_experts": experts}
    sizes.setdefault("num_key_value_heads", said.get("num_attention_heads"))
    if "head_dim" not in sizes and sizes.get("num_attention_heads"):
        sizes["head_dim"] = said.get("hidden_size", 0) // said["num_attention_heads"]
    sizes["quantization"] = (said.get("quantization_config") or {}).get("quant_method")
    missing = [name for name in ModelShape.__struct_fields__ if name in _NEEDED and name not in sizes]
    if missing:
        raise ConfigError(f"{where}: does not say {missing[0]}; give a whole config.json, or {missing[0]} by --shape")
    try:
        shape = msgspec.convert(sizes, ModelShape)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}; give a whole number") from None
    return checked(shape, where)


_NEEDED = frozenset(
    ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size")
)


def checked(shape: ModelShape, where: str) -> ModelShape:
    """Return the shape.

    Raises:
        ConfigError: a size is none, or heads cannot be shared.
    """
    for name in sorted(_NEEDED | {"num_key_value_heads"}):
        if getattr(shape, name) < 1:
            raise ConfigError(f"{where}: {name} is {getattr(shape, name)}; give at least 1")
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise ConfigError(
            f"{where}: {shape.num_attention_heads} num_attention_heads do not divide over num_key_value_heads: "
            f"{shape.num_key_value_heads}; give a multiple of {shape.num_key_value_heads}"
        )
    return shape
