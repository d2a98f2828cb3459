"""The embedded engine computes what transformers computes, batches continuously, and fails loudly without weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from rltrace_reference import grpo
from rltrace_reference.architecture import transformers_config
from rltrace_reference.config import Config, ModelConfig
from rltrace_reference.engine.engine import Engine, StepStats
from rltrace_reference.engine.model import Qwen3

from rltrace.errors import RunError

EOS = 11
PROMPTS = [[10, 5], [10, 3, 7, 1], [10]]


@pytest.fixture
def engine(config: Config, weights: dict[str, torch.Tensor]) -> Engine:
    return engine_of(config, weights)


def engine_of(config: Config, weights: dict[str, torch.Tensor]) -> Engine:
    engine = Engine(config, rank=0, eos=EOS)
    engine.load()
    engine.reserve_kv(engine.profile())
    for name, parameter in engine.weights.parameters.items():
        parameter.copy_(weights[name])
    return engine


def reference(config: Config, weights: dict[str, torch.Tensor]) -> Any:
    """Transformers' own model with the same weights, in float32."""
    from transformers import Qwen3ForCausalLM  # a second, and everybody who collects the tests would wait for it

    model = Qwen3ForCausalLM(transformers_config(config.model)).float()
    loaded = model.load_state_dict({name: w.float() for name, w in weights.items()}, strict=False)
    assert loaded.missing_keys == (["lm_head.weight"] if config.model.tie_word_embeddings else [])
    model.tie_weights()
    return model


def test_log_probs_match_transformers(engine: Engine, config: Config, weights: dict[str, torch.Tensor]) -> None:
    """Log-probs of samples are those of transformers."""
    model = reference(config, weights)
    for request in engine.generate(PROMPTS, seed=0, step=0):
        sequence = torch.tensor([request.prompt + request.tokens])
        with torch.no_grad():
            expected = grpo.token_log_probs(model(input_ids=sequence).logits, sequence, config.rollout.temperature)
        found = torch.tensor(request.log_probs)
        torch.testing.assert_close(found, expected[0, -len(request.tokens) :], atol=0.03, rtol=0.0)


def test_untied_head_and_odd_sizes(config: Config) -> None:
    """An untied head and odd sizes match transformers too."""
    model = ModelConfig(
        hidden_size=48, num_attention_heads=6, num_key_value_heads=3, intermediate_size=80, rope_theta=300.0,
        num_hidden_layers=3, tie_word_embeddings=False,
    )  # fmt: skip
    config = replace(config, model=model)
    weights = {name: (torch.randn(shape) * 0.1).bfloat16() for name, shape in model.shapes().items()}
    engine = engine_of(config, weights)
    tokens = torch.randint(0, 16, (5, 7))
    hidden = engine.model.forward(tokens, torch.zeros(5, dtype=torch.int64), torch.tensor([3, 0, 7, 1, 2]))
    with torch.no_grad():
        expected = reference(config, weights)(input_ids=tokens).logits
    torch.testing.assert_close(engine.model.logits(hidden.flatten(0, 1)).view_as(expected), expected, atol=0.03, rtol=0)


def test_requests_wait_for_slots(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests than slots wait, and all finish."""
    seen: list[StepStats] = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: seen.append(step(self)) or seen[-1])
    requests = engine.generate([[10, digit] for digit in range(1, 10)], seed=0, step=0)
    assert len(requests) == 9 * 4
    assert seen[0].running == 8 and seen[0].waiting == 28 and seen[0].kv_usage == 1.0
    assert any(stats.waiting and stats.tokens == 1 * stats.running for stats in seen)  # decode while others wait
    assert all(stats.running <= 8 for stats in seen)
    assert sorted(engine.free_slots) == list(range(8)) and not engine.running
    for request in requests:
        assert 1 <= len(request.tokens) == len(request.log_probs) <= 6
        assert EOS not in request.tokens[:-1]
        assert len(request.tokens) == 6 or request.tokens[-1] == EOS


def test_few_shapes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of all sizes and lengths are rounded up to a few shapes, and padding changes no sample."""
    shapes = set()
    forward, model_forward = Engine._forward, Qwen3.forward
    monkeypatch.setattr(
        Qwen3, "forward", lambda self, *args: shapes.add(tuple(args[0].shape)) or model_forward(self, *args)
    )
    counts = set()
    monkeypatch.setattr(
        Engine, "_forward", lambda self, batch, new: counts.add(len(batch)) or forward(self, batch, new)
    )
    padded = engine.generate([[10, digit] for digit in range(1, 10)], seed=0, step=0)
    assert len(counts) > 4 and {rows for rows, _ in shapes} <= {1, 2, 4, 8}
    monkeypatch.setattr("rltrace_reference.engine.engine._padded_rows", lambda count, most: torch.arange(count))
    assert [r.tokens for r in engine.generate([[10, digit] for digit in range(1, 10)], seed=0, step=1)] == [
        r.tokens for r in padded
    ]


def test_samples_ignore_old_kv(engine: Engine) -> None:
    """Samples do not depend on what the KV pool held."""
    first = engine.generate(PROMPTS, seed=4, step=0)
    engine.pool.unmap("kv_cache")
    engine.pool.map("kv_cache")
    again = engine.generate(PROMPTS, seed=4, step=1)
    assert [r.tokens for r in again] == [r.tokens for r in first]
    assert [r.log_probs for r in again] == [r.log_probs for r in first]
    assert [r.tokens for r in engine.generate(PROMPTS, seed=5, step=2)] != [r.tokens for r in first]


def test_temperature_sharpens(config: Config, weights: dict[str, torch.Tensor], engine: Engine) -> None:
    """Temperature sharpens the samples and their log-probs."""
    hot = [p for r in engine.generate(PROMPTS, 0, 0) for p in r.log_probs]
    engine.config = Config(rollout=type(config.rollout)(n=4, max_tokens=6, slots=8, temperature=0.1))
    cold = [p for r in engine.generate(PROMPTS, 0, 0) for p in r.log_probs]
    assert sum(cold) / len(cold) > sum(hot) / len(hot) + 0.2


def test_missing_weights_fail(engine: Engine) -> None:
    """Generation from weights that never arrived fails."""
    engine.sleep(2)
    engine.wake_up(["weights", "kv_cache"])
    with pytest.raises(RunError, match="engine of rank 0: its logits are not finite"):
        engine.generate(PROMPTS, seed=0, step=0)


def test_request_ids_are_unique(engine: Engine) -> None:
    """Request ids are unique in the run."""
    ids = [r.request_id for step in (0, 1) for r in engine.generate(PROMPTS, 0, step)]
    assert len(set(ids)) == len(ids) == 2 * 3 * 4
