"""One sampled sequence, as the engines of others answer it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rltrace.errors import RunError


@dataclass(frozen=True)
class Response:
    """One sampled sequence."""

    tokens: list[int]
    log_probs: list[float]


def finite(log_probs: list[float], rank: int) -> list[float]:
    """Return the log-probs of a sequence.

    Raises:
        RunError: one of them is no number.
    """
    if not all(map(math.isfinite, log_probs)):
        raise RunError(
            f"engine of rank {rank}: its log-probs are not finite, weights may still hold what lay there "
            "before; was the weight sync skipped?"
        )
    return log_probs
