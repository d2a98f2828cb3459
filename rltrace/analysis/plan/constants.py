"""What no shape says, from our own measurements: bytes that exist because CUDA, NCCL, cuBLAS and vLLM run at all.

All were measured with torch 2.11.0+cu130 on H100s and H200s, where they are the same. A Recording of the machine is
better than any of them: `rltrace plan --like RUN` takes them from there.
"""

from __future__ import annotations

from rltrace.analysis.plan.amount import Amount, mebibytes

_8B = "examples/recordings/qwen3_8b_4gpu.zip"
_VERL = "examples/recordings/verl_8b_4gpu.zip"

TRAINER_CONTEXT = mebibytes(518, 20, f"NVML when the worker is first seen: 518 MiB ({_8B}, {_VERL})")
TRAINER_KERNELS = mebibytes(146, 60, f"growth in the first forward, 74, and update, 72 MiB ({_8B}); 132 in {_VERL}")
ENGINE_CONTEXT = mebibytes(680, 20, f"NVML when the engine is first seen: 680 MiB ({_8B}, {_VERL})")
ENGINE_KERNELS = mebibytes(68, 30, f"growth while vLLM profiles: 68 MiB ({_8B}, {_VERL})")
CAPTURE_CONTEXT = mebibytes(18, 10, f"growth while graphs are captured: 18 MiB ({_8B})")

NCCL_GROUP = mebibytes(460, 60, f"the trainer's communicator: 458 MiB ({_8B}), 464 on H100")
NCCL_SYNC = mebibytes(474, 60, f"the first all-gather of a sync: 474 MiB ({_8B})")
NCCL_VERL = mebibytes(844, 60, f"verl's communicators: 844 MiB ({_VERL})")
NCCL_ALONE = mebibytes(656, 60, "the communicator of one rank, before its first collective: 656 MiB (H100)")

WORKER_REST = mebibytes(5, 40, f"small tensors of no owner: 5 MiB ({_8B})")

ENGINE_BUFFERS = mebibytes(105, 50, f"vLLM's inputs, sampler and cuBLAS workspace: 103 to 119 MiB ({_8B}, {_VERL})")
WEIGHT_SEGMENTS = mebibytes(
    38, 60, f"segments that loading leaves beside those of the tensors: 38 MiB ({_8B}; 1.7B on H100), 154 in {_VERL}"
)
PROFILE_REST = mebibytes(
    290,
    190,
    f"what vLLM takes off its KV cache beside weights and activations: 330 ({_8B}), 306 and 272 (1.7B on H100, with "
    f"graphs and without), 120 MiB ({_VERL})",
)
GRAPH_LAYER_BYTES = 1.9 * (1 << 20)
"""A decoder layer's part of the graphs of 11 batch sizes (1 to 64): 68 MiB over 36 layers and 52 over 28."""
GRAPH_SIZES = 11
GRAPH_POOL = mebibytes(38, 30, f"private pools before anything is captured: 56 ({_8B}) and 20 MiB (1.7B on H100)")

CACHED = mebibytes(10, 30, f"left in the engine's cache: 0 to 37 MiB beside what the trainer's is computed to ({_8B})")

SHARE = 0.01
"""How far computed sizes may be off, of themselves: rounding by the allocator."""


def total(*amounts: Amount) -> Amount:
    """Return the sum; uncertainties add up as independent ones."""
    spread = sum(amount.uncertainty_bytes**2 for amount in amounts) ** 0.5
    return Amount(sum(a.bytes for a in amounts), int(spread), "; ".join(a.source for a in amounts if a.source))
