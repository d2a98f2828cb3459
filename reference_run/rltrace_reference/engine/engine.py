"""The engine: requests wait, get a slot, are stepped together and finish; its memory sleeps and wakes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from rltrace.errors import RunError
from rltrace_reference.architecture import WEIGHTS_FILE
from rltrace_reference.config import Config
from rltrace_reference.engine.memory import MappedPool
from rltrace_reference.engine.model import Qwen3, Weights


@dataclass
class Request:
    """One sequence on its way through the engine."""

    request_id: str
    """Unique in the run: rank, step, prompt and sample."""
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    slot: int | None = None
    """Slot of the request; None while it waits."""


@dataclass(frozen=True)
class StepStats:
    """What one engine step did, as its span says."""

    running: int
    waiting: int
    tokens: int
    """Tokens computed: those of prompts in a prefill, one per sequence in a decode."""
    kv_usage: float
    """Share of the slots that are taken."""


class Engine:
    """Continuous batching of one rank's requests over a fixed pool of slots."""

    elsewhere = None
    """The weights are in this process."""

    def __init__(self, config: Config, rank: int, eos: int, checkpoint: str | None = None) -> None:
        """Args:
        config: The run.
        rank: Whose engine this is.
        eos: The token that ends a response.
        checkpoint: Folder to load the weights from; None: dummy values, the real ones arrive by weight sync.
        """
        self.config, self.rank, self.eos, self.checkpoint = config, rank, eos, checkpoint
        self.pool = MappedPool()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.free_slots = list(reversed(range(config.rollout.slots)))
        self.rng = torch.Generator()
        self.host_weights: Tensor | None = None
        """Copy of the weights while asleep at level 1."""

    # ------------------------------------------------------------ start-up

    def start(self) -> None:
        """Load, profile and reserve the KV pool."""
        self.load()
        self.reserve_kv(self.profile())

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Return the weights by their names in a checkpoint."""
        return self.weights.parameters

    @property
    def addresses(self) -> list[int]:
        """Return where the weights and the KV pool lie."""
        return [*(matrix.data_ptr() for matrix in self.weights.matrices.values()), self.model.kv.data_ptr()]

    def load(self) -> None:
        """Allocate the weights' memory and fill it."""
        block = self.pool.reserve("weights", Weights.size_bytes(self.config.model))
        self.pool.map("weights")
        self.weights = Weights(self.config.model, block)
        for parameter in self.weights.parameters.values():
            parameter.zero_()
        if self.checkpoint is not None:
            for name, loaded in load_file(Path(self.checkpoint) / WEIGHTS_FILE).items():
                self.weights.parameters[name].copy_(loaded)

    def profile(self) -> int:
        """Run one full batch of the longest sequences over a throw-away KV cache.

        Returns:
            Bytes of the KV pool that the configuration leaves, after checking that the largest batch runs.
        """
        slots = self.config.rollout.slots
        kv = torch.zeros(self._kv_shape(tokens=self.config.rollout.max_tokens), dtype=torch.bfloat16)
        model = Qwen3(self.config.model, self.weights, kv)
        longest = torch.zeros(slots, kv.shape[4], dtype=torch.int64)
        model.logits(model.forward(longest, torch.zeros(slots, dtype=torch.int64), torch.arange(slots))[:, -1])
        return self.config.kv_cache_bytes

    def reserve_kv(self, size_bytes: int) -> None:
        """Reserve the KV pool, pages included, and cut it into slots."""
        block = self.pool.reserve("kv_cache", size_bytes)
        self.pool.map("kv_cache")
        shape = self._kv_shape(self.config.tokens_per_slot)
        kv = block.view(torch.bfloat16)[: torch.Size(shape).numel()].view(shape)
        self.model = Qwen3(self.config.model, self.weights, kv)

    def _kv_shape(self, tokens: int) -> tuple[int, ...]:
        model = self.config.model
        slots, kv_heads = self.config.rollout.slots, model.num_key_value_heads
        return model.num_hidden_layers, 2, slots, kv_heads, tokens, model.head_dim

    # ------------------------------------------------------------ sleep

    def sleep(self, level: int) -> dict[str, int]:
        """Release memory: nothing at level 0, the weights after a copy at level 1, everything for good at level 2.

        Returns:
            Bytes that still have a page, by tag.
        """
        if level == 0:
            return {}
        if level == 1 and "weights" in self.pool.awake:
            self.host_weights = self.pool.regions["weights"].bytes.clone()
        return {tag: self.pool.unmap(tag)[1] for tag in ("weights", "kv_cache")}

    def wake_up(self, tags: list[str]) -> None:
        """Put pages behind the tags again: the host copy if level 1 kept one, else the wake-up pattern."""
        for tag in tags:
            self.pool.map(tag)
        if "weights" in tags and self.host_weights is not None:
            self.pool.regions["weights"].bytes.copy_(self.host_weights)
            self.host_weights = None

    # ------------------------------------------------------------ generation

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def generate(self, prompts: list[list[int]], seed: int, step: int) -> list[Request]:
        """Sample n responses of each prompt.

        Args:
            prompts: Tokens of each prompt of this rank.
            seed: Start of this step's random numbers: the same seed gives the same responses.
            step: Step of the run, for the requests' names.

        Returns:
            Finished requests, samples of one prompt adjacent.
        """
        self.restore_rng(seed)
        requests = [
            self.add_request(f"{self.rank}.{step}.{index}.{sample}", prompt)
            for index, prompt in enumerate(prompts)
            for sample in range(self.config.rollout.n)
        ]
        while self.waiting or self.running:
            self.step()
        return requests

    def restore_rng(self, seed: int) -> None:
        """Start the sampler's random numbers again."""
        self.rng.manual_seed(seed)

    def add_request(self, request_id: str, prompt: list[int]) -> Request:
        """Queue a request until a slot is free."""
        request = Request(request_id, prompt)
        self.waiting.append(request)
        return request

    def finish_request(self, request: Request) -> None:
        """End a request; its slot is free for the next one."""
        assert request.slot is not None
        self.running.remove(request)
        self.free_slots.append(request.slot)
        request.slot = None

    def step(self) -> StepStats:
        """Run one forward: the prompts of newly admitted requests, or one more token of all running ones."""
        admitted = self._admit()
        batch = admitted or list(self.running)
        new = [request.prompt if admitted else request.tokens[-1:] for request in batch]
        stats = StepStats(
            len(self.running), len(self.waiting), sum(map(len, new)), len(self.running) / self.config.rollout.slots
        )
        logits_RV = self._forward(batch, new)
        self._sample(batch, logits_RV)
        for request in batch:
            ended = request.tokens[-1] == self.eos and not self.config.rollout.ignore_eos
            if ended or len(request.tokens) == self.config.rollout.max_tokens:
                self.finish_request(request)
        return stats

    def _admit(self) -> list[Request]:
        admitted = []
        while self.waiting and self.free_slots:
            request = self.waiting.popleft()
            request.slot = self.free_slots.pop()
            admitted.append(request)
        self.running += admitted
        return admitted

    def _forward(self, batch: list[Request], new: list[list[int]]) -> Tensor:
        """Return the logits of each request's next token, shape (R, vocabulary)."""
        longest = max(map(len, new))
        tokens_RL = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in new])
        starts_R = torch.tensor([len(r.prompt) + len(r.tokens) - len(n) for r, n in zip(batch, new, strict=True)])
        slots_R = torch.tensor([request.slot for request in batch])
        rows_P = _padded_rows(len(batch), self.config.rollout.slots)
        hidden_RLC = self.model.forward(tokens_RL[rows_P], starts_R[rows_P], slots_R[rows_P])
        last_R = torch.tensor([len(tokens) - 1 for tokens in new])
        return self.model.logits(hidden_RLC[torch.arange(len(rows_P)), last_R[rows_P]])[: len(batch)]

    def _sample(self, batch: list[Request], logits_RV: Tensor) -> None:
        """Append a sampled token and its log-prob to each request."""
        log_probs_RV = torch.log_softmax(logits_RV / self.config.rollout.temperature, dim=-1)
        if not torch.isfinite(log_probs_RV).all():
            raise RunError(
                f"engine of rank {self.rank}: its logits are not finite, weights may still hold the wake-up pattern; "
                "was the weight sync skipped?"
            )
        tokens_R = torch.multinomial(log_probs_RV.exp(), 1, generator=self.rng)
        picked_R = log_probs_RV.gather(1, tokens_R)
        for request, token, log_prob in zip(batch, tokens_R[:, 0].tolist(), picked_R[:, 0].tolist(), strict=True):
            request.tokens.append(token)
            request.log_probs.append(log_prob)


def _padded_rows(count: int, most: int) -> Tensor:
    """Return the rows of a batch, the last one repeated up to a power of two.

    A library compiles a kernel for every number of rows that it sees and keeps it, so there are a few numbers only.
    What is repeated writes the same keys and values into the same slot.
    """
    padded = min(1 << (count - 1).bit_length(), most)
    return torch.arange(padded).clamp(max=count - 1)
