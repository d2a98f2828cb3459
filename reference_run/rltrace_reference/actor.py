"""The policy that learns and the ref it is held to: transformers' Qwen3 sharded by FSDP2.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rltrace_reference import device, grpo
from rltrace_reference.architecture import transformers_config
from rltrace_reference.batch import Batch
from rltrace_reference.config import Config, ModelConfig
from rltrace_reference.offload import Offload
from rltrace_reference.step_record import UpdateStats


class Policy:
    """A sharded model that computes log-probs: the ref is one, and the actor is one that also learns."""

    def __init__(self, config: Config, rank: int) -> None:
        self.config, self.rank = config, rank
        self.device = device.of(config)
        import transformers.models.qwen3.modeling_qwen3  # noqa: F401  # what `build` needs, so that it only builds

        self.build()
        self.shard()
        if config.model.init == "sharded":
            self.draw()
        else:
            self.broadcast()

    @property
    def offload_policy(self) -> OffloadPolicy:
        """Return where FSDP2 keeps the shards."""
        return OffloadPolicy()

    def build(self) -> None:
        """Build the model: rank 0 on the CPU, from the checkpoint or at random; the others only its shapes."""
        self.whole = self.rank == 0 and self.config.model.init != "sharded"
        with torch.device("cpu" if self.whole else "meta"):
            self.model = _build_model(self.config.model, self.config.seed)
        self.model.config.use_cache = False
        self.full = dict(self.model.named_parameters()) if self.whole else {}

    def shard(self) -> None:
        """Turn every parameter into this rank's slice: one unit per decoder layer, and one for the rest."""
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh(self.device.type, (self.config.ranks,))
        self.full = {name: parameter.detach().clone() for name, parameter in self.full.items()}
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=self.offload_policy)
        fully_shard(self.model, mesh=mesh, mp_policy=precision, offload_policy=self.offload_policy)

    def broadcast(self) -> None:
        """Fill the slices from rank 0, one parameter at a time, so that no other rank ever holds the model."""
        self._place()
        for name, parameter in self.parameters():
            if self.whole:
                full = self.full.pop(name).to(self.device)
            else:
                full = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
            dist.broadcast(full, src=0)
            mine = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.data.to_local().copy_(mine.to_local())

    def draw(self) -> None:
        """Fill the slices at random, each rank its own; actor and ref get the same values."""
        self._place()
        generator = torch.Generator(self.device).manual_seed(self.config.seed * 65_537 + self.rank)
        for _, parameter in self.parameters():
            local = parameter.data.to_local()
            if parameter.ndim == 1:  # the scales of norms
                local.fill_(1.0)
            else:
                drawn = torch.empty(local.shape, dtype=torch.float32, device=self.device)
                drawn.normal_(std=self.config.model.initializer_range, generator=generator)
                local.copy_(drawn.to(local.dtype))  # half as much goes to the host, none is rounded there

    def _place(self) -> None:
        """Give memory to slices that have only shapes, and compute what nobody sends: the rotary frequencies."""
        home = torch.device("cpu") if isinstance(self.offload_policy, CPUOffloadPolicy) else self.device
        if not self.whole:
            self.model.to_empty(device=home)
        elif home != self.device or home.type != "cpu":
            self.model.to(home)
        rotary = self.model.model.rotary_emb
        fresh = type(rotary)(self.model.config)
        for name, buffer in fresh.named_buffers():
            rotary.register_buffer(name, buffer.to(self.device), persistent=False)

    def parameters(self) -> Iterator[tuple[str, DTensor]]:
        """Yield this rank's slices by their names in a checkpoint, tied ones once."""
        for name, parameter in self.model.named_parameters():
            yield name.replace("_checkpoint_wrapped_module.", ""), parameter

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def log_probs(self, batch: Batch) -> Tensor:
        """Return the log-prob of every token, shape (B, T), micro-batch by micro-batch."""
        parts = _micro_batches(batch.to(self.device), self.config)
        return torch.cat([self.forward(part.tokens_BT) for part in parts]).cpu()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the log-prob of every token; padding is on the right, where causal attention hides it."""
        logits_BTV = self.model(input_ids=tokens_BT).logits
        return grpo.token_log_probs(logits_BTV, tokens_BT, self.config.rollout.temperature)


class Ref(Policy):
    """The initial policy, forward only; its slices stay in host memory if the configuration says so."""

    def __init__(self, config: Config, rank: int) -> None:
        super().__init__(config, rank)
        self.model.requires_grad_(False)

    @property
    def offload_policy(self) -> OffloadPolicy:
        """Return host memory, pinned if a GPU copies from it."""
        if not self.config.ref.offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.device.type == "cuda")

    def build(self) -> None:
        """Build as `Policy.build` does, in bf16: the computation is the same, and half as much is moved."""
        super().build()
        self.model.bfloat16()
        self.full = dict(self.model.named_parameters()) if self.whole else {}


class Actor(Policy):
    """The policy that learns: fp32 master weights and AdamW over this rank's slices."""

    def __init__(self, config: Config, rank: int) -> None:
        super().__init__(config, rank)
        a = config.actor
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=a.learning_rate,
            betas=a.betas,
            weight_decay=0.0,
            fused=self.device.type == "cuda",
            foreach=self.device.type == "cpu",
        )
        self.away = Offload(self.device)

    def onload(self, optimizer: bool = False) -> None:
        """Bring the parameters back to the device, and the optimizer's state if it is needed too."""
        if self.config.actor.offload:
            self.away.back(self._states() if optimizer else self._shards())

    def offload(self, changed: bool = False) -> None:
        """Take parameters and optimizer state from the device, if the configuration says so.

        Args:
            changed: Whether they have changed since they were brought back.
        """
        if self.config.actor.offload:
            self.away.out(self._states(), changed)
            device.empty_cache(self.config)

    def _shards(self) -> list[Tensor]:
        return [parameter.data for _, parameter in self.parameters()]

    def _states(self) -> list[Tensor]:
        """Return the parameters' shards and the tensors of the optimizer's state."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return self._shards() + [value for value in states if isinstance(value, DTensor)]

    def shard(self) -> None:
        """Shard as `Policy.shard` does, with each layer's activations recomputed in the backward."""
        layers = set(self.model.model.layers)
        apply_activation_checkpointing(self.model, check_fn=lambda module: module in layers)
        super().shard()

    def state_dict(self) -> Iterator[tuple[str, Tensor]]:
        """Yield sharded parameters by their names in a checkpoint, one at a time."""
        yield from self.parameters()

    def update(self, batch: Batch, step: int) -> UpdateStats:
        """Make one optimizer step per minibatch, over the step's samples in an order that the seed fixes."""
        a = self.config.actor
        batch = batch.to(self.device)
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(self.config.seed * 100_003 + step))
        totals = torch.zeros(2, device=self.device)
        norms = []
        for rows in order.chunk(a.minibatches):
            minibatch = batch.rows(rows.to(self.device))
            tokens = _over_ranks(torch.tensor(float(minibatch.tokens), device=self.device))
            for part in _micro_batches(minibatch, self.config):
                totals += self.micro_batch(part, tokens)
            norms.append(self._optimizer_step())
        loss, kl = (_over_ranks(totals) / a.minibatches).tolist()
        return UpdateStats(loss=loss, kl=kl, grad_norm=sum(norms) / len(norms))

    def micro_batch(self, batch: Batch, tokens: Tensor) -> Tensor:
        """Run forward and backward of a part of a minibatch; gradients add up.

        Args:
            batch: Sequences that fit in memory at once.
            tokens: Response tokens of the whole minibatch, over all ranks.

        Returns:
            Shape (2,): this part's share of the minibatch's loss and KL.
        """
        a, mask_BT = self.config.actor, batch.response_mask_BT
        assert batch.old_log_probs_BT is not None and batch.ref_log_probs_BT is not None
        assert batch.advantages_B is not None
        log_probs_BT = self.forward(batch.tokens_BT)
        policy_BT = grpo.clipped_loss(log_probs_BT, batch.old_log_probs_BT, batch.advantages_B, a.clip_ratio)
        kl = grpo.token_mean(grpo.k3_kl(log_probs_BT, batch.ref_log_probs_BT), mask_BT, tokens)
        loss = grpo.token_mean(policy_BT, mask_BT, tokens) + a.kl_coefficient * kl
        # FSDP2 averages gradients over the ranks; these are shares of a sum.
        (loss * dist.get_world_size()).backward()
        return torch.stack((loss.detach(), kl.detach()))

    def _optimizer_step(self) -> float:
        """Clip the gradients, step, and return their norm over all ranks."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.actor.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _build_model(config: ModelConfig, seed: int) -> nn.Module:
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

    if config.path is not None and torch.get_default_device().type != "meta":
        return AutoModelForCausalLM.from_pretrained(config.path, dtype=torch.float32, local_files_only=True)
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(transformers_config(config)).float()


def _micro_batches(batch: Batch, config: Config) -> Iterator[Batch]:
    for start in range(0, len(batch), config.actor.micro_batch):
        yield batch.rows(slice(start, start + config.actor.micro_batch))


def _over_ranks(value: Tensor) -> Tensor:
    """Return the sum over all ranks."""
    dist.all_reduce(value)
    return value
