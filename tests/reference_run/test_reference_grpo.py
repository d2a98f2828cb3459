"""The formulas against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from rltrace_reference import grpo


def close(found: torch.Tensor, expected: list[float] | list[list[float]]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_advantages_in_their_group() -> None:
    """Advantages are rewards normalised within their group."""
    root = math.sqrt(0.5)  # (1 - 0.5) / std([1, 0]) with std = sqrt(0.5)
    close(grpo.group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), 2), [root, -root, -root, root])
    # mean 2, std sqrt((4 + 0 + 0 + 4) / 3) = 1.63299
    close(grpo.group_advantages(torch.tensor([0.0, 2.0, 2.0, 4.0]), 4), [-1.22474, 0.0, 0.0, 1.22474])


def test_equal_rewards_teach_nothing() -> None:
    """A group of equal rewards teaches nothing."""
    close(grpo.group_advantages(torch.tensor([0.7, 0.7, 0.7]), 3), [0.0, 0.0, 0.0])


@pytest.mark.parametrize("n", [2, 1])
def test_incomplete_groups_are_refused(n: int) -> None:
    """Rewards of incomplete groups are refused.

    Nor does one sample have others to be compared with.
    """
    with pytest.raises(ValueError, match=f"5 rewards are not groups of {n}"):
        grpo.group_advantages(torch.zeros(5), n)


def test_log_probs_in_single_precision() -> None:
    """Log-probs are computed in single precision, whatever the model computes in."""
    logits = torch.tensor([[[3.0, 1.0, 0.2], [0.0, 0.0, 0.0]]], dtype=torch.bfloat16)
    found = grpo.token_log_probs(logits, torch.tensor([[0, 1]]), temperature=0.7)
    assert found.dtype == torch.float32
    exact = torch.log_softmax(logits[0, 0].double() / 0.7, dim=-1)[1]
    torch.testing.assert_close(found, torch.tensor([[0.0, float(exact)]]), rtol=1e-6, atol=1e-6)


def test_ratio_is_clipped_where_worse() -> None:
    """The ratio is clipped only where that is worse."""
    ratios = torch.tensor([[0.5, 1.1, 1.5]]).expand(2, 3)
    loss = grpo.clipped_loss(ratios.log(), torch.zeros(2, 3), torch.tensor([1.0, -1.0]), clip_ratio=0.2)
    # A = 1: -min(r, clip(r)) = -0.5, -1.1, -1.2; A = -1: -min(-r, -clip(r)) = 0.8, 1.1, 1.5
    close(loss, [[-0.5, -1.1, -1.2], [0.8, 1.1, 1.5]])


def test_a_clipped_token_has_no_gradient() -> None:
    log_probs = torch.tensor([[0.0, 1.0]], requires_grad=True)
    grpo.clipped_loss(log_probs, torch.zeros(1, 2), torch.tensor([1.0]), 0.2).sum().backward()
    assert log_probs.grad is not None
    close(log_probs.grad, [[-1.0, 0.0]])


def test_k3_is_zero_at_the_ref() -> None:
    """k3 is zero at the ref and positive beside it."""
    # ref - new = 0, ln 2, -ln 2: 1 - 0 - 1; 2 - 0.693147 - 1; 0.5 + 0.693147 - 1
    difference = torch.tensor([[0.0, math.log(2), -math.log(2)]])
    close(grpo.k3_kl(torch.zeros(1, 3), difference), [[0.0, 0.306853, 0.193147]])


def test_tokens_weigh_the_same() -> None:
    """Every token weighs the same, whatever its sequence."""
    value = torch.tensor([[1.0, 9.0, 9.0], [2.0, 3.0, 4.0]])
    mask = torch.tensor([[True, False, False], [True, True, True]])
    assert grpo.token_mean(value, mask, 4).item() == pytest.approx(2.5)  # not the mean of sequence means, 2.0


def test_log_probs_at_temperature() -> None:
    """Log-probs are those of the next token at the temperature."""
    logits = torch.tensor([[[0.0, math.log(3)], [5.0, 5.0]]])
    tokens = torch.tensor([[0, 1]])
    close(grpo.token_log_probs(logits, tokens, 1.0), [[0.0, math.log(3 / 4)]])
    close(grpo.token_log_probs(logits, tokens, 0.5), [[0.0, math.log(9 / 10)]])
