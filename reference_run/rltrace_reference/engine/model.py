"""Qwen3 for inference: fused projections, a slotted KV cache, prefill and decode in one forward.

Not the actor's model: that is transformers' own. Here every weight is a view of one block of memory that can sleep.
Shapes: R running sequences, L new tokens of each, T positions so far, H heads, G KV heads, D head size, C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from rltrace_reference.config import BF16_BYTES, ModelConfig

FUSED = {
    "self_attn.q_proj.weight": "self_attn.qkv_proj.weight",
    "self_attn.k_proj.weight": "self_attn.qkv_proj.weight",
    "self_attn.v_proj.weight": "self_attn.qkv_proj.weight",
    "mlp.gate_proj.weight": "mlp.gate_up_proj.weight",
    "mlp.up_proj.weight": "mlp.gate_up_proj.weight",
}
"""Parameter of a checkpoint -> the engine's matrix that holds its rows, in this order."""

ALIGNMENT = 64
LENGTHS = 8
"""Attention looks back over a multiple of so many positions: a library compiles a kernel for every length."""


class Weights:
    """The engine's matrices in one block of bytes, and where each parameter of a checkpoint lies in them."""

    def __init__(self, config: ModelConfig, block: Tensor) -> None:
        self.matrices: dict[str, Tensor] = {}
        """Matrices by the engine's name, fused; bf16."""
        self.parameters: dict[str, Tensor] = {}
        """Parameters by the checkpoint's name; contiguous rows of the matrices."""
        offset = 0
        for name, members in matrices(config).items():
            rows = sum(shape[0] for shape in members.values())
            columns = next(iter(members.values()))[1:]
            size = BF16_BYTES * rows * (columns[0] if columns else 1)
            matrix = block[offset : offset + size].view(torch.bfloat16).view(rows, *columns)
            self.matrices[name] = matrix
            parts = matrix.split([shape[0] for shape in members.values()])
            self.parameters |= dict(zip(members, parts, strict=True))
            offset += -(-size // ALIGNMENT) * ALIGNMENT

    @staticmethod
    def size_bytes(config: ModelConfig) -> int:
        """Return the bytes of the block that holds a model's weights."""
        sizes = [BF16_BYTES * sum(_rows_times_columns(m)) for m in matrices(config).values()]
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


class Qwen3:
    """Forward of new tokens of running sequences, keys and values kept in their slots.

    Source: the architecture of transformers' `Qwen3ForCausalLM`; a test holds the two against each other.
    """

    def __init__(self, config: ModelConfig, weights: Weights, kv_LSGTD: Tensor) -> None:
        """Args:
        config: Sizes.
        weights: The matrices, used in place.
        kv_LSGTD: Shape (layers, 2, slots, KV heads, tokens a slot, head size): the KV pool.
        """
        self.config, self.w, self.kv = config, weights.matrices, kv_LSGTD
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.outer(torch.arange(kv_LSGTD.shape[4], dtype=torch.float32), config.rope_theta**-exponents)
        angles = torch.cat((angles, angles), dim=-1)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def forward(self, tokens_RL: Tensor, starts_R: Tensor, slots_R: Tensor) -> Tensor:
        """Return hidden states of the new tokens, whose keys and values are written into the slots.

        Args:
            tokens_RL: New tokens, padded on the right.
            starts_R: Position of the first new token of each sequence.
            slots_R: Slot of each sequence.

        Returns:
            Shape (R, L, C); what stands at padding means nothing.
        """
        positions_RL = starts_R[:, None] + torch.arange(tokens_RL.shape[1])
        most = self.kv.shape[4]
        length = min(-(-(int(positions_RL.max()) + 1) // LENGTHS) * LENGTHS, most)
        future_RLT = torch.arange(length) > positions_RL[:, :, None]
        x = self.w["model.embed_tokens.weight"][tokens_RL]
        for layer in range(self.config.num_hidden_layers):
            name = f"model.layers.{layer}."
            normed = self._norm(x, name + "input_layernorm.weight")
            x = x + self._attend(normed, layer, positions_RL, slots_R, future_RLT)
            normed = self._norm(x, name + "post_attention_layernorm.weight")
            gate, up = linear(normed, self.w[name + "mlp.gate_up_proj.weight"]).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, self.w[name + "mlp.down_proj.weight"])
        return self._norm(x, "model.norm.weight")

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """Return logits, shape (R, vocabulary), float32."""
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        return linear(hidden_RC, head).float()

    def _attend(self, x_RLC: Tensor, layer: int, positions_RL: Tensor, slots_R: Tensor, future_RLT: Tensor) -> Tensor:
        c, name = self.config, f"model.layers.{layer}.self_attn."
        sizes = [c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads]
        qkv = linear(x_RLC, self.w[name + "qkv_proj.weight"]).unflatten(-1, (sum(sizes), c.head_dim))
        q, k, v = qkv.split(sizes, dim=2)
        cos, sin = self.cos[positions_RL][:, :, None], self.sin[positions_RL][:, :, None]
        q = _rotate(self._norm(q, name + "q_norm.weight"), cos, sin)
        k = _rotate(self._norm(k, name + "k_norm.weight"), cos, sin)

        keys, values = self.kv[layer]
        keys[slots_R[:, None], :, positions_RL] = k
        values[slots_R[:, None], :, positions_RL] = v
        length = future_RLT.shape[-1]
        keys_RGTD, values_RGTD = keys[:, :, :length][slots_R], values[:, :, :length][slots_R]

        q = q.transpose(1, 2).unflatten(1, (c.num_key_value_heads, -1))  # R G H/G L D
        scores = (q @ keys_RGTD[:, :, None].transpose(-1, -2)).float() * c.head_dim**-0.5
        # masked_fill, not an added -inf: a slot's unwritten positions hold the wake-up pattern.
        weights = scores.masked_fill(future_RLT[:, None, None], float("-inf")).softmax(dim=-1).bfloat16()
        mixed = (weights @ values_RGTD[:, :, None]).flatten(1, 2).transpose(1, 2).flatten(2)
        return linear(mixed, self.w[name + "o_proj.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return self.w[name] * wide.bfloat16()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding, with halves as pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def matrices(config: ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the engine's matrices with the parameters in them and their shapes."""
    matrices: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in config.shapes().items():
        prefix, short = _split_layer(name)
        matrices.setdefault(prefix + FUSED.get(short, short), {})[name] = shape
    return matrices


def _split_layer(name: str) -> tuple[str, str]:
    """Split `model.layers.0.mlp.up_proj.weight` into (`model.layers.0.`, `mlp.up_proj.weight`)."""
    parts = name.split(".", 3)
    return (".".join(parts[:3]) + ".", parts[3]) if name.startswith("model.layers.") else ("", name)


def _rows_times_columns(members: dict[str, tuple[int, ...]]) -> Iterator[int]:
    for shape in members.values():
        yield shape[0] * (shape[1] if len(shape) > 1 else 1)
