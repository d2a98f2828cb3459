"""vLLM: the engine's start-up, steps, requests, sleep and wake-up, and whose its allocations are.

In: vLLM's V1 engine, its workers and `CuMemAllocator`. Out: `engine.step`, `rollout.*` and `cumem.*` spans
(`engine.py`), and on chosen steps every mapping of its pools (`allocations.py`). `served.py` is for trainers whose
engine is in a process of its own, `weight_transfer.py` for vLLM's own way to give it weights. What differs between
releases is said where it is read.
"""
