"""peft: which model computes without its adapters, as the reference policy of a run with LoRA does.

Source read: peft 0.7, 0.14 and 0.21, peft/peft_model.py.
"""

from __future__ import annotations

from typing import Any

from rltrace.hooks.arguments import keep_self
from rltrace.hooks.patching import PatchSet
from rltrace.instrument.torch.models import MODELS, WITHOUT_ADAPTERS


class Peft:
    """Marks the forwards of a model whose adapters are off."""

    name = "peft"
    supports = ("peft >= 0.7",)

    def install(self, patches: PatchSet) -> None:
        """Name the hook."""
        patches.around("peft.peft_model:PeftModel.disable_adapter", turn_off, turn_on)


def turn_off(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Note the number of the model, which its forwards have too, however it is wrapped."""
    number = MODELS.number(keep_self(args, kwargs))
    WITHOUT_ADAPTERS.append(number)
    return number


def turn_on(number: int | None, _result: Any, _error: BaseException | None) -> None:
    """Forget it."""
    if number in WITHOUT_ADAPTERS:
        WITHOUT_ADAPTERS.remove(number)
