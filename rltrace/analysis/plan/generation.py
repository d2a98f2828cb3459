"""What torch reserves in the engine's process while it generates: vLLM's largest prefill, allocation by allocation.

The order is that of vLLM's eager layers (`model_executor/models/qwen3.py`): norms are fused and in place, the caller
of a layer keeps what the layer reads until it returns, and FlashAttention 3 takes a result for each part into which it
splits the keys.
"""

from __future__ import annotations

from math import ceil, inf
from typing import NamedTuple

from rltrace.analysis.plan.allocator import SEGMENT_ROUNDING, Block, CachingAllocator
from rltrace.analysis.plan.engine import Engine

BF16, FP32 = 2, 4
LAYERS = 4
"""How many are walked through: each later one repeats the third."""
MULTIPROCESSORS = 132
"""Of Hopper."""
QUERY_TILE = KEY_TILE = 128
"""Rows that a thread block of FlashAttention 3 takes, with heads of up to 128 and causal masks (`tile_size.h`)."""
UNSPLIT_TILES = 4
"""Keys in at most so many tiles are never split."""
FULL_SHARE = 0.8
"""Share of the multiprocessors that have work from which on keys are not split."""
NEAR_BEST = 0.85
"""The fewest parts are taken that keep the multiprocessors so nearly as busy as the best number of parts."""
SAMPLED = (BF16, FP32, FP32, FP32, FP32)
"""Of each logit: as the head makes it, as the sampler reads it, its log-prob, its probability, and a random number."""


class Generation(NamedTuple):
    """The engine's cache in a rollout."""

    reserved_bytes: int
    """What it grows by."""
    least_bytes: int
    """What it needs at least, if torch gives its cache back whenever memory runs out."""


def generation(engine: Engine) -> Generation:
    """Return what the largest prefill and its sampling take."""
    most = reserved(engine)
    assert most is not None
    too_few, enough = 0, most // SEGMENT_ROUNDING
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if reserved(engine, middle * SEGMENT_ROUNDING) else (middle, enough)
    return Generation(most, enough * SEGMENT_ROUNDING)


def reserved(engine: Engine, limit_bytes: float = inf) -> int | None:
    """Return what torch reserves on a device of this size; None if that is too small."""
    running = min(engine.sequences, engine.max_num_seqs)
    allocator = CachingAllocator(limit_bytes=limit_bytes)
    try:
        prefill(engine, allocator, min(running * engine.prompt_tokens, engine.max_num_batched_tokens))
        for size in SAMPLED:
            allocator.allocate(size * running * engine.model.vocab_size)
    except MemoryError:
        return None
    return allocator.most_reserved_bytes


def prefill(engine: Engine, allocator: CachingAllocator, tokens: int) -> None:
    """Run some layers on the tokens; what the last one leaves stays until a token is sampled."""
    model, parallel = engine.model, engine.tensor_parallel
    query, key = (max(size // parallel, model.head_dim) for size in (model.query_size, model.key_size))

    def take(width: int) -> Block:
        return allocator.allocate(BF16 * tokens * width)

    def give(*blocks: Block) -> None:
        for block in blocks:
            allocator.release(block)

    hidden = take(model.hidden_size)  # and the residual
    for layer in range(LAYERS):
        read = hidden if layer else take(model.hidden_size)  # later norms are in place
        heads = [take(query + 2 * key), take(query), take(key), take(query)]  # fused, with their norms, and the result
        give(*[allocator.allocate(size) for size in attention(engine, tokens, query // model.head_dim)])
        attended = take(model.hidden_size)
        give(*heads, *([] if layer else [read]))
        width = model.mlp_width() // parallel
        fused, product, hidden = take(2 * width), take(width), take(model.hidden_size)
        give(fused, product, attended, *([read] if layer else []))


def attention(engine: Engine, tokens: int, heads: int) -> list[int]:
    """Return the sizes of what FlashAttention 3 needs for a while."""
    sums = FP32 * heads * tokens
    parts = key_parts(engine, heads)
    return [sums] if parts == 1 else [sums, parts * sums * engine.model.head_dim, parts * sums]


def key_parts(engine: Engine, heads: int) -> int:
    """Return into how many parts the keys of a prompt are split, by `num_splits_heuristic` of FlashAttention 3.

    It takes one sequence for the whole batch, since lengths vary.
    """
    key_heads = max(engine.model.num_key_value_heads // engine.tensor_parallel, 1)
    tiles = key_heads * ceil(engine.prompt_tokens * (heads // key_heads) / QUERY_TILE)
    key_tiles = ceil(engine.prompt_tokens / KEY_TILE)
    if tiles >= FULL_SHARE * MULTIPROCESSORS or key_tiles <= UNSPLIT_TILES:
        return 1
    waves = [tiles * parts / MULTIPROCESSORS for parts in range(1, min(key_tiles, MULTIPROCESSORS) + 1)]
    busy = [each / ceil(each) for each in waves]
    return next(parts for parts, share in enumerate(busy, 1) if share >= NEAR_BEST * max(busy))
