"""FSDP2 on two real gloo ranks learns what one process would learn from all the samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from gloo_ranks import RANKS, on_ranks
from rltrace_reference import grpo
from rltrace_reference.actor import Actor, Ref
from rltrace_reference.architecture import transformers_config
from rltrace_reference.batch import Batch
from rltrace_reference.config import ActorConfig, Config, ModelConfig
from torch.distributed.tensor import DTensor


def batch_of(lengths: list[int]) -> Batch:
    """Sequences with responses of these lengths, and random log-probs to learn from."""
    random = torch.Generator().manual_seed(2)
    rows, width = len(lengths), 2 + max(lengths)
    mask = torch.arange(width) - 2 < torch.tensor(lengths)[:, None]
    mask[:, :2] = False
    return Batch(
        tokens_BT=torch.randint(0, 10, (rows, width), generator=random),
        response_mask_BT=mask,
        engine_log_probs_BT=torch.zeros(rows, width),
        old_log_probs_BT=-2.7 + 0.1 * torch.randn(rows, width, generator=random),
        ref_log_probs_BT=-2.7 + 0.1 * torch.randn(rows, width, generator=random),
        advantages_B=torch.randn(rows, generator=random),
    )


def whole_model(shape: ModelConfig) -> Any:
    """A model of one process, in float32."""
    from transformers import Qwen3ForCausalLM  # a second, and everybody who collects the tests would wait for it

    return Qwen3ForCausalLM(transformers_config(shape)).float()


def config_of() -> Config:
    return Config(actor=ActorConfig(minibatches=1, micro_batch=2))


def gradients_of_rank(rank: int, config: Config, batch: Batch) -> dict[str, torch.Tensor]:
    """Whole gradients after the micro-batches of this rank's half, one half with few tokens and one with many."""
    actor = Actor(config, rank)
    mine = batch.split(RANKS)[rank]
    for start in range(0, len(mine), config.actor.micro_batch):
        part = mine.rows(slice(start, start + config.actor.micro_batch))
        actor.micro_batch(part, torch.tensor(float(batch.tokens)))
    return {name: parameter.grad.full_tensor() for name, parameter in actor.parameters()}


def test_gradients_of_the_token_mean(tmp_path: Path) -> None:
    """Gradients are those of the token mean over all ranks."""
    config, batch = config_of(), batch_of([1, 2, 1, 1, 9, 8, 9, 7])
    found, same = on_ranks(gradients_of_rank, tmp_path, config, batch)

    torch.manual_seed(config.seed)
    model = whole_model(config.model)
    log_probs = grpo.token_log_probs(model(input_ids=batch.tokens_BT).logits, batch.tokens_BT, 1.0)
    policy = grpo.clipped_loss(log_probs, batch.old_log_probs_BT, batch.advantages_B, config.actor.clip_ratio)
    kl = grpo.k3_kl(log_probs, batch.ref_log_probs_BT)
    loss = grpo.token_mean(policy + config.actor.kl_coefficient * kl, batch.response_mask_BT, batch.tokens)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], same[name])
        scale = parameter.grad.norm()
        assert (found[name] - parameter.grad).norm() <= 0.05 * scale, name  # bf16 against fp32


def sharding_of_rank(rank: int, config: Config) -> dict[str, Any]:
    actor, ref = Actor(config, rank), Ref(config, rank)
    local = {name: parameter.to_local().shape for name, parameter in actor.parameters()}
    whole = {name: parameter.full_tensor().detach() for name, parameter in actor.state_dict()}
    return {
        "local": local,
        "whole": whole,
        "dtypes": {p.dtype for _, p in actor.parameters()},
        "sharded": all(isinstance(p, DTensor) for _, p in actor.parameters()),
        "same": torch.equal(ref.log_probs(batch_of([3, 4])), actor.log_probs(batch_of([3, 4]))),
        "learns": [any(p.requires_grad for p in policy.model.parameters()) for policy in (actor, ref)],
    }


def test_each_rank_holds_half(tmp_path: Path) -> None:
    """Each rank holds half of every parameter in fp32."""
    config = config_of()
    first, second = on_ranks(sharding_of_rank, tmp_path, config)
    shapes = config.model.shapes()
    assert set(first["whole"]) == set(shapes)
    for name, shape in shapes.items():
        assert tuple(first["whole"][name].shape) == shape
        assert first["local"][name][0] == second["local"][name][0] == shape[0] / 2
        assert torch.equal(first["whole"][name], second["whole"][name])
    assert first["dtypes"] == {torch.float32} and first["sharded"]
    assert first["same"] and second["same"]  # the ref starts as the actor
    assert first["learns"] == [True, False]


def log_probs_of_rank(rank: int, config: Config) -> torch.Tensor:
    return Actor(config, rank).log_probs(batch_of([3, 4]))


def test_checkpoint_reaches_every_rank(tmp_path: Path) -> None:
    """A checkpoint of rank 0 reaches every rank."""
    folder = tmp_path / "checkpoint"
    shape = ModelConfig(hidden_size=32, num_hidden_layers=3, tie_word_embeddings=False, rope_theta=500.0)
    torch.manual_seed(99)
    model = whole_model(shape)
    model.save_pretrained(folder)
    config = msgspec.structs.replace(config_of(), model=msgspec.structs.replace(shape, path=str(folder)))
    first, second = on_ranks(log_probs_of_rank, tmp_path, config)
    tokens = batch_of([3, 4]).tokens_BT
    with torch.no_grad():
        expected = grpo.token_log_probs(model(input_ids=tokens).logits, tokens, 1.0)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, atol=0.03, rtol=0.0)


def test_padding_does_not_change_log_probs() -> None:
    model = whole_model(ModelConfig())
    batch = batch_of([3, 9])
    other = replace(batch, tokens_BT=torch.where(torch.arange(11) < 5, batch.tokens_BT, 0))
    with torch.no_grad():
        one, two = (grpo.token_log_probs(model(input_ids=b.tokens_BT).logits, b.tokens_BT, 1.0) for b in (batch, other))
    torch.testing.assert_close(one[0, :5], two[0, :5])
