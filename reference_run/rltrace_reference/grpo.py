"""The formulas of GRPO, as functions of tensors. Shapes: B sequences, T tokens."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6


def group_advantages(reward_B: Tensor, n: int) -> Tensor:
    """Each reward minus the mean of its group, over the group's standard deviation.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2.

    Args:
        reward_B: Rewards, the n samples of one prompt adjacent.
        n: Group size, at least 2.

    Returns:
        Shape (B,). [1, 0, 0, 1] with n = 2 gives [1, -1, -1, 1] / sqrt(2): the standard deviation is the sample's.
        A group of equal rewards gives 0.

    Raises:
        ValueError: B is no multiple of n.
    """
    if n < 2 or len(reward_B) % n:
        raise ValueError(f"{len(reward_B)} rewards are not groups of {n}; B must be a multiple of n >= 2")
    groups = reward_B.reshape(-1, n)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + EPSILON)).reshape(-1)


def token_log_probs(logits_BTV: Tensor, tokens_BT: Tensor, temperature: float) -> Tensor:
    """Log-prob of each token given those before it, at the temperature it was sampled with.

    Returns:
        Shape (B, T), float32; position 0 has nothing before it and is 0.
    """
    scores = torch.log_softmax(logits_BTV[:, :-1].float() / temperature, dim=-1)
    picked = scores.gather(-1, tokens_BT[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(picked, (1, 0))


def clipped_loss(log_probs_BT: Tensor, old_BT: Tensor, advantages_B: Tensor, clip_ratio: float) -> Tensor:
    """Clipped surrogate per token: -min(r A, clip(r, 1 - c, 1 + c) A) with r = exp(new - old).

    Source: PPO, arXiv:1707.06347, equation 7; per token with a group's advantage, arXiv:2402.03300, equation 3.
    """
    ratio = torch.exp(log_probs_BT - old_BT)
    advantages_B1 = advantages_B[:, None]
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    return -torch.minimum(ratio * advantages_B1, clipped * advantages_B1)


def k3_kl(log_probs_BT: Tensor, ref_BT: Tensor) -> Tensor:
    """Estimate of KL(policy | ref) per token: exp(ref - new) - (ref - new) - 1, never negative.

    Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html, estimator k3;
    arXiv:2402.03300, equation 4.
    """
    difference = ref_BT - log_probs_BT
    return torch.exp(difference) - difference - 1


def token_mean(value_BT: Tensor, mask_BT: Tensor, tokens: Tensor | int) -> Tensor:
    """Sum over the masked tokens divided by `tokens`, so that every token weighs the same, whatever its sequence.

    Source: DAPO, arXiv:2503.14476, section 3.3.

    Args:
        value_BT: A value per token.
        mask_BT: Which tokens count.
        tokens: How many count over all micro-batches and ranks, not here only.
    """
    return (value_BT * mask_BT).sum() / tokens
