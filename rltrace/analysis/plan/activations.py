"""What a forward and a backward keep and need for a while, in the order in which transformers' modules allocate it.

Sizes are of bf16 compute with scaled-dot-product attention, which keeps no matrix of scores. N tokens, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from rltrace.analysis.plan.shapes import ModelShape

BF16 = 2
FP32 = 4


class Kept(NamedTuple):
    """Sizes of the tensors that autograd keeps of one layer, and of what its forward and its backward need besides."""

    kept: list[int]
    forward: list[int]
    backward: list[int]


def of_layer(shape: ModelShape, tokens: int) -> Kept:
    """Return what one decoder layer keeps and needs for so many tokens."""
    hidden, query, key = shape.hidden_size, shape.query_size, shape.key_size
    width = shape.mlp_width()
    norm = [FP32 * hidden, BF16 * hidden, BF16 * hidden]  # in fp32, scaled, and what the projections read
    heads = [FP32 * query, BF16 * query, FP32 * key, BF16 * key] if shape.model_type.startswith("qwen3") else []
    attention = [BF16 * query, BF16 * key, BF16 * key, BF16 * query, BF16 * query]  # q, k, v, out, out in rows
    mlp = [BF16 * width] * 4  # gate, its activation, up, their product
    kept = [*norm, *heads, *attention, *norm, *mlp]
    forward = [BF16 * hidden, BF16 * hidden, *mlp[:3]]
    backward = [BF16 * hidden, BF16 * hidden, *mlp[:3]]
    return Kept(*([size * tokens for size in sizes] for sizes in (kept, forward, backward)))


class Logits(NamedTuple):
    """Sizes of the tensors of N rows over the whole vocabulary."""

    logits: int
    scores: int
    """One of them as log-probs are computed of it, the first position of each sequence left out."""
    hidden: int


def of_logits(shape: ModelShape, sequences: int, sequence_tokens: int, *, in_fp32: bool) -> Logits:
    """Return what the head and the log-probs of a micro-batch make."""
    tokens = sequences * sequence_tokens
    rows = sequences * (sequence_tokens - 1)
    return Logits(
        BF16 * tokens * shape.vocab_size,
        (FP32 if in_fp32 else BF16) * rows * shape.vocab_size,
        BF16 * tokens * shape.hidden_size,
    )
