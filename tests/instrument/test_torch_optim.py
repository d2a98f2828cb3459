"""What is watched around an optimizer's step nests."""

from __future__ import annotations

from typing import Any

import pytest

from rltrace.hooks.hook import Hook
from rltrace.instrument.torch.optim import watch_optimizer_steps

torch = pytest.importorskip("torch")


class Said:
    """Says when it is entered and left."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def __enter__(self) -> Said:
        self.said.append(f"{self.name} begins")
        return self

    def __exit__(self, *_: object) -> None:
        self.said.append(f"{self.name} ends")


def watch(name: str, said: list[str], **options: Any) -> Any:
    hook = Hook("test", "torch.optim.optimizer:register_optimizer_step_pre_hook")
    hook.bind(on=True)
    return watch_optimizer_steps(hook, lambda *_, **__: Said(name, said), **options)


def test_look_is_no_time_of_the_step() -> None:
    """Who looks at memory around a step does so outside of the span and of the GPU's time, installed behind them."""
    said: list[str] = []
    undo = [watch("span", said), watch("look", said, outermost=True)]
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=0.1).step()
    for take_back in undo:
        take_back()
    assert said == ["look begins", "span begins", "span ends", "look ends"]
