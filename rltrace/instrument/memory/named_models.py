"""Whose a model is, where a framework has a name for it: its trainer's `ref_model` is the ref.

An instrumentation says so wherever its framework names a model, sharded or not: `name_models(trainer)`. From there on
the model's parameters, its gradients and what its forwards leave have owners, as those of a sharded model have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rltrace.instrument.memory.sharded_models import MODELS
from rltrace.instrument.memory.work import ACTOR, CRITIC, REF, REWARD

OF_TRAINERS: Mapping[str, str] = {
    "model": ACTOR,
    "policy_model": ACTOR,
    "ref_model": REF,
    "teacher_model": REF,
    "value_model": CRITIC,
    "critic_model": CRITIC,
    "reward_model": REWARD,
    "reward_funcs": REWARD,
}
"""Whose the models are that trainers have as attributes of these names; a teacher is compared with, as a ref is."""


def name_models(holder: Any, subjects: Mapping[str, str] = OF_TRAINERS) -> None:
    """Say whose the models are that an object has as attributes now; those that come later are named by a later call.

    Args:
        holder: Such as a trainer.
        subjects: `actor`, `ref`, `critic` or `reward`, by the attribute's name; it may have several models in a list.
    """
    for attribute, subject in subjects.items():
        for module in modules_in(getattr(holder, attribute, None)):
            MODELS.meet_named(module, subject)


def modules_in(value: Any) -> Iterator[Any]:
    """Return what of a value is a module: itself, or those of its items that are one."""
    torch = sys.modules.get("torch")
    items = value if isinstance(value, (list, tuple)) else (value,)
    return (item for item in items if torch is not None and isinstance(item, torch.nn.Module))
