"""SGLang: its scheduler's start-up and batches, what a trainer asks of it, and whose its allocations are.

In: the scheduler and its dispatcher of requests. Out: `engine.step` and `rollout.*` spans (`scheduler.py`), requests
(`requests.py`), what became of tokens that were guessed ahead (`speculation.py`), weight sync, sleep and wake-up
(`control.py`, whose buckets have the keys of `buckets.py`), and on chosen steps its pools' sleeps (`allocations.py`).
`calls.py` has the calls of a program that uses SGLang as an engine of its own. The pools themselves are
torch_memory_saver's: `../torch_memory_saver.py`.

To add a request that a trainer sends to the scheduler, name its method in `control.py`.
"""
