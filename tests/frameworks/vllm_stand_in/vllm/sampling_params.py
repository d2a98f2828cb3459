"""How to sample."""

from __future__ import annotations

from typing import Any


class SamplingParams:
    """As TRL makes them."""

    def __init__(self, max_tokens: int, **_: Any) -> None:
        self.max_tokens = max_tokens


class StructuredOutputsParams:
    """Nobody asks for any."""
