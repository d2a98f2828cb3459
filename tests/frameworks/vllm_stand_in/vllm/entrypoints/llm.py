"""The engine as its caller sees it; vLLM's own needs a GPU to sleep."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

CALLS: list[Any] = []
"""What was asked of the engine, in order."""
ON_START: list[Callable[[], None]] = []
"""Called where the engine is made."""
LOAD_SECONDS = 0.005
MOVE_SECONDS = 0.01

RequestOutput = SimpleNamespace


class Model:
    """Takes weights one by one."""

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        CALLS.extend(("load", name) for name, _ in weights)
        time.sleep(LOAD_SECONDS)


class LLM:
    """An engine that may sleep."""

    def __init__(self, **_: Any) -> None:
        for call in ON_START:
            call()
        runner = SimpleNamespace(model=Model())
        worker = SimpleNamespace(model_runner=runner)
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def wake_up(self, tags: list[str] | None = None) -> None:
        CALLS.append(("wake_up", tags))
        time.sleep(MOVE_SECONDS)

    def sleep(self, level: int = 1) -> None:
        CALLS.append(("sleep", level))
        time.sleep(MOVE_SECONDS)

    def reset_prefix_cache(self) -> None:
        """There is none."""

    def generate(self, prompts: list[Any], sampling_params: Any, use_tqdm: bool) -> list[RequestOutput]:
        return [answer(prompt["prompt_token_ids"], sampling_params.max_tokens) for prompt in prompts]


def answer(prompt: list[int], tokens: int) -> RequestOutput:
    """Tokens at random, with log-probs of that."""
    ids = [random.randrange(2, 64) for _ in range(tokens)]
    logprobs = [{token: SimpleNamespace(logprob=-4.0, rank=1)} for token in ids]
    return RequestOutput(prompt_token_ids=prompt, outputs=[SimpleNamespace(token_ids=ids, logprobs=logprobs)])
