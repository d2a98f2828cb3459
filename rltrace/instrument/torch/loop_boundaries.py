"""Tells those who watch memory of the boundaries of phases that a reader will infer, while the loop runs.

A reader knows the whole run. Here only what begins now is known, which is enough for a look at memory before it, and
after what came before. If a hook or the program marks phases itself, this says nothing.
"""

from __future__ import annotations

from rltrace.hooks import boundaries
from rltrace.hooks.boundaries import Boundary

GENERATION, LOG_PROBS, UPDATE = "rollout.generate", "actor.old_log_prob", "actor.update"


class LoopBoundaries:
    """The phase that this process seems to be in."""

    def __init__(self) -> None:
        self._phase: tuple[str, int] = ("", 0)

    def begins(self, phase: str, model: int = 0) -> None:
        """Begin something of a phase.

        Log-probs of another model are another phase; inside of an update they are a part of it.
        """
        if not boundaries.WATCHERS or boundaries.are_told() or (phase, model) == self._phase:
            return
        if (phase == LOG_PROBS and self._phase[0] == UPDATE) or is_capturing():
            return
        self.ends()
        boundaries.inferred(Boundary((phase,), is_end=False))
        self._phase = phase, model

    def ends(self) -> None:
        """End the phase, which is over as far as anybody can tell."""
        phase, self._phase = self._phase[0], ("", 0)
        if phase and not is_capturing():
            boundaries.inferred(Boundary((phase,)))


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured; then nobody may ask the device anything."""
    import torch

    capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
    return bool(torch.cuda.is_initialized() and capturing is not None and capturing())


BOUNDARIES = LoopBoundaries()
