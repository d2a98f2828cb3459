"""Count down: the prompt names a digit d, and the right answer is d-1, ..., 1, 0 and then stop.

Tokens are numbers, so there is no tokenizer: 0 to 9 are the digits, and three more are the signs below.
"""

from __future__ import annotations

import random

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


def reward(prompt: list[int], response: list[int]) -> float:
    """Return right transitions over max(d + 1, tokens said): 1.0 for the exact answer, dense below it.

    A transition is right when it says the token before it minus one, or EOS after 0. For d = 2, `[1, 0, EOS]` gives
    1.0, `[1, 0]` gives 2/3 and `[1, 5, 4, 3]` gives 3/4: a wrong digit costs only its own transition. Tokens that are
    no digits, of which a model may have many, are never right, and nothing is right after them.
    """
    right = 0
    before = prompt[-1]
    for token in response:
        right += 0 <= before <= 9 and token == (EOS if before == 0 else before - 1)
        before = token
    return right / max(prompt[-1] + 1, len(response))
