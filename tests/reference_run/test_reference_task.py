"""The count-down task rewards right transitions."""

from __future__ import annotations

import pytest
from rltrace_reference import task
from rltrace_reference.task import BOS, EOS


@pytest.mark.parametrize(
    ("digit", "response", "expected"),
    [
        (2, [1, 0, EOS], 1.0),
        (2, [1, 0], 2 / 3),
        (2, [1, 5, 4, 3], 3 / 4),
        (2, [EOS], 0.0),
        (1, [0, EOS], 1.0),
        (1, [0, 0, 0, 0], 1 / 4),
        (9, [8], 1 / 10),
    ],
)
def test_reward_of_right_transitions(digit: int, response: list[int], expected: float) -> None:
    """The reward is right transitions over the longer length."""
    assert task.reward([BOS, digit], response) == pytest.approx(expected)


def test_prompts_by_seed_and_step() -> None:
    """Prompts are fixed by seed and step."""
    assert task.prompts(32, seed=3, step=5) == task.prompts(32, seed=3, step=5)
    assert task.prompts(32, seed=3, step=5) != task.prompts(32, seed=3, step=6)
    assert {tuple(p) for p in task.prompts(500, 0, 0)} == {(BOS, digit) for digit in range(1, 10)}
