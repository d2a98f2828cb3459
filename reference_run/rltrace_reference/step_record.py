"""The figures of one step, for the display, the file of `--out` and the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # the display is there before torch is imported
    from torch import Tensor

    from rltrace_reference.batch import Batch


class UpdateStats(msgspec.Struct, frozen=True):
    """What the update of a step measured: means over the step's tokens or optimizer steps.

    Workers return it to the driver, which would import FSDP2 with it, for a second, if it were in `actor.py`.
    """

    loss: float
    kl: float
    grad_norm: float


class StepRecord(msgspec.Struct, frozen=True):
    """What a step did; means and sums are over all ranks."""

    step: int
    """Number of the step, from 0."""
    reward_mean: float
    tokens: int
    """Tokens that the engines generated."""
    seconds: float
    """Seconds of the whole step."""
    tokens_per_second: float
    kl: float
    """KL to the ref: token mean of k3 over the step's minibatches."""
    grad_norm: float
    """Norm before clipping, mean over the minibatches."""
    logprob_abs_diff_mean: float
    logprob_abs_diff_max: float
    """Engine's log-probs of its own samples against the actor's: bf16 noise, unless the engine has another policy."""

    def figures(self) -> dict[str, int | float]:
        """Return what a reader of the step is told, by name."""
        names = ("reward_mean", "tokens", "tokens_per_second", "kl", "grad_norm", "logprob_abs_diff_max")
        return {name: getattr(self, name) for name in names}


def record_step(step: int, reward_B: Tensor, batch: Batch, updates: list[UpdateStats], seconds: float) -> StepRecord:
    """Make the record of a step from what its phases returned."""
    assert batch.old_log_probs_BT is not None
    difference = (batch.engine_log_probs_BT - batch.old_log_probs_BT)[batch.response_mask_BT].abs()
    return StepRecord(
        step=step,
        reward_mean=float(reward_B.mean()),
        tokens=batch.tokens,
        seconds=seconds,
        tokens_per_second=batch.tokens / seconds,
        kl=updates[0].kl,
        grad_norm=updates[0].grad_norm,
        logprob_abs_diff_mean=float(difference.mean()),
        logprob_abs_diff_max=float(difference.max()),
    )
