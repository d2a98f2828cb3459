"""The embedded rollout engine, which is a process of its own for each rank.

In: prompts, weights in buckets, and calls to sleep and to wake up, over a socket (`server.py`). Out: tokens with
their log-probs, and memory that is given back. `engine.py` steps the requests, `model.py` is Qwen3 for inference, and
`memory.py` has the regions that sleep; `vllm_engine.py` is vLLM in their place, and `sglang_engine.py` SGLang, whose
weights lie in a process below this one (`sglang_scheduler.py`). It imports torch, and neither ray nor transformers.
To add a call, add a method `on_NAME` to the server in `server.py`; to `weight_calls.py` if it is about the weights.
"""
