"""vLLM as the engine: in this process, tensor parallelism 1, asleep while the actor has the GPU."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from typing import Any

from torch import Tensor, nn

from rltrace_reference.architecture import transformers_config
from rltrace_reference.config import Config
from rltrace_reference.engine.response import Response, finite
from rltrace_reference.engine.views import checkpoint_views

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this process is the engine's: no further one beneath it
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""CUDA graphs of whole decode steps, without torch.compile, which would add a minute to every start."""


class VllmEngine:
    """Answers the embedded engine's calls by vLLM."""

    elsewhere = None
    """The weights are in this process."""

    def __init__(self, config: Config, rank: int, eos: int, checkpoint: str | None = None) -> None:
        """Import vLLM and nothing more: memory is measured in `start`."""
        self.config, self.rank, self.eos, self.checkpoint = config, rank, eos, checkpoint
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if importlib.util.find_spec("flashinfer") is None:
            os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        import vllm

        self.vllm = vllm
        self.parameters: dict[str, Tensor] = {}

    def start(self) -> None:
        """Load weights, profile, reserve the KV pool and capture graphs, all in vLLM's constructor."""
        rollout = self.config.rollout
        with tempfile.TemporaryDirectory(prefix="rltrace-model-") as folder:
            transformers_config(self.config.model).save_pretrained(folder)
            self.llm: Any = self.vllm.LLM(
                model=self.checkpoint or folder,
                skip_tokenizer_init=True,
                load_format="safetensors" if self.checkpoint else "dummy",
                dtype="bfloat16",
                generation_config="vllm",
                enable_sleep_mode=True,  # at level 0 too: its allocator tells the KV cache from the rest
                gpu_memory_utilization=rollout.gpu_memory_utilization,
                max_model_len=rollout.max_model_len or self.config.sequence_tokens,
                max_num_seqs=rollout.slots,
                enforce_eager=rollout.enforce_eager,
                compilation_config=None if rollout.enforce_eager else GRAPHS,
                enable_prefix_caching=False,
                logprobs_mode="processed_logprobs",  # at the temperature that it samples with
                seed=self.config.seed,
            )
        model: nn.Module = self.llm.apply_model(lambda model: model)[0]
        self.parameters = checkpoint_views(dict(model.named_parameters()), self.config.model, "vLLM")

    @property
    def addresses(self) -> list[int]:
        """Return where the weights and the KV cache lie."""
        caches: list[int] = self.llm.collective_rpc(kv_cache_addresses)[0]
        return [*(weight.data_ptr() for weight in self.parameters.values()), *caches]

    def sleep(self, level: int) -> dict[str, int]:
        """Give memory back to the device.

        Returns:
            Bytes of the sleeping pools that are mapped nevertheless, by tag.
        """
        if level == 0:
            return {}
        self.llm.sleep(level)
        return mapped_bytes()

    def wake_up(self, tags: list[str]) -> None:
        """Map memory behind the tags; at level 2 its former content is gone."""
        if self.config.rollout.sleep_level > 0:
            self.llm.wake_up(tags)

    def generate(self, prompts: list[list[int]], seed: int, step: int) -> list[Response]:
        """Sample as `Engine.generate` of the embedded engine does."""
        rollout = self.config.rollout
        asked = [
            self.vllm.SamplingParams(
                n=rollout.n,
                temperature=rollout.temperature,
                max_tokens=rollout.max_tokens,
                ignore_eos=rollout.ignore_eos,
                stop_token_ids=[] if rollout.ignore_eos else [self.eos],
                logprobs=0,
                seed=(seed * 1009 + index * rollout.n) % (1 << 63),
                detokenize=False,
            )
            for index in range(len(prompts))
        ]
        finished = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
        return [self._response(sample) for request in finished for sample in request.outputs]

    def _response(self, sample: Any) -> Response:
        tokens = list(sample.token_ids)
        log_probs = [said[token].logprob for token, said in zip(tokens, sample.logprobs, strict=True)]
        return Response(tokens, finite(log_probs, self.rank))


def kv_cache_addresses(worker: Any) -> list[int]:
    """Return where the layers' KV caches lie, as a worker of vLLM has them."""
    caches = getattr(worker.model_runner, "kv_caches", ())
    return [cache.data_ptr() for cache in caches if isinstance(cache, Tensor)]


def mapped_bytes() -> dict[str, int]:
    """Return bytes of vLLM's sleeping pools that have memory behind them now, by tag; empty if it does not say."""
    from vllm.device_allocator.cumem import CuMemAllocator

    bytes_by_tag: dict[str, int] = {}
    for data in list(CuMemAllocator.instance.pointer_to_data.values()) if CuMemAllocator.instance else ():
        if hasattr(data, "is_asleep"):  # 0.24 keeps no record
            bytes_by_tag[data.tag] = bytes_by_tag.get(data.tag, 0) + (0 if data.is_asleep else data.handle[1])
    return bytes_by_tag
