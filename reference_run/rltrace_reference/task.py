"""Count down: the prompt names a digit d, and the right answer is d-1, ..., 1, 0 and then stop.

Tokens are numbers, so there is no tokenizer: 0 to 9 are the digits, and three more are the signs below.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # who checks a configuration needs the vocabulary, and not the seconds that torch's import takes
    from torch import Tensor

BOS = 10
EOS = 11
PAD = 12
VOCABULARY = 13


def prompts(count: int, seed: int, step: int, length: int = 2) -> list[list[int]]:
    """Return the prompts of a step, each `[BOS, ..., BOS, d]` with d in 1..9; the same for the same seed and step.

    Args:
        count: How many.
        seed: Seed of the run.
        step: Step of the run.
        length: Tokens of each, at least 2.
    """
    choose = random.Random(f"{seed}:{step}")
    return [[BOS] * (length - 1) + [choose.randint(1, 9)] for _ in range(count)]


def rewards(tokens_BT: Tensor, response_mask_BT: Tensor) -> Tensor:
    """Return right transitions over max(d + 1, tokens said): 1.0 for the exact answer, dense below it.

    A transition is right when it says the token before it minus one, or EOS after 0. For d = 2, `[1, 0, EOS]` gives
    1.0, `[1, 0]` gives 2/3 and `[1, 5, 4, 3]` gives 3/4: a wrong digit costs only its own transition. Tokens that are
    no digits, of which a model may have many, are never right, and nothing is right after them.

    Args:
        tokens_BT: int64, each row a prompt and its response, padded.
        response_mask_BT: bool, True where the response is; each has at least one token.

    Returns:
        Shape (B,), float32.
    """
    before_BT, said_BT, is_said_BT = tokens_BT[:, :-1], tokens_BT[:, 1:], response_mask_BT[:, 1:]
    right_BT = is_said_BT & (before_BT >= 0) & (before_BT <= 9)
    right_BT &= said_BT == (before_BT - 1).masked_fill(before_BT == 0, EOS)
    digit_B1 = before_BT.gather(1, is_said_BT.int().argmax(1, keepdim=True))
    return right_BT.sum(1) / (digit_B1.squeeze(1) + 1).maximum(is_said_BT.sum(1))
