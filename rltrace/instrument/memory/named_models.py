"""Says whose a model is where a framework has a name for it: a trainer's `ref_model` is the ref.

An instrumentation calls `name_models(trainer)` wherever its framework names a model, sharded or not. From then on the
model's parameters, its gradients and what its forwards leave have owners, as those of a sharded model have.
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
"""Whose model a trainer's attribute of this name is. A teacher counts as a ref, because both are compared with."""


def name_models(holder: Any, subjects: Mapping[str, str] = OF_TRAINERS) -> None:
    """Say whose models an object has as attributes now; a later call names those that come later.

    Args:
        holder: The object, such as a trainer.
        subjects: `actor`, `ref`, `critic` or `reward`, by the attribute's name. The attribute may be a list of models.
    """
    for attribute, subject in subjects.items():
        for module in modules_in(getattr(holder, attribute, None)):
            MODELS.meet_named(module, subject)


def modules_in(value: Any) -> Iterator[Any]:
    """Return the modules in a value: the value itself, or its items."""
    torch = sys.modules.get("torch")
    items = value if isinstance(value, (list, tuple)) else (value,)
    return (item for item in items if torch is not None and isinstance(item, torch.nn.Module))
