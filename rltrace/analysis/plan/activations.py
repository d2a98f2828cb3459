"""What a forward and a backward keep and need for a while, in the order in which transformers' modules allocate it.

Sizes are of bf16 compute with scaled-dot-product attention, which keeps no matrix of scores. N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rltrace.analysis.plan.shapes import ModelShape

BF16 = 2
FP32 = 4


class Kept(NamedTuple):
    """Sizes of the tensors that autograd keeps of one layer, and of what its backward needs besides."""

    kept: list[int]
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
    backward = [BF16 * hidden, BF16 * hidden, *mlp[:3]]
    return Kept(*([size * tokens for size in sizes] for sizes in (kept, backward)))


FREED = 0
"""In place of a size."""


def order_of_layer(shape: ModelShape, tokens: int) -> Iterator[tuple[str, int]]:
    """Yield each tensor of a forward of which nothing is kept, by a name, with its size or `FREED`; `out` stays."""
    hidden, query, key, width = (tokens * size for size in sizes_of(shape))
    yield from _norm("normed", hidden)
    for name, size in (("query", query), ("key", key)):
        yield f"{name} projected", BF16 * size
        if shape.model_type.startswith("qwen3"):
            yield from _norm(name, size)
            yield f"{name} projected", FREED
    yield "value", BF16 * key
    is_normed = shape.model_type.startswith("qwen3")
    for name, size in (("query", query), ("key", key)):
        yield from _turned(name, size)
    for name in ("query", "key"):
        yield name if is_normed else f"{name} projected", FREED
    yield "attended", BF16 * query
    yield "sums", FP32 * tokens * shape.num_attention_heads
    yield "projected", BF16 * hidden
    for name in ("query turned", "key turned", "value", "attended", "sums", "normed"):
        yield name, FREED
    yield "residual", BF16 * hidden
    yield "projected", FREED
    yield from _norm("normed", hidden)
    yield "gate", BF16 * width
    yield "activated", BF16 * width
    yield "gate", FREED
    yield "up", BF16 * width
    yield "product", BF16 * width
    yield "activated", FREED
    yield "up", FREED
    yield "down", BF16 * hidden
    yield "product", FREED
    yield "normed", FREED
    yield "out", BF16 * hidden
    yield "down", FREED
    yield "residual", FREED


def sizes_of(shape: ModelShape) -> tuple[int, int, int, int]:
    """Return the numbers of one token in a hidden state, the queries, the keys and the MLP."""
    return shape.hidden_size, shape.query_size, shape.key_size, shape.mlp_width()


def _norm(name: str, size: int) -> Iterator[tuple[str, int]]:
    yield "in fp32", FP32 * size
    yield "squares", FP32 * size
    yield "squares", FREED
    yield "scaled", FP32 * size
    yield "in fp32", FREED
    yield "cast", BF16 * size
    yield name, BF16 * size
    yield "scaled", FREED
    yield "cast", FREED


def _turned(name: str, size: int) -> Iterator[tuple[str, int]]:
    """Yield what the rotary embedding makes."""
    yield "by cosine", BF16 * size
    yield "negated", BF16 * size // 2
    yield "half turned", BF16 * size
    yield "negated", FREED
    yield "by sine", BF16 * size
    yield "half turned", FREED
    yield f"{name} turned", BF16 * size
    yield "by cosine", FREED
    yield "by sine", FREED


class Logits(NamedTuple):
    """Sizes of the tensors of N rows over the whole vocabulary."""

    logits: int
    scores: int
    """One of them as log-probs are computed of it, the first position of each sequence left out."""
    hidden: int
    """What the last layer returns."""
    hidden_fp32: int


def of_logits(shape: ModelShape, sequences: int, sequence_tokens: int, *, in_fp32: bool) -> Logits:
    """Return what the head and the log-probs of a micro-batch make."""
    tokens = sequences * sequence_tokens
    rows = sequences * (sequence_tokens - 1)
    return Logits(
        BF16 * tokens * shape.vocab_size,
        (FP32 if in_fp32 else BF16) * rows * shape.vocab_size,
        BF16 * tokens * shape.hidden_size,
        FP32 * tokens * shape.hidden_size,
    )
