"""The embedded rollout engine, a process of its own per rank. It imports torch, never ray or transformers."""
