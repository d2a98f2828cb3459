"""What TRL imports of vLLM for an engine in its own process: one that answers at random, and sleeps."""

from __future__ import annotations

from vllm.entrypoints.llm import LLM, RequestOutput
from vllm.sampling_params import SamplingParams

__all__ = ["LLM", "RequestOutput", "SamplingParams"]
__version__ = "0.26.0"
