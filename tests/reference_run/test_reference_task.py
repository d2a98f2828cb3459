"""The count-down task rewards right transitions."""

from __future__ import annotations

import pytest
from rltrace_reference import task
from rltrace_reference.batch import from_responses
from rltrace_reference.task import BOS, EOS, VOCABULARY

SCORED = (
    (2, [1, 0, EOS], 1.0),
    (2, [1, 0], 2 / 3),
    (2, [1, 5, 4, 3], 3 / 4),
    (2, [EOS], 0.0),
    (1, [0, EOS], 1.0),
    (1, [0, 0, 0, 0], 1 / 4),
    (9, [8], 1 / 10),
    (1, [0, VOCABULARY, VOCABULARY - 1], 1 / 3),
)
"""A prompt's digit, a response, and what it is worth."""


@pytest.mark.parametrize("prompt_tokens", [2, 5])
def test_reward_of_right_transitions(prompt_tokens: int) -> None:
    """The reward is right transitions over the longer length, whatever lies beside a response in its batch."""
    prompts = [[BOS] * (prompt_tokens - 1) + [digit] for digit, _, _ in SCORED]
    responses = [response for _, response, _ in SCORED]
    batch = from_responses(prompts, responses, [[0.0] * len(response) for response in responses], max_tokens=6)
    found = task.rewards(batch.tokens_BT, batch.response_mask_BT)
    assert found.tolist() == pytest.approx([expected for _, _, expected in SCORED])


def test_prompts_by_seed_and_step() -> None:
    """Prompts are fixed by seed and step."""
    assert task.prompts(32, seed=3, step=5) == task.prompts(32, seed=3, step=5)
    assert task.prompts(32, seed=3, step=5) != task.prompts(32, seed=3, step=6)
    assert {tuple(p) for p in task.prompts(500, 0, 0)} == {(BOS, digit) for digit in range(1, 10)}
