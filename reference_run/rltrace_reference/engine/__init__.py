"""The embedded rollout engine, a process of its own per rank; imports torch, never ray or transformers."""
