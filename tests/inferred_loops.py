"""Literal spans of a loop that marks no steps, as the hooks on torch record them."""

from __future__ import annotations

from recordings import span

EMITS = [
    "model.generate", "model.forward", "autograd.backward", "optimizer.step", "gpu.optimizer.step",
    "model.load_weights", "host.work", "recording.detail",
]  # fmt: skip
HOOK = {
    "instrumentation": "torch_models", "target": "torch:nn.Module.__call__", "state": "installed", "slot": 1,
    "reason": None, "emits": EMITS, "fires": 9,
}  # fmt: skip
ACTOR, REF, CRITIC = 1, 2, 3


def generate(start: float, end: float | None, model: int = ACTOR):
    return span("model.generate", start, end, by="transformers", model=model)


def forward(start: float, end: float, model: int = ACTOR, *, gradient: bool = False, columns: int = 9, module="Model"):
    said = {"gradient": True} if gradient else {}
    return span("model.forward", start, end, model=model, module=module, rows=2, columns=columns, **said)


def learn(start: float, number: int = 1, models: tuple[int, ...] = (ACTOR,), *, model: int = ACTOR):
    """A forward, a backward and a step of an optimizer, in 3 seconds."""
    return [
        *forward(start, start + 1, model, gradient=True),
        *span("autograd.backward", start + 1, start + 2),
        *span("optimizer.step", start + 2, start + 3, optimizer="AdamW", tensors=9, number=number, models=[*models]),
    ]
