"""Compiles the kernels that SGLang 0.5.12 would compile one after another while its engine starts, all at once.

`python3 tests/gpu/sglang_kernels.py`: for Qwen3 in bf16 with heads of 128 elements, 8 of them for keys and values, as
`examples/memory_journey/gpu.yaml` has. Each goes to the same cache, where an engine that starts meanwhile waits for it.
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

KERNELS = (
    ("activation", "_jit_activation_module", (torch.bfloat16,)),
    ("clamp_position", "_jit_clamp_position_module", (torch.int64,)),
    ("kvcache", "_jit_kvcache_module", (8 * 128 * 2,)),
    ("norm", "_jit_qknorm_module", (128, torch.bfloat16)),
    ("resolve_future_token_ids", "_jit_resolve_future_token_ids_module", (torch.int64,)),
    ("rope", "_jit_fused_rope_module", (True, 128, torch.bfloat16)),
)
"""Module of `sglang.jit_kernel`, the function that compiles, and its arguments."""


def build(module: str, function: str, arguments: tuple[object, ...]) -> str:
    """Compile one, and say how long it took or why it could not be."""
    start = time.monotonic()
    try:
        getattr(importlib.import_module(f"sglang.jit_kernel.{module}"), function)(*arguments)
    except Exception:
        return f"{module}: {traceback.format_exc()}"
    return f"{module}: {time.monotonic() - start:.1f} s"


def main() -> int:
    """Compile all; say of each what became of it."""
    with ProcessPoolExecutor(len(KERNELS), get_context("spawn")) as pool:
        for said in [pool.submit(build, *kernel) for kernel in KERNELS]:
            print(said.result(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
