"""What vLLM takes of a card: its start-up check, its profile, its KV cache and its graphs, by the rules of its source.

`Worker.determine_available_memory` of vLLM 0.24 and 0.26 gives the KV cache what `gpu_memory_utilization` of CUDA's
total leaves beside the weights, the most that torch handed out while the largest batch ran, and what the process grew
by outside of torch. `request_memory` refuses to start if less than that share is free at that moment.
"""

from __future__ import annotations

from math import ceil, prod

import msgspec

from rltrace.analysis.plan import constants
from rltrace.analysis.plan.allocator import CachingAllocator, round_up
from rltrace.analysis.plan.amount import Amount
from rltrace.analysis.plan.shapes import ModelShape, Shapes

BLOCK_TOKENS = 16
"""vLLM's default `block_size` on CUDA."""
VOCABULARY_PADDING = 64
"""`DEFAULT_VOCAB_PADDING_SIZE` of `vocab_parallel_embedding.py`."""
MAPPING_BYTES = 2 << 20
"""Granularity of `cuMemCreate`."""


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a vLLM engine."""

    model: ModelShape
    gpu_memory_utilization: float
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    sequences: int
    """Requests of a step on this engine."""
    prompt_tokens: int
    enforce_eager: bool = False
    graph_sizes: int = constants.GRAPH_SIZES
    is_staged: bool = True
    """True: weights wake, the sync goes, then the KV cache wakes."""
    sleep_level: int = 2
    is_relaunched: bool = False
    """The engine ends after a rollout, and a new one starts for the next."""
    tensor_parallel: int = 1
    weight_bytes: float = 2
    kv_element_bytes: float = 2
    kv_cache_memory_bytes: int | None = None


def fused_shapes(model: ModelShape, tensor_parallel: int = 1) -> Shapes:
    """Return vLLM's parameters: projections that read the same are one, and the vocabulary is padded."""
    rows = round_up(model.vocab_size, VOCABULARY_PADDING)
    shapes: Shapes = {"embedding": (rows // tensor_parallel, model.hidden_size), "norm": (model.hidden_size,)}
    if not model.tie_word_embeddings:
        shapes["head"] = shapes["embedding"]
    for index in range(model.num_hidden_layers):
        shapes |= _fused_layer(model, index, tensor_parallel)
    return shapes


def _fused_layer(model: ModelShape, index: int, tensor_parallel: int) -> Shapes:
    own = model.layer(index)
    fused: dict[str, int] = {}
    for name, shape in own.items():
        key = name
        for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
            for part in parts:
                key = key.replace(f".{part}.", f".{whole}.")
        divisor = 1 if "norm" in name or ".gate." in name else tensor_parallel
        fused[key] = fused.get(key, 0) + prod(shape) // divisor
    return {name: (size,) for name, size in fused.items()}


def weights(engine: Engine) -> tuple[int, int]:
    """Return the bytes of the tensors, and of the memory mapped for them."""
    allocator = CachingAllocator()
    shapes = fused_shapes(engine.model, engine.tensor_parallel)
    positions = max(engine.model.max_position_embeddings, engine.max_model_len)
    sizes = [ceil(prod(shape) * engine.weight_bytes) for shape in shapes.values()]
    sizes.append(positions * engine.model.head_dim * 2)  # the rotary tables
    for size in sizes:
        allocator.allocate(size)
    return sum(sizes), allocator.reserved_bytes


def profiled(engine: Engine) -> int:
    """Return the most that torch hands out while vLLM profiles: a layer's MLP on the largest batch, or the sampler."""
    model, tokens = engine.model, engine.max_num_batched_tokens
    width = model.mlp_width() // engine.tensor_parallel
    layer = tokens * (2 * 3 * width + 2 * 3 * model.hidden_size)
    logits = engine.max_num_seqs * round_up(model.vocab_size, VOCABULARY_PADDING) * (2 + 4)
    return max(layer, logits + 2 * tokens * model.hidden_size)


def beside_kv_cache(engine: Engine, rest: Amount = constants.PROFILE_REST) -> Amount:
    """Return what vLLM takes off `gpu_memory_utilization` before the KV cache gets the rest."""
    used = weights(engine)[0] + profiled(engine)
    return Amount(used + rest.bytes, rest.uncertainty_bytes, rest.source)


def kv_block_bytes(engine: Engine) -> int:
    """Return the bytes of one block over all layers."""
    heads = max(engine.model.num_key_value_heads // engine.tensor_parallel, 1)
    token = 2 * engine.model.num_hidden_layers * heads * engine.model.head_dim * engine.kv_element_bytes
    return int(BLOCK_TOKENS * token)


def kv_cache(engine: Engine, cuda_bytes: int, beside: Amount) -> int:
    """Return the bytes of the KV cache, whole blocks only; negative if not even the rest fits."""
    if engine.kv_cache_memory_bytes is not None:
        room = engine.kv_cache_memory_bytes
    else:
        room = ceil(engine.gpu_memory_utilization * cuda_bytes) - beside.bytes
    blocks = room // kv_block_bytes(engine)
    layers = engine.model.num_hidden_layers
    return layers * round_up(blocks * kv_block_bytes(engine) // layers, MAPPING_BYTES) if room > 0 else room


def kv_tokens(engine: Engine, kv_bytes: int) -> int:
    """Return how many tokens fit."""
    return max(kv_bytes, 0) // kv_block_bytes(engine) * BLOCK_TOKENS


def graphs(engine: Engine) -> Amount:
    """Return what captured graphs hold."""
    if engine.enforce_eager:
        return Amount(0, 0, "enforce_eager")
    pool = constants.GRAPH_POOL
    captured = int(
        constants.GRAPH_LAYER_BYTES * engine.model.num_hidden_layers * engine.graph_sizes / constants.GRAPH_SIZES
    )
    is_known = engine.graph_sizes <= constants.GRAPH_SIZES
    uncertainty = pool.uncertainty_bytes + int(captured * (0.25 if is_known else 1))
    return Amount(pool.bytes + captured, uncertainty, f"{pool.source}; 1.9 MiB a layer for the graphs of 11 sizes")
