"""Calls of vLLM from a program: how many sequences each asks for."""

from __future__ import annotations

from typing import Any

import pytest

from rltrace.instrument.vllm.calls import conversations

MESSAGE = {"role": "user", "content": "What is 2 + 2?"}


@pytest.mark.parametrize(
    ("messages", "expected"), [([MESSAGE], 1), ([MESSAGE] * 3, 1), ([[MESSAGE], [MESSAGE] * 2], 2), ([], 1)]
)
def test_conversations_are_counted(messages: Any, expected: int) -> None:
    """A list of messages is one conversation, however many it has; a list of lists has one each."""
    assert conversations(messages) == expected
