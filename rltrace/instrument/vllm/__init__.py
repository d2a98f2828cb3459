"""vLLM: the engine's start-up, steps, requests, sleep and wake-up, and whose its allocations are.

In: vLLM's V1 engine, its workers and `CuMemAllocator`. Out: `engine.step`, `rollout.*` and `cumem.*` spans
(`engine.py`), `engine.draft` and `engine.verify` of tokens that are guessed ahead (`speculation.py`), and on chosen
steps every mapping of its pools (`allocations.py`). `calls.py` has the calls of a program that uses vLLM as an engine
of its own, `served.py` is for trainers whose engine is in a process of its own, and `weight_transfer.py` for vLLM's own
way to give it weights. What differs between releases is said where it is read.

To add a phase of the engine, name its method in `engine.py`.
"""
